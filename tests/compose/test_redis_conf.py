"""redis/redis.conf on a real Valkey: what is given up when memory runs out, and what never is."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from extproc.state.redis import RedisStore
from extproc.state.values import Candidate, Reserve, Settle
from tests.servers import valkey9

CONF = Path(__file__).resolve().parents[2] / "redis" / "redis.conf"

IDLE_PINS = 12_000
NEW_PINS = 12_000
AT_ONCE = 250
PIN_TTL_MS = 1_800_000
LEASE_MS = 15_000
REPLICAS = [f"replica-{number}" for number in range(8)]
OPEN = 20
"""Requests that each replica has open throughout."""
ENGINES = [Candidate(f"10.0.0.{number}:8001", 0.0, 100.0, 8000.0) for number in range(16)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """Socket of a server with our configuration, and with so little memory that it fills in seconds."""
    socket, program = tmp_path / "redis.sock", valkey9()
    command = [str(program.path), str(CONF), "--port", "0", "--unixsocket", str(socket), "--maxmemory", "5mb"]
    process = subprocess.Popen([*command, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            assert process.poll() is None, "valkey-server refused redis/redis.conf"
            time.sleep(0.02)
        yield socket
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
async def redis(server: Path) -> AsyncIterator[Redis]:
    """A client of that server."""
    async with Redis(unix_socket_path=str(server)) as client:
        yield client


@pytest.fixture
async def store(server: Path) -> AsyncIterator[RedisStore]:
    """The shared store on that server."""
    store = RedisStore(f"unix://{server}", deadline_ms=20_000.0)
    await store.ping("p")
    yield store
    await store.close()


async def fill(store: RedisStore, numbers: range) -> None:
    """Serve one request of each of so many sessions, with the heartbeats of living replicas in between."""
    for start in numbers[::AT_ONCE]:
        for replica in REPLICAS:
            beat = await store.heartbeat("p", replica, LEASE_MS)
            assert (beat.reaped, beat.known) == (0, OPEN)
        await asyncio.gather(*(serve(store, number) for number in range(start, start + AT_ONCE)))


async def serve(store: RedisStore, number: int) -> None:
    """One request from its decision to its end; at the memory cap as well, neither is refused."""
    replica = REPLICAS[number % len(REPLICAS)]
    ask = Reserve("p", f"c{number}", replica, ENGINES, pin_key=f"{number:032x}", pin_ttl_ms=PIN_TTL_MS)
    assert (await store.reserve(ask)).endpoint
    assert await store.settle(Settle("p", f"c{number}", replica))


async def test_full_memory_costs_idle_pins_and_nothing_else(redis: Redis, store: RedisStore) -> None:
    """At the memory cap decisions go on: pins idle for longest go; charges, leases, work, states and feed stay."""
    for replica in REPLICAS:
        for number in range(OPEN):
            await store.reserve(Reserve("p", f"open-{number}", replica, ENGINES, lease_ms=LEASE_MS))
    held = sorted(await store.hold("p", "scrape", "keeper", ["a", "b"], 600_000))
    await store.put_states("p", {each.endpoint: bytes(200) for each in ENGINES})
    entry = await store.append("p", bytes(50_000), 100)
    await store.put_snapshot("p", "profile", entry, [bytes(60_000), bytes(60_000)])
    await fill(store, range(IDLE_PINS))
    await asyncio.sleep(2)  # the server tells ages apart by the second
    await fill(store, range(IDLE_PINS, IDLE_PINS + NEW_PINS))

    assert (await redis.info("stats"))["evicted_keys"] > NEW_PINS / 4
    assert sum(load.running for load in (await store.loads("p")).values()) == OPEN * len(REPLICAS)
    assert sorted(await store.hold("p", "scrape", "keeper", ["a", "b"], 600_000)) == held
    assert len(await store.states("p")) == len(ENGINES)
    assert [each.id for each in await store.read("p", "0", 0)] == [entry]
    snapshot = await store.snapshot("p", "profile")
    assert snapshot is not None
    assert (snapshot.at, [len(part) for part in snapshot.parts]) == (entry, [60_000, 60_000])
    newest = range(IDLE_PINS + NEW_PINS - 1000, IDLE_PINS + NEW_PINS)
    lost = [number for number in newest if not await store.pinned("p", f"{number:032x}")]
    assert len(lost) < len(newest) / 50


async def test_nothing_is_written_to_disk(redis: Redis, server: Path) -> None:
    """The ledger lives in memory alone: neither a snapshot nor a log is kept."""
    await redis.set("pin", "10.0.0.1:8001", px=PIN_TTL_MS)
    assert await redis.config_get("save") == {"save": ""}
    assert await redis.config_get("appendonly") == {"appendonly": "no"}
    assert await asyncio.to_thread(lambda: list(server.parent.iterdir())) == [server]
