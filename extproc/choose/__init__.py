"""The decision as plain functions of values: no I/O, no clock, no randomness of its own. Never imports state."""
