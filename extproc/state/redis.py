"""The store that all replicas share: Redis (or Valkey), one round trip a verb, atomic steps in Lua."""

from collections.abc import Mapping
from typing import Final

import msgspec

from extproc.state.pick import PINS_TRIMMED, check, check_move, check_pins, decode_charge
from extproc.state.redis_board import RedisBoard
from extproc.state.redis_calls import number, text_or_none, unpacked
from extproc.state.redis_documents import RedisDocuments
from extproc.state.redis_feed import RedisFeed
from extproc.state.redis_quota import RedisQuota
from extproc.state.values import MAX_PINS, Beat, Load, Move, Reservation, Reserve, Settle

# How long a settle that found nothing keeps a late reservation of the same charge from charging.
_VOID_MS: Final = 60_000

_pack = msgspec.msgpack.Encoder().encode


class _Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What `reserve.lua` stores and answers for a charge, without what follows for the scripts alone."""

    endpoint: str
    cost_ms: float
    backlog_tokens: float
    running: int
    output_tokens: float
    pinned: bool
    moved: bool
    absent_pin: str


_read_record = msgspec.msgpack.Decoder(_Record).decode
_read_beat = msgspec.msgpack.Decoder(tuple[int, int, str]).decode
_read_loads = msgspec.msgpack.Decoder(list[tuple[str, float, int, float]]).decode


class RedisStore(RedisBoard, RedisFeed, RedisQuota, RedisDocuments):
    """A `Store` in Redis. Every call fails with `StoreError` within the deadline, at once without a connection.

    The connection mends itself in the background; `ping` is the one call that waits for it (up to a second).

    Its arguments are those of `RedisCalls`.
    """

    def __init__(self, url: str, deadline_ms: float = 20.0, prefix: str = "warmpath") -> None:
        super().__init__(url, deadline_ms, prefix)
        # By pool and replica, the mark of the store's first heartbeat as its last one had it.
        self._born: dict[tuple[str, str], str] = {}

    async def reserve(self, ask: Reserve) -> Reservation:
        """See `Store.reserve`."""
        check(ask)
        keys = self._keys.pool(ask.pool)
        names = [keys.load, keys.leases, keys.flight(ask.replica), keys.void(ask.charge_id), keys.pins]
        if pinned_as := ask.next_pin_key or ask.pin_key:
            names.append(keys.pin(pinned_as))
        if ask.pin_key:
            names.append(keys.pin(ask.pin_key))
        sequences, output_tokens = decode_charge(ask)
        packed = _pack(
            (
                ask.charge_id,
                ask.replica,
                ask.candidates,
                ask.pin_ttl_ms,
                ask.break_out_ms,
                ask.strict,
                ask.ignore_pin,
                sequences,
                output_tokens,
                ask.running_ms,
                ask.output_ms,
                ask.backlog_weight,
                ask.tie_ms,
                ask.lease_ms,
                ask.max_pins,
                PINS_TRIMMED,
                keys.pin_prefix,
            )
        )
        reply = await self._run("reserve", names, packed)
        record = unpacked(_read_record, reply, "a reservation")
        return Reservation(
            record.endpoint,
            record.cost_ms,
            record.backlog_tokens,
            record.running,
            record.output_tokens,
            record.pinned,
            record.moved,
            record.absent_pin,
        )

    async def settle(self, end: Settle) -> bool:
        """See `Store.settle`."""
        keys = self._keys.pool(end.pool)
        names = [keys.load, keys.flight(end.replica), keys.void(end.charge_id)]
        return number(await self._run("settle", names, end.charge_id, int(end.refund), _VOID_MS)) == 1

    async def move(self, move: Move) -> bool:
        """See `Store.move`."""
        check_move(move)
        keys = self._keys.pool(move.pool)
        packed = _pack((move.charge_id, move.endpoint, move.tokens, move.rate))
        return number(await self._run("move", [keys.load, keys.flight(move.replica)], packed)) == 1

    async def pin(self, pool: str, pin_key: str, endpoint: str, pin_ttl_ms: int, max_pins: int = MAX_PINS) -> None:
        """See `Store.pin`."""
        check_pins(max_pins)
        keys = self._keys.pool(pool)
        packed = _pack((endpoint, pin_ttl_ms, max_pins, PINS_TRIMMED, keys.pin_prefix))
        await self._run("pin", [keys.pins, keys.pin(pin_key)], packed)

    async def pinned(self, pool: str, pin_key: str) -> str:
        """See `Store.pinned`. What is no endpoint counts as no pin, as it does for `reserve`."""
        key = self._keys.pool(pool).pin(pin_key)
        # MGET answers nil for a key of another type.
        reply = await self._ask(key, ("MGET", key))
        return text_or_none(reply[0] if isinstance(reply, list) and reply else None) or ""

    async def heartbeat(self, pool: str, replica: str, lease_ms: int) -> Beat:
        """See `Store.heartbeat`."""
        keys = self._keys.pool(pool)
        names = [keys.leases, keys.load, keys.flight(replica), keys.counted, keys.pins, keys.born]
        reply = await self._run("heartbeat", names, replica, lease_ms, keys.flight_prefix, keys.pin_prefix)
        reaped, known, born = unpacked(_read_beat, reply, "a heartbeat")
        before, self._born[pool, replica] = self._born.get((pool, replica), born), born
        return Beat(reaped, known, emptied=born != before)

    async def release(self, pool: str, replica: str) -> None:
        """See `Store.release`."""
        keys = self._keys.pool(pool)
        names = [keys.leases, keys.load, keys.flight(replica)]
        await self._run("release", names, replica, keys.flight_prefix)

    async def loads(self, pool: str) -> Mapping[str, Load]:
        """See `Store.loads`."""
        keys = self._keys.pool(pool)
        reply = await self._run("loads", [keys.load])
        rows = unpacked(_read_loads, reply, "a question for loads")
        return {endpoint: Load(backlog, running, outputs) for endpoint, backlog, running, outputs in rows}
