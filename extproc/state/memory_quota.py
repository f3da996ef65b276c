"""Limits of use and claimed keys in one process."""

from collections.abc import Sequence

from extproc.clock import Clock
from extproc.govern import quotas
from extproc.govern.quotas import Bucket, Claim, Correction, Draw, Take, Taken

_SWEPT_FROM = 1000
"""Buckets, and keys, up to which nobody looks for those that are of no use any more."""


class MemoryQuota:
    """Buckets and claims in plain dictionaries; time by the calendar from `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._used: dict[tuple[str, str], tuple[Bucket, Draw]] = {}
        self._claims: dict[tuple[str, str], tuple[str, float]] = {}
        self._sweep_used_at = self._sweep_claims_at = _SWEPT_FROM

    async def take(self, ask: Take) -> Taken:
        """See `QuotaStore.take`."""
        now = self._clock.wall()
        allowed, buckets = quotas.taken(ask.draws, [self._standing(draw, now) for draw in ask.draws], now)
        if allowed:
            self._put(ask.draws, buckets)
        return Taken(allowed, now, [each.level for each in buckets])

    def used(self, draws: Sequence[Draw]) -> None:
        """Count what others allowed."""
        now = self._clock.wall()
        standing = [self._standing(draw, now) for draw in draws]
        self._put(draws, [Bucket(b.level + draw.amount, now, b.busy) for draw, b in zip(draws, standing, strict=True)])

    async def correct(self, correction: Correction) -> None:
        """See `QuotaStore.correct`."""
        now = self._clock.wall()
        for draw in correction.draws:
            bucket = quotas.corrected(draw, self._standing(draw, now), correction.at)
            if bucket is not None:
                self._put([draw], [bucket])

    def _standing(self, draw: Draw, now: float) -> Bucket:
        known = self._used.get((draw.shard, draw.bucket))
        return quotas.standing(known[0] if known else None, draw, now)

    def _put(self, draws: Sequence[Draw], buckets: Sequence[Bucket]) -> None:
        for draw, bucket in zip(draws, buckets, strict=True):
            self._used[draw.shard, draw.bucket] = bucket, draw
        if len(self._used) > self._sweep_used_at:
            now = self._clock.wall()
            for key, (bucket, draw) in list(self._used.items()):
                if quotas.standing(bucket, draw, now).level <= 0.0:
                    del self._used[key]
            self._sweep_used_at = max(_SWEPT_FROM, 2 * len(self._used))

    async def claim(self, claim: Claim) -> bool:
        """See `QuotaStore.claim`."""
        now, key = self._clock.monotonic(), (claim.shard, claim.key)
        holder, until = self._claims.get(key, ("", 0.0))
        if holder != claim.token and now < until:
            return False
        self._claims[key] = claim.token, now + claim.lease_ms / 1000
        if len(self._claims) > self._sweep_claims_at:
            self._claims = {each: held for each, held in self._claims.items() if now < held[1]}
            self._sweep_claims_at = max(_SWEPT_FROM, 2 * len(self._claims))
        return True

    async def unclaim(self, claim: Claim) -> None:
        """See `QuotaStore.unclaim`."""
        if self._claims.get((claim.shard, claim.key), ("", 0.0))[0] == claim.token:
            del self._claims[claim.shard, claim.key]
