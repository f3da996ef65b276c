"""The section `relay` of `warmpath.yaml`."""

from extproc.config_base import Section


class Relay(Section, frozen=True, kw_only=True):
    """Streams that outlive the engine that serves them."""
