"""Warmpath: an Envoy external processor that routes LLM requests to the engine with the warmest path."""

__version__ = "0.1.0"
