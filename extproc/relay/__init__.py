"""Streams that outlive the engine that serves them: cut into events, joined across engines, sent on."""
