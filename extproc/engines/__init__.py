"""Reading engines: each kind's own pages and names behind one contract."""
