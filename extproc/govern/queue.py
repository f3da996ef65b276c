"""A bounded queue: classes of priority, and within each class tenants that share by deficit round robin over tokens.

Deficit round robin is Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin" (1996): each tenant in
turn is given a quantum of tokens times its weight, and may go on while its first entry costs no more than it has. A
class gets nothing before a higher one but its share, so that it always moves.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

BANDS: Final = ("high", "normal", "low")
"""Classes of priority, the one served first in front."""
QUANTUM: Final = 128.0
"""Tokens that a tenant of weight 1 is given at its turn: about one small request, so that turns are short."""


def band_of(priority: int) -> int:
    """Class of a priority as vLLM means it: below 0 goes first, 0 is normal, above 0 goes last."""
    return 1 + (priority > 0) - (priority < 0)


class Bounds(msgspec.Struct, frozen=True):
    """What a queue holds at most, and the share of tokens that each lower class gets while higher ones wait."""

    max_requests: int
    max_tokens: float
    low_share: float


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One that waits.

    Attributes:
        id: unique in the queue.
        band: index in `BANDS`.
        tenant: whose it is; empty for nobody's.
        tokens: work that it stands for, positive.
        weight: its tenant's share beside other tenants.
        prompt_tokens: of its tokens, those to prefill.
        sequences: answers that it asks for.
    """

    id: int
    band: int
    tenant: str
    tokens: float
    weight: float = 1.0
    prompt_tokens: float = 0.0
    sequences: int = 1


class _Tenant:
    """What one tenant has in a class, oldest first."""

    __slots__ = ("deficit", "entries", "given", "tokens")

    def __init__(self) -> None:
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self.tokens = 0.0
        self.deficit = 0.0
        # Whether it was given its quantum at this turn.
        self.given = False

    @property
    def first(self) -> Entry:
        """The entry whose turn comes first."""
        return next(iter(self.entries.values()))

    @property
    def last(self) -> Entry:
        """The entry that came last."""
        return next(reversed(self.entries.values()))

    def holds_more(self, other: float) -> bool:
        """Whether it would hold at least `other` tokens per weight without its last entry."""
        last = self.last
        return len(self.entries) > 1 and (self.tokens - last.tokens) / last.weight >= other


