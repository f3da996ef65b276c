"""Metrics of exact profiles: how prompts were matched, and what the endpoints hold that have one."""

from typing import Literal

from extproc.telemetry.families import Families

Rung = Literal["precise", "estimated", "load"]
"""How a prompt was matched: by what the engine told of its cache, by what was decided before, or not at all."""


class ExactMetrics:
    """The exact profiles' part of a worker's metrics."""

    def __init__(self, families: Families) -> None:
        self._matched = families.counter(
            "matched_total", "Decisions by how the prompt was matched with the pick.", ("pool", "rung")
        )
        self._blocks = families.gauge(
            "exact_profile_blocks", "Blocks held, by its own word; absent without exact profile.", ("pool", "endpoint")
        )

    def matched(self, pool: str, rung: Rung) -> None:
        """A decision was made."""
        self._matched.at(pool, rung).inc()

    def holds(self, pool: str, endpoint: str, blocks: int | None) -> None:
        """What an endpoint holds; None when it has no exact profile."""
        if blocks is None:
            self._blocks.drop(pool, endpoint)
        else:
            self._blocks.at(pool, endpoint).set(blocks)
