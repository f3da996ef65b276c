"""Recorded and generated traffic, replayed through the code that decides on live requests."""