class FairQueue:
    """Entries that wait.

    Attributes:
        bounds: what it holds at most; may be replaced.
        scale: by tenant, a factor on its weight; 1 where absent. For one of several queues that share a capacity.
        tokens: sum of all entries.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.scale: Mapping[str, float] = {}
        self.tokens = 0.0
        self._entries: dict[int, Entry] = {}
        # In the order of their turns, the tenant whose turn it is in front.
        self._bands: tuple[OrderedDict[str, _Tenant], ...] = tuple(OrderedDict() for _ in BANDS)
        # Tokens that each class may have before a higher one; below 0 what it had more than its share.
        self._credit = [0.0 for _ in BANDS]

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> Sequence[Entry]:
        """Add an entry at the end of its tenant's.

        Returns:
            Those that are out because of it, when the queue is full: entries of lower classes, else the last ones of a
            tenant that holds more than the entry's own; else the entry itself.
        """
        displaced: list[Entry] = []
        while not self._fits(entry):
            victim = self._victim(entry)
            if victim is None:
                for each in reversed(displaced):
                    self._add(each)
                return [entry]
            self._take(victim)
            displaced.append(victim)
        self._add(entry)
        return displaced

    def remove(self, id_: int) -> Entry | None:
        """Take out an entry that no longer waits; None when it is not there."""
        entry = self._entries.get(id_)
        if entry is not None:
            self._take(entry)
        return entry

    def pop(self) -> Entry | None:
        """Take out the entry whose turn it is; None when nobody waits."""
        waiting = [band for band, tenants in enumerate(self._bands) if tenants]
        if not waiting:
            return None
        band = next((each for each in reversed(waiting[1:]) if self._credit[each] > 0.0), waiting[0])
        entry = self._next(self._bands[band])
        self._take(entry)
        self._account(entry)
        return entry

    def demand(self) -> Mapping[tuple[int, str], float]:
        """Tokens that wait, by class and tenant."""
        return {
            (band, name): tenant.tokens for band, tenants in enumerate(self._bands) for name, tenant in tenants.items()
        }

    def requests(self) -> Sequence[int]:
        """How many wait, by class."""
        return [sum(len(tenant.entries) for tenant in tenants.values()) for tenants in self._bands]

    def _fits(self, entry: Entry) -> bool:
        bounds = self.bounds
        return len(self) < bounds.max_requests and self.tokens + entry.tokens <= bounds.max_tokens

    def _victim(self, entry: Entry) -> Entry | None:
        """Who goes for an entry when there is no room; None when nobody should."""
        for band in range(len(BANDS) - 1, entry.band, -1):
            if self._bands[band]:
                return _greatest(self._bands[band].values()).last
        tenants = self._bands[entry.band]
        if not tenants:
            return None
        greatest, own = _greatest(tenants.values()), tenants.get(entry.tenant)
        held = ((own.tokens if own else 0.0) + entry.tokens) / entry.weight
        return greatest.last if greatest is not own and greatest.holds_more(held) else None

    def _add(self, entry: Entry) -> None:
        tenant = self._bands[entry.band].setdefault(entry.tenant, _Tenant())
        tenant.entries[entry.id] = self._entries[entry.id] = entry
        tenant.tokens += entry.tokens
        self.tokens += entry.tokens

    def _take(self, entry: Entry) -> None:
        tenants = self._bands[entry.band]
        tenant = tenants[entry.tenant]
        del tenant.entries[entry.id], self._entries[entry.id]
        tenant.tokens -= entry.tokens
        self.tokens -= entry.tokens
        if not tenant.entries:
            # What it had left is lost: who has nothing to send saves nothing up.
            del tenants[entry.tenant]
        if not self._entries:
            self.tokens = 0.0

    def _next(self, tenants: OrderedDict[str, _Tenant]) -> Entry:
        """The entry of the tenant whose turn it is, paid for."""
        for _ in range(2):
            for _ in range(len(tenants)):
                name, tenant = next(iter(tenants.items()))
                if not tenant.given:
                    tenant.deficit, tenant.given = tenant.deficit + self._quantum(name, tenant), True
                if tenant.deficit >= tenant.first.tokens:
                    tenant.deficit -= tenant.first.tokens
                    return tenant.first
                tenant.given = False
                tenants.move_to_end(name)
            # Nobody can pay yet: the rounds in which nobody could are made at once.
            rounds = min(self._rounds(name, tenant) for name, tenant in tenants.items())
            for name, tenant in tenants.items():
                tenant.deficit += max(0, rounds - 1) * self._quantum(name, tenant)
        # Rounding left the cheapest one a fraction short.
        return min((tenant.first for tenant in tenants.values()), key=lambda each: each.tokens)

    def _quantum(self, name: str, tenant: _Tenant) -> float:
        return QUANTUM * tenant.first.weight * max(self.scale.get(name, 1.0), 1e-6)

    def _rounds(self, name: str, tenant: _Tenant) -> int:
        return math.ceil((tenant.first.tokens - tenant.deficit) / self._quantum(name, tenant))

    def _account(self, entry: Entry) -> None:
        """Every lower class earns its share of what was taken out; the one that had it pays."""
        for band in range(1, len(BANDS)):
            earned = self._credit[band] + self.bounds.low_share * entry.tokens
            # Who does not wait saves nothing up, and pays back what it had too much.
            waits = band == entry.band or self._bands[band]
            self._credit[band] = earned if waits else min(0.0, earned)
        if entry.band:
            self._credit[entry.band] -= entry.tokens


def _greatest(tenants: Iterable[_Tenant]) -> _Tenant:
    """The tenant that holds most per weight."""
    return max(tenants, key=lambda each: each.tokens / each.first.weight)
