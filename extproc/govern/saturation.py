"""When the endpoints of a pool are saturated, and how much more they may be sent before they are.

An engine's page is a quarter of a second old, the fleet's ledger is not. The page tells how many requests an engine
works on at once (its batch) when it is saturated; the ledger tells how many it has now. What is beyond the batch waits.
Where the page is missing or old, the ledger and the last batch go on; where no batch was ever seen, nothing of this
kind makes an endpoint saturated.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

_FORGET_S: Final = 30.0
"""A batch of which nothing was seen for so long may be that of other prompts: it counts no more."""
_DECAY_S: Final = 5.0
"""A batch that was larger a moment ago is believed that long: it swings as answers end together."""
_GROWTH: Final = 1.25
"""An engine that runs more than its batch was thought to be gets so much more room at each look."""


class Thresholds(msgspec.Struct, frozen=True):
    """When an endpoint is saturated; see `config_overload.Saturation`."""

    waiting: int
    kv_usage: float
    backlog_ms: float


class Member(msgspec.Struct, frozen=True, gc=False):
    """One endpoint that may serve, now.

    Attributes:
        id: endpoint id.
        in_flight: sequences that it has, by the ledger and by its own page.
        backlog_tokens: prompt tokens charged to it and not prefilled yet, by the ledger.
        rate: tokens a second that it prefills; positive.
        waiting: requests in its queue by its last page; 0 where that is old.
        kv_usage: share of its KV cache in use by its last page; 0 where that is old.
        silent: it stands still, or nobody has been able to read it for long.
    """

    id: str
    in_flight: int
    backlog_tokens: float
    rate: float
    waiting: int = 0
    kv_usage: float = 0.0
    silent: bool = False


class Room(msgspec.Struct, frozen=True, gc=False):
    """What a pool may be sent before all of it is saturated.

    Attributes:
        sequences: sequences more; infinite where no bound is known.
        tokens: prompt tokens more.
        limit: sequences that it may have in flight.
        saturated: endpoints without room.
        waiting: sequences beyond the batches of the engines.
        near: less than half of the room is left somewhere, or some endpoint has none: look again before sending.
    """

    sequences: float
    tokens: float
    limit: float
    saturated: int
    waiting: float
    near: bool

    @property
    def open(self) -> bool:
        """Whether some endpoint can take one more."""
        return self.sequences > 0.0 and self.tokens > 0.0


def full_by_page(waiting: int, kv_usage: float, limits: Thresholds) -> bool:
    """Whether an engine is saturated by what its page shows."""
    return waiting >= limits.waiting or (waiting > 0 and kv_usage >= limits.kv_usage)


UNKNOWN: Final = Room(math.inf, math.inf, math.inf, 0, 0.0, near=False)
"""Room of a pool of which nothing is known: nobody is refused for that."""


class Batches:
    """How many sequences each endpoint of a pool works on at once, as far as its pages have shown."""

    def __init__(self) -> None:
        # Batch, when it was last seen, and when that proved to be all that the engine can do.
        self._known: dict[str, tuple[float, float, float]] = {}

    def saw(self, endpoint: str, running: int, waiting: int, now: float, *, full: bool) -> None:
        """An engine's page was read.

        Args:
            endpoint: whose.
            running: how many run there; with nothing that waits either, the page is no news.
            waiting: how many wait there. One that waits behind a long prompt does not show yet how many could run.
            now: when, by a clock that never goes back.
            full: by this page the engine is saturated.
        """
        known = self._known.get(endpoint)
        batch, seen, proved = known or (0.0, now, now)
        if running > 0 and (full or (waiting > 0 and known is not None)):
            held = running + (batch - running) * math.exp(-(now - seen) / _DECAY_S)
            self._known[endpoint] = max(float(running), held), now, now
        elif known is not None and running > batch:
            self._known[endpoint] = running * _GROWTH, now, proved

    def keep(self, endpoints: Collection[str], now: float) -> None:
        """Forget all endpoints but these, and what is too old."""
        for name, (_, _, proved) in list(self._known.items()):
            if name not in endpoints or now - proved > _FORGET_S:
                del self._known[name]

    def of(self, endpoints: Iterable[str]) -> Mapping[str, float]:
        """Batch of each endpoint; of one that was not seen yet the mean of the others, infinite without any."""
        names = list(endpoints)
        known = [self._known[name][0] for name in names if name in self._known]
        mean = sum(known) / len(known) if known else math.inf
        return {name: self._known[name][0] if name in self._known else mean for name in names}


def room(members: Sequence[Member], batches: Mapping[str, float], limits: Thresholds) -> Room:
    """What the endpoints that may serve can still take, each for itself.

    Args:
        members: those endpoints. One that is silent is no room for anybody while others are not: all silent, nothing is
            known.
        batches: how many sequences each works on at once.
        limits: when one is saturated.
    """
    heard = [member for member in members if not member.silent]
    if not heard:
        return UNKNOWN
    sequences = tokens = limit = waiting = 0.0
    saturated, near = len(members) - len(heard), False
    for member in heard:
        batch = batches[member.id]
        tight = member.kv_usage >= limits.kv_usage and member.waiting > 0
        may_have = batch + (1 if tight else limits.waiting)
        most_tokens = limits.backlog_ms / 1000.0 * member.rate
        free, free_tokens = may_have - member.in_flight, most_tokens - member.backlog_tokens
        limit += may_have
        waiting += max(0.0, member.in_flight - batch)
        near = near or math.isfinite(batch) or free_tokens < most_tokens / 2
        if free > 0.0 and free_tokens > 0.0:
            sequences, tokens = sequences + free, tokens + free_tokens
        else:
            saturated += 1
    return Room(sequences, tokens, limit, saturated, waiting, near)
