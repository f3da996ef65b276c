"""What an endpoint's cache really holds, learnt from the cached tokens it reports.

An engine's prefix cache is an LRU list, so one block that is missing dates the eviction: whatever was last used before
that block is gone too, and the cache holds no more blocks than were used after it. The claimed size says less: running
sequences and their answers fill a part of it, and requests that bypassed the router another.
"""

from collections import OrderedDict

import msgspec

LEAST_SHARE = 0.05
_DOWN = 0.5
_UP = 1.05
_REMEMBERED = 1024


class CapacityShare:
    """Share of its claimed cache that an endpoint keeps for prefixes, 0.05 to 1.

    Falls half of the way to each proof of less and rises by a twentieth with each proof of more, so that it settles
    where both are equally rare.
    """

    def __init__(self) -> None:
        self.share = 1.0

    def at_most(self, share: float) -> None:
        """A block was missing although fewer than this share of the capacity was used after it."""
        if share < self.share:
            self.share = max(LEAST_SHARE, self.share + _DOWN * (share - self.share))

    def more(self) -> bool:
        """Blocks were cached that a profile of this size had evicted; returns whether that changed anything."""
        grown = min(1.0, self.share * _UP)
        changed = grown > self.share
        self.share = grown
        return changed

    def told(self, share: float) -> None:
        """Take over what another replica came to."""
        if share > 0.0:
            self.share = min(max(share, LEAST_SHARE), 1.0)


class Prefills:
    """Which requests of an endpoint were over when, by its profile's clock.

    A block whose last use was a prompt still in prefill may be missing because it is not computed yet, which proves
    nothing of the cache. The newest 1,024 requests are remembered; an older one is over.
    """

    def __init__(self) -> None:
        self._prefills: OrderedDict[str, _Prefill] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefills)

    def began(self, charge_id: str, before: int, after: int) -> None:
        """A decision touched blocks: the profile's clock before and after that."""
        self._prefills[charge_id] = _Prefill(before, after)
        if len(self._prefills) > _REMEMBERED:
            self._prefills.popitem(last=False)

    def ended(self, charge_id: str, clock: int) -> None:
        """Its answer is finished, or it will get none; `clock` is the profile's clock at this moment."""
        use = self._prefills.get(charge_id)
        if use is not None:
            use.ended = clock

    def over(self, stamp: int, clock: int) -> bool:
        """Whether the use that left `stamp` on a block was over when the profile's clock showed `clock`."""
        use = next((use for use in self._prefills.values() if use.before < stamp <= use.after), None)
        return use is None or (use.ended is not None and use.ended <= clock)


class _Prefill(msgspec.Struct, gc=False):
    before: int
    after: int
    ended: int | None = None
