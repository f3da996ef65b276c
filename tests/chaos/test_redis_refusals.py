"""Redis that answers, but not as asked: full, read-only, without permission, another password, hanging up."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import redis
from extproc.clock import SystemClock
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import Trouble
from tests.chaos.traffic import DEADLINE_MS, FLOWS, PROBE_S, Traffic, all_is_well
from tests.valkey import Valkey
from tests.waiting import until

USER, PASSWORD = "worker", "swordfish"


@pytest.fixture
def admin(server: Valkey) -> Iterator[Any]:
    """The operator's own connection, under another user than the worker."""
    raw: Any  # redis-py's stubs leave half of its calls untyped
    with redis.Redis(port=server.port) as raw:
        raw.execute_command("ACL", "SETUSER", USER, "on", f">{PASSWORD}", "~*", "&*", "+@all")
        yield raw


@pytest.fixture
async def store(server: Valkey, admin: Any) -> AsyncIterator[ResilientStore]:  # noqa: ARG001
    """The store of a worker that logs in."""
    url = server.url.replace("redis://", f"redis://{USER}:{PASSWORD}@")
    store = ResilientStore(RedisStore(url, DEADLINE_MS), MemoryStore(SystemClock()), probe_s=PROBE_S)
    await store.ping()
    yield store
    await store.close()


@pytest.mark.parametrize(
    ("trouble", "break_it", "mend_it"),
    [
        (Trouble.FULL, "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        (Trouble.READ_ONLY, "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        (Trouble.NO_PERMISSION, f"ACL SETUSER {USER} -@scripting", f"ACL SETUSER {USER} +@all"),
        (Trouble.NO_PERMISSION, f"ACL SETUSER {USER} resetkeys ~other:*", f"ACL SETUSER {USER} ~*"),
    ],
    ids=["full", "read-only", "no scripts", "no keys"],
)
async def test_a_server_that_refuses_fails_nothing_and_keeps_no_charge(
    traffic: Traffic, witness: RedisStore, admin: Any, trouble: Trouble, break_it: str, mend_it: str
) -> None:
    """Requests that begin or end meanwhile are counted once it takes writes again, and not after they ended."""
    await traffic.reserve(10)
    admin.execute_command(*break_it.split())
    await traffic.reserve(10)
    assert traffic.store.degraded_in("p")
    assert traffic.store.troubles() == {"p": trouble}
    assert traffic.waited == 0
    await traffic.settle(15)
    async with traffic.flowing():
        await traffic.made(5 * FLOWS)
    admin.execute_command(*mend_it.split())
    await all_is_well(traffic, witness)


async def test_a_password_that_changed_and_changed_back(traffic: Traffic, witness: RedisStore, admin: Any) -> None:
    """A worker whose login is not taken any more decides alone, says why, and is whole once it is taken."""
    await traffic.reserve(4)
    admin.execute_command("ACL", "SETUSER", USER, "resetpass", ">another")
    admin.client_kill_filter(_type="normal", skipme=True)
    await traffic.reserve(4)
    await until(lambda: traffic.store.troubles() == {"p": Trouble.WRONG_PASSWORD})
    await traffic.settle(3)
    admin.execute_command("ACL", "SETUSER", USER, f">{PASSWORD}")
    await all_is_well(traffic, witness)


async def test_connections_that_are_hung_up_again_and_again(traffic: Traffic, witness: RedisStore, admin: Any) -> None:
    """Each loss opens the circuit at no wait, each new connection closes it; no request fails, none is miscounted."""
    async with traffic.flowing():
        for _ in range(20):
            await asyncio.to_thread(admin.client_kill_filter, _type="normal", skipme=True)
            await traffic.made(FLOWS)
    assert traffic.store.stats.failures.get(Trouble.GONE, 0) > 0
    await all_is_well(traffic, witness)
