"""The section `overload` of `warmpath.yaml`."""

from extproc.config_base import Section


class Overload(Section, frozen=True, kw_only=True):
    """What happens to requests when every endpoint of a pool is saturated."""
