"""Who may hear of what goes on inside an engine: its cache and its steps."""

from typing import Protocol

from extproc.sim.sequence import Sequence


class PoolWatch(Protocol):
    """Who hears that blocks can no longer be found."""

    def removed(self, block_hash: int) -> None:
        """A block that held `block_hash` was taken for something else; another block may still hold it."""
        ...

    def cleared(self) -> None:
        """Every hash was forgotten."""
        ...


class BlockWatch(PoolWatch, Protocol):
    """Who hears everything that happens to the cache."""

    def stored(self, sequence: Sequence, start: int, stop: int) -> None:
        """The blocks `start` to `stop` (exclusive) of `sequence` became findable."""
        ...

    def step_ended(self) -> None:
        """What was heard since the last call happened in one step, which is over."""
        ...


class StepWatch(Protocol):
    """Who hears of every step."""

    def stepped(self, batch: list[Sequence], began: float, end: float) -> None:
        """A step over `batch` is over, and the gauges tell what is after it. Moments are engine seconds."""
        ...

    def idle(self) -> None:
        """There is nothing to do; the gauges say so."""
        ...
