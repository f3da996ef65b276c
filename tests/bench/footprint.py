"""What Redis holds: bytes of 100 endpoints, 100,000 sessions, and of each thing by itself."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator

import redis
from extproc.state import endpoint as endpoint_state
from extproc.state.endpoint import EndpointState
from extproc.state.redis import RedisStore
from extproc.state.values import Candidate, Reserve, Settle
from tests.bench.processes import run
from tests.bench.report import Findings, Row, Scale
from tests.valkey import Valkey

_ENDPOINTS = 100
_REPLICAS = 8
_IN_FLIGHT = 1000
_POOL = "main"
_AT_ONCE = 64


def bench(scale: Scale) -> Findings:
    """Fill an empty Valkey one kind of thing after the other, and see by how much it grows."""
    sessions = scale.pick(100_000, 10_000)
    findings = Findings(
        f"bytes of Valkey's memory: {_ENDPOINTS} endpoints, {sessions:,} sessions, {_REPLICAS} replicas"
    )
    with Valkey() as valkey:
        findings.rows = run(_Filling(valkey).run(sessions))
    findings.notes.append("each: growth of used_memory, less buffers of clients, divided by the number")
    findings.notes.append("feeds and snapshots of profiles are not in it: see the bench `joining`")
    return findings


class _Filling:
    """A Valkey that is filled step by step."""

    def __init__(self, valkey: Valkey) -> None:
        self._store = RedisStore(valkey.url, deadline_ms=10_000)
        self._raw = redis.Redis(port=valkey.port)
        self._numbers = itertools.count()
        self._endpoints = [f"10.0.{at // 250}.{at % 250 + 1}:8000" for at in range(_ENDPOINTS)]

    async def run(self, sessions: int) -> list[Row]:
        """One row a kind of thing, then the sum."""
        await self._store.ping()
        # Loads the scripts, which take some kilobytes each, once.
        await self._reserve("warm-up", pin_key="")
        await self._store.heartbeat(_POOL, "warm-up", 15_000)
        await self._store.release(_POOL, "warm-up")
        empty = self._used()
        rows = [
            await self._grow("endpoint: state", _ENDPOINTS, self._states),
            await self._grow("endpoint: load", _ENDPOINTS, self._loads),
            await self._grow("session", sessions, lambda: self._sessions(sessions)),
            await self._grow("first heartbeat", 1, lambda: self._beat("r0")),
            await self._grow("replica: lease", _REPLICAS, self._replicas),
            await self._grow("request in flight", _IN_FLIGHT, self._flights),
        ]
        whole: Row = {"what": "all of it", "number": 1, "bytes": self._used() - empty, "each": self._used() - empty}
        await self._store.close()
        self._raw.close()
        return [*rows, whole]

    async def _grow(self, what: str, number: int, add: Callable[[], Awaitable[None]]) -> Row:
        before = self._used()
        await add()
        grown = self._used() - before
        return {"what": what, "number": number, "bytes": grown, "each": grown / number}

    async def _states(self) -> None:
        state = EndpointState(destination="10.0.0.1:8000", scraped_at=1.8e9, started_at=1.8e9, version="0.32.0")
        await self._store.put_states(_POOL, {name: endpoint_state.encode(state) for name in self._endpoints})

    async def _loads(self) -> None:
        for endpoint in self._endpoints:
            await self._reserve("r0", "", endpoint)

    async def _sessions(self, sessions: int) -> None:
        for batch in _batches(sessions):
            await asyncio.gather(*(self._session(number) for number in batch))

    async def _session(self, number: int) -> None:
        charge_id = await self._reserve("r0", f"{number:032x}", self._endpoints[number % _ENDPOINTS])
        await self._store.settle(Settle(_POOL, charge_id, "r0"))

    async def _replicas(self) -> None:
        for at in range(_REPLICAS):
            await self._beat(f"{at:016x}")

    async def _beat(self, replica: str) -> None:
        await self._store.heartbeat(_POOL, replica, 15_000)

    async def _flights(self) -> None:
        for batch in _batches(_IN_FLIGHT):
            await asyncio.gather(*(self._reserve(f"{number % _REPLICAS:016x}", "") for number in batch))

    async def _reserve(self, replica: str, pin_key: str, endpoint: str = "") -> str:
        charge_id = f"{replica}-{next(self._numbers):x}"
        candidate = Candidate(endpoint or self._endpoints[0], 0.0, 900.0, 0.001)
        ask = Reserve(_POOL, charge_id, replica, [candidate], pin_key=pin_key, output_tokens=200.0)
        await self._store.reserve(ask)
        return charge_id

    def _used(self) -> int:
        told = self._raw.info("memory")
        return int(told["used_memory"]) - int(told["mem_clients_normal"])


def _batches(number: int) -> Iterator[range]:
    for start in range(0, number, _AT_ONCE):
        yield range(start, min(number, start + _AT_ONCE))
