"""The data-parallel ranks behind one HTTP port: each an engine with its own batch, cache, clock and events."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from extproc.sim.engine import Engine
from extproc.sim.pacer import Pacer, Schedule
from extproc.sim.refusals import Refusal
from extproc.sim.settings import SimSettings
from extproc.sim.wire import Request

_HEADER = b"x-data-parallel-rank"
_WAITING_WEIGHT = 4
"""How much more a waiting request weighs than a running one when vLLM picks a rank."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One engine core.

    Attributes:
        index: from 0.
        pacer: its time.
    """

    index: int
    pacer: Pacer

    @property
    def engine(self) -> Engine:
        """Its batch and cache."""
        return self.pacer.engine


class Ranks:
    """All ranks of an engine, from its start to its end. They sleep, freeze and forget together."""

    def __init__(self, settings: SimSettings, clock: Callable[[], float], schedule: Schedule) -> None:
        self._ranks = [
            Rank(index, Pacer(Engine(settings.engine), clock, schedule, settings.time_factor))
            for index in range(settings.dp_ranks)
        ]
        # TensorRT-LLM spreads requests over its ranks by itself.
        self._header = b"" if settings.about.engine == "trtllm" else _HEADER
        self._turn = 0

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def first(self) -> Rank:
        """The rank that a small engine consists of."""
        return self._ranks[0]

    @property
    def live(self) -> int:
        """Sequences that are running, waiting or just arrived."""
        return sum(rank.engine.live for rank in self._ranks)

    @property
    def queued(self) -> int:
        """Sequences that have not been admitted."""
        return sum(rank.engine.queued for rank in self._ranks)

    def pick(self, request: Request) -> Rank:
        """Return the rank that `request` names in its header, else the least loaded; equals take turns.

        Raises:
            Refusal: 400, there is no such rank. A header that is no number is ignored, as vLLM does.
        """
        named = request.headers.get(self._header, b"").strip()
        if named.lstrip(b"-").isdigit():
            wanted = int(named)
            if not 0 <= wanted < len(self._ranks):
                text = f"data_parallel_rank {wanted} is out of range [0, {len(self._ranks)})."
                raise Refusal(400, "BadRequestError", text)
            return self._ranks[wanted]
        self._turn += 1
        turns = range(self._turn, self._turn + len(self._ranks))
        return min((self._ranks[n % len(self._ranks)] for n in turns), key=_load)

    def freeze(self) -> None:
        """Stop time."""
        for rank in self._ranks:
            rank.pacer.freeze()

    def thaw(self) -> None:
        """Let time go on."""
        for rank in self._ranks:
            rank.pacer.thaw()

    def drop_all(self) -> None:
        """End every sequence as "abort"."""
        for rank in self._ranks:
            rank.pacer.drop_all()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False if some rank could not, because its blocks are in use."""
        done = [rank.engine.reset_prefix_cache() for rank in self._ranks]
        return all(done)

    def stop(self) -> None:
        """Nothing happens any more."""
        for rank in self._ranks:
            rank.pacer.stop()


def _load(rank: Rank) -> int:
    engine = rank.engine
    return engine.live + (_WAITING_WEIGHT - 1) * engine.queued
