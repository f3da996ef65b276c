"""The keeper's work: who is in the fleet, how each endpoint is, and telling the others."""
