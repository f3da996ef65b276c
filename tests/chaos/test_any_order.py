"""Any outages of a real server, in any order, amid traffic: afterwards the ledger is exactly what is open."""

import asyncio
import random
from typing import Any

import pytest

import redis
from extproc.state.redis import RedisStore
from tests.chaos.traffic import FLOWS, Traffic, all_is_well
from tests.valkey import Valkey

OUTAGES = ("freeze", "kill", "flush", "full", "read-only", "forget scripts", "hang up")


def strike(server: Valkey, outage: str) -> None:
    """Let an outage begin."""
    match outage:
        case "freeze":
            server.freeze()
        case "kill":
            server.kill()
        case _:
            command(server, outage)


def relieve(server: Valkey, outage: str) -> None:
    """Let it end."""
    match outage:
        case "freeze":
            server.thaw()
        case "kill":
            server.start()
        case "full":
            command(server, "roomy")
        case "read-only":
            command(server, "writable")


def command(server: Valkey, what: str) -> None:
    """Ill-treat a server that answers."""
    commands = {
        "flush": "FLUSHALL",
        "full": "CONFIG SET maxmemory 1",
        "roomy": "CONFIG SET maxmemory 0",
        "read-only": "REPLICAOF 127.0.0.1 1",
        "writable": "REPLICAOF NO ONE",
        "forget scripts": "SCRIPT FLUSH",
        "hang up": "CLIENT KILL TYPE normal",
    }
    raw: Any  # redis-py's stubs leave half of its calls untyped
    with redis.Redis(port=server.port) as raw:
        raw.execute_command(*commands[what].split())


@pytest.mark.parametrize("seed", range(3))
async def test_after_outages_in_any_order_the_ledger_is_exact(
    server: Valkey, traffic: Traffic, witness: RedisStore, seed: int
) -> None:
    """No request fails meanwhile, none is counted twice or left behind; some are open throughout."""
    chance = random.Random(seed)
    await traffic.reserve(5)
    async with traffic.flowing():
        for outage in chance.sample(OUTAGES * 2, 8):
            await asyncio.to_thread(strike, server, outage)
            await traffic.made(chance.randrange(4 * FLOWS))
            if chance.random() < 0.5:
                await traffic.beat()
            await asyncio.to_thread(relieve, server, outage)
            await traffic.made(chance.randrange(2 * FLOWS))
    await all_is_well(traffic, witness)
