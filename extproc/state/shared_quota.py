"""Limits of use and claimed keys while the shared store may be gone.

Without it each process allows its share of every limit, by what it took itself: all processes together allow about the
limit, and less when their clients are spread unevenly. A single request larger than that share waits for an empty
bucket and then overdraws it, or it would be refused for as long as the store is gone. Keys are known to the
process that has them alone.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from extproc.errors import StoreError
from extproc.govern import quotas
from extproc.govern.quotas import Claim, Correction, Draw, Take, Taken
from extproc.state.shared_only import SharedOnly
from extproc.state.sharing import Sharing
from extproc.state.trouble import AnsweredError, trouble_of

log = logging.getLogger(__name__)


class SharedQuota(SharedOnly):
    """The verbs of `QuotaStore`.

    A shard has a circuit of its own, because in a cluster it has a node of its own. It opens that of the request's pool
    with it, and is not asked while that is open: a request that waited for one in vain does not wait for the other.
    """

    async def take(self, ask: Take) -> Taken:
        """See `QuotaStore.take`."""
        sharings = self._sharings_of([draw.shard for draw in ask.draws], ask.pool)
        if not _open(sharings):
            try:
                taken = await sharings[0].ask(self._primary.take(ask))
            except StoreError as error:
                _trip(sharings, error)
                log.debug("taken of this process' share")
            else:
                if taken.allowed:
                    self._tools.local.used([quotas.alone(draw, ask.share) for draw in ask.draws])
                return taken
        return await self._take_alone([quotas.alone(draw, ask.share) for draw in ask.draws])

    async def _take_alone(self, draws: Sequence[Draw]) -> Taken:
        """Take of this process' share; what is more than all of it is taken as all of it, and owed."""
        local = self._tools.local
        clipped = [msgspec.structs.replace(draw, amount=min(draw.amount, draw.most)) for draw in draws]
        taken = await local.take(Take(clipped))
        if not taken.allowed:
            return Taken(False, taken.at, taken.levels, local=True)
        rest = [draw.amount - less.amount for draw, less in zip(draws, clipped, strict=True)]
        local.used([msgspec.structs.replace(draw, amount=more) for draw, more in zip(draws, rest, strict=True) if more])
        levels = [level + more for level, more in zip(taken.levels, rest, strict=True)]
        return Taken(True, taken.at, levels, local=True)

    async def correct(self, correction: Correction) -> None:
        """See `QuotaStore.correct`.

        Raises:
            StoreError: the shared store was not told, or may not have been; it is not told later, because it might be
                told twice.
        """
        if correction.own:
            await self._tools.local.correct(Correction(correction.at, correction.own))
        if not correction.draws:
            return
        sharings = self._sharings_of([draw.shard for draw in correction.draws], "")
        for sharing in sharings:
            sharing.require()
        try:
            await sharings[0].ask(self._primary.correct(correction))
        except StoreError as error:
            _trip(sharings, error)
            raise

    async def claim(self, claim: Claim) -> bool:
        """See `QuotaStore.claim`."""
        if not await self._tools.local.claim(claim):
            return False
        sharings = self._sharings_of([claim.shard], claim.pool)
        if _open(sharings):
            return True
        try:
            claimed = await sharings[0].ask(self._primary.claim(claim))
        except StoreError as error:
            _trip(sharings, error)
            return True
        except asyncio.CancelledError:
            await self._tools.local.unclaim(claim)
            raise
        if not claimed:
            await self._tools.local.unclaim(claim)
        return claimed

    async def unclaim(self, claim: Claim) -> None:
        """See `QuotaStore.unclaim`.

        Raises:
            StoreError: the shared store was not told; telling it again does no harm.
        """
        await self._tools.local.unclaim(claim)
        sharing = self._sharing(claim.shard)
        sharing.require()
        await sharing.ask(self._primary.unclaim(claim))

    def _sharings_of(self, shards: Sequence[str], pool: str) -> list[Sharing]:
        names = dict.fromkeys(shards)
        if pool:
            names[pool] = None
        return [self._sharing(name) for name in names]


def _open(sharings: Sequence[Sharing]) -> bool:
    return any(each.circuit.open for each in sharings)


def _trip(sharings: Sequence[Sharing], error: StoreError) -> None:
    """Open the other circuits too, unless the store answered."""
    if not isinstance(error, AnsweredError):
        for other in sharings[1:]:
            other.trip(trouble_of(error))
