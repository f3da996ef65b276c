"""A keeper's process and simulated engines of each kind: what workers are told is what the engine holds."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from extproc.sim.fleet import SimFleet
from extproc.sim.settings import EngineSettings, SimSettings
from extproc.state.redis import RedisStore
from tests.kv_events import Worker
from tests.unit.top.parts import command, document, free_sidecar, write
from tests.valkey import Valkey
from tests.waiting import until, until_async

_CACHE = EngineSettings(blocks=400)
"""Small enough that most of what is stored is evicted again."""


class Scene:
    """An engine with a keeper, and a worker's view of each of its ranks."""

    def __init__(self, address: str, ranks: int, store: RedisStore, session: aiohttp.ClientSession) -> None:
        self.workers = [Worker(address, rank) for rank in range(ranks)]
        self._address = address
        self._store = store
        self._session = session
        self._chance = random.Random(1)

    async def serve(self, requests: int) -> None:
        """Send prompts, four at a time, of which many share a beginning.

        Every other one is a beginning alone, of whole blocks: vLLM computes the last of them again, and has two copies.
        """

        async def one() -> None:
            for number in range(requests // 4):
                shared = self._chance.randrange(5) * 1000
                length = self._chance.randrange(10, 200) if number % 2 else 0
                own = (self._chance.randrange(6000, 9000) for _ in range(length))
                asked = {"model": "sim", "prompt": [*range(shared, shared + 64), *own], "max_tokens": 4}
                async with self._session.post(f"http://{self._address}/v1/completions", json=asked) as response:
                    assert response.status == 200
                    await response.read()

        await asyncio.gather(*(one() for _ in range(4)))

    async def restart(self) -> None:
        """The engine starts again, with an empty cache; it serves on return."""
        async with self._session.post(f"http://{self._address}/sim/restart", json={}) as response:
            assert response.status == 200

        async def serves() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._session.get(f"http://{self._address}/sim/state") as response:
                    return response.status == 200
            return False

        await until_async(serves)

    async def agree(self) -> bool:
        """Whether the workers know as many blocks as the engine holds, all ranks together."""
        for worker in self.workers:
            await worker.follow(self._store, "main")
        async with self._session.get(f"http://{self._address}/sim/state") as response:
            held = (await response.json())["blocks_cached"]
        told = sum(len(worker.blocks) for worker in self.workers)
        return all(worker.block_tokens for worker in self.workers) and told == held > 0


@contextlib.asynccontextmanager
async def scene(folder: Path, settings: SimSettings) -> AsyncIterator[Scene]:
    """One engine, a keeper that has found it, and a store between keeper and workers."""
    # A connection to each request: those that are kept break when the engine starts again.
    connector = aiohttp.TCPConnector(force_close=True)
    async with SimFleet(1, settings) as fleet, aiohttp.ClientSession(connector=connector) as session:
        with Valkey() as server:
            store = RedisStore(server.url, deadline_ms=10_000.0)
            pools = {"main": {"endpoints": fleet.addresses, "profiles": "precise"}}
            content = document(pools=pools, redis={"url": server.url}, gateway=free_sidecar(socket_dir=str(folder)))
            async with command("keeper", "--config", str(write(folder / "warmpath.yaml", content))) as keeper:
                await until(lambda: bool(keeper.said("keeper is ready")))
                yield Scene(fleet.addresses[0], settings.dp_ranks, store, session)
            await store.close()


@pytest.mark.parametrize(
    ("profile", "ranks"),
    [("vllm-0.33", 1), ("vllm-0.33", 2), ("sglang", 1), ("trtllm", 1)],
)
async def test_workers_know_what_the_engine_holds(tmp_path: Path, profile: str, ranks: int) -> None:
    """Found by itself, through evictions, copies of blocks and a restart, block for block."""
    settings = SimSettings(profile=profile, kv_events=True, engine=_CACHE, control=True, dp_ranks=ranks)
    async with scene(tmp_path, settings) as running:
        await running.serve(80)
        await until_async(running.agree)
        await running.serve(80)
        await until_async(running.agree)
        await running.restart()
        await running.serve(40)
        await until_async(running.agree)
        assert all(worker.begun >= 2 for worker in running.workers)
