"""What a `RedisStore` publishes of endpoints, their breakers, and the work that its holders share."""

import contextlib
from collections.abc import Collection, Mapping, Sequence

import msgspec

from extproc.errors import StoreError
from extproc.govern.breaker import Verdict
from extproc.state.redis_calls import RedisCalls, data, number, unpacked
from extproc.state.values import Breaker, BreakerRules

_pack = msgspec.msgpack.Encoder().encode
_read_breaker = msgspec.msgpack.Decoder(tuple[str, int, int, float]).decode
_read_breakers = msgspec.msgpack.Decoder(dict[str, tuple[str, int, int, float]]).decode
_read_holding = msgspec.msgpack.Decoder(tuple[list[str], list[str]]).decode


class RedisBoard(RedisCalls):
    """States of endpoints, breakers and holdings."""

    async def put_states(self, pool: str, states: Mapping[str, bytes]) -> None:
        """See `Store.put_states`."""
        if states:
            key, flat = self._keys.pool(pool).states, [part for pair in states.items() for part in pair]
            await self._write(key, ("HSET", key, *flat))

    async def drop_states(self, pool: str, endpoints: Collection[str]) -> None:
        """See `Store.drop_states`."""
        if endpoints:
            key = self._keys.pool(pool).states
            await self._ask(key, ("HDEL", key, *endpoints))

    async def states(self, pool: str) -> Mapping[str, bytes]:
        """See `Store.states`."""
        fields = await self._fields(self._keys.pool(pool).states)
        return {name: data(value) for name, value in fields}

    async def hold(self, pool: str, group: str, holder: str, names: Collection[str], lease_ms: int) -> Collection[str]:
        """See `Store.hold`.

        Names that go to another holder cost a second call, which says that this one heard of it: an answer that is lost
        on its way leaves them unread until the lease that this holder believes in is over, never read twice.
        """
        asked = list(dict.fromkeys(names))
        has, stops = await self._hold(pool, group, (holder, lease_ms, asked, ()))
        if stops:
            with contextlib.suppress(StoreError):
                has, _ = await self._hold(pool, group, (holder, lease_ms, asked, stops))
        return has

    async def _hold(
        self, pool: str, group: str, ask: tuple[str, int, Sequence[str], Sequence[str]]
    ) -> tuple[list[str], list[str]]:
        """Names that the holder has, and those that it has to stop."""
        keys = self._keys.pool(pool)
        reply = await self._run("hold", [keys.holders(group), keys.holdings(group)], _pack(ask))
        return unpacked(_read_holding, reply, "a question for shared work")

    async def judge(self, pool: str, endpoint: str, verdict: Verdict, rules: BreakerRules) -> Breaker:
        """See `Store.judge`."""
        packed = _pack(("judge", endpoint, verdict, rules.strikes, rules.open_ms, rules.max_open_ms))
        reply = await self._run("breaker", [self._keys.pool(pool).breakers], packed)
        return _breaker(unpacked(_read_breaker, reply, "a verdict"))

    async def probe(self, pool: str, endpoint: str, lease_ms: float) -> bool:
        """See `Store.probe`."""
        packed = _pack(("probe", endpoint, lease_ms))
        return number(await self._run("breaker", [self._keys.pool(pool).breakers], packed)) == 1

    async def breakers(self, pool: str) -> Mapping[str, Breaker]:
        """See `Store.breakers`."""
        reply = await self._run("breaker", [self._keys.pool(pool).breakers], _pack(("all",)))
        found = unpacked(_read_breakers, reply, "a question for breakers")
        return {name: _breaker(each) for name, each in found.items()}

    async def drop_breakers(self, pool: str, endpoints: Collection[str]) -> None:
        """See `Store.drop_breakers`."""
        if endpoints:
            key = self._keys.pool(pool).breakers
            await self._ask(key, ("HDEL", key, *endpoints))


def _breaker(told: tuple[str, int, int, float]) -> Breaker:
    return msgspec.convert(dict(zip(Breaker.__struct_fields__, told, strict=True)), Breaker)
