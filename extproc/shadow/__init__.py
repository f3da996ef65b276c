"""Shadow traffic: which requests are sent again, to whom, and what both answers are compared by."""
