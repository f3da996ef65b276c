"""The section `breakers` of `warmpath.yaml`."""

from extproc.config_base import Section


class Breakers(Section, frozen=True, kw_only=True):
    """When an endpoint is left alone because of how it answers."""
