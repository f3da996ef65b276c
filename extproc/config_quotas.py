"""The section `rate_limits` of `warmpath.yaml`."""

from extproc.config_base import Section


class RateLimits(Section, frozen=True, kw_only=True):
    """How much each tenant may use."""
