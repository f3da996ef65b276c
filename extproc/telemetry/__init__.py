"""Metrics and logs; knows nothing of requests beyond numbers and bounded labels."""
