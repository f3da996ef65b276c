"""Carries streams that outlive the engine that serves them."""
