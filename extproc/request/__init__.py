"""Bytes of an API call into one `Request`, and its prompt into chained block hashes. No I/O, no clock."""
