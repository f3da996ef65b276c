"""Limits of use and claimed keys in Redis: one script call for all limits of a request."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.errors import StoreError
from extproc.govern.quotas import Claim, Correction, Draw, Take, Taken
from extproc.state.nodes import OneNode
from extproc.state.redis_calls import RedisCalls, unpacked

_WINDOWS: Final = {"minute": 0, "day": 1, "month": 2}

_pack = msgspec.msgpack.Encoder().encode
_read_taken = msgspec.msgpack.Decoder(tuple[bool, float, list[float]]).decode


class RedisQuota(RedisCalls):
    """Buckets and claims."""

    async def take(self, ask: Take) -> Taken:
        """See `QuotaStore.take`. One server decides on all shards at once; in a cluster they are asked side by side."""
        groups = self._groups(ask.draws)
        if len(groups) == 1:
            return await self._quota(groups[0], 0.0)
        answers = await asyncio.gather(*(self._quota(each, 0.0) for each in groups), return_exceptions=True)
        told = [each for each in answers if isinstance(each, Taken)]
        allowed = all(each.allowed for each in told)
        if len(told) < len(answers) or not allowed:
            await self._give_back(groups, answers)
        for each in answers:
            if isinstance(each, BaseException):
                raise each
        levels = {
            (draw.shard, draw.bucket): level if allowed or not answer.allowed else level - draw.amount
            for group, answer in zip(groups, told, strict=True)
            for draw, level in zip(group, answer.levels, strict=True)
        }
        # The latest of their clocks: to one that is behind, a correction must not seem older than what it corrects.
        at = max(each.at for each in told)
        return Taken(allowed, at, [levels[each.shard, each.bucket] for each in ask.draws])

    async def _give_back(self, groups: Sequence[Sequence[Draw]], answers: Sequence[Taken | BaseException]) -> None:
        """Undo what some shards allowed, because others did not; those that do not answer now keep it."""
        undone = [
            self._quota([msgspec.structs.replace(draw, amount=-draw.amount) for draw in group], answer.at)
            for group, answer in zip(groups, answers, strict=True)
            if isinstance(answer, Taken) and answer.allowed
        ]
        for failed in await asyncio.gather(*undone, return_exceptions=True):
            if isinstance(failed, BaseException) and not isinstance(failed, StoreError):
                raise failed

    async def correct(self, correction: Correction) -> None:
        """See `QuotaStore.correct`."""
        await asyncio.gather(*(self._quota(each, correction.at) for each in self._groups(correction.draws)))

    def _groups(self, draws: Sequence[Draw]) -> Sequence[Sequence[Draw]]:
        """Draws that one call may name: all of them on one server, in a cluster those of one shard."""
        if isinstance(self._nodes, OneNode):
            return [draws] if draws else []
        by_shard: dict[str, list[Draw]] = {}
        for draw in draws:
            by_shard.setdefault(draw.shard, []).append(draw)
        return list(by_shard.values())

    async def _quota(self, draws: Sequence[Draw], at: float) -> Taken:
        names = [self._keys.pool(draw.shard).quota(draw.bucket) for draw in draws]
        packed = _pack((at, [(draw.amount, draw.most, draw.rate, _WINDOWS[draw.per]) for draw in draws]))
        reply = await self._run("quota", names, packed)
        return Taken(*unpacked(_read_taken, reply, "a request for a share of limits"))

    async def claim(self, claim: Claim) -> bool:
        """See `QuotaStore.claim`."""
        name = self._keys.pool(claim.shard).claim(claim.key)
        return bool(await self._run("claim", [name], claim.token, max(1, claim.lease_ms)) == 1)

    async def unclaim(self, claim: Claim) -> None:
        """See `QuotaStore.unclaim`."""
        await self._run("claim", [self._keys.pool(claim.shard).claim(claim.key)], claim.token, 0)
