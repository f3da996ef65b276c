"""Many replicas in one process: each has all that a worker is made of, and a connection of its own to a real Valkey.

What replicas share, they share through the store alone, so this is a whole replica in all that is shared; only the
gRPC server in front of it is left out. Sixteen processes with two cores would spend their time on starting.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec

from extproc import worker
from extproc.clock import SystemClock
from extproc.config import Config
from extproc.envoy.contract import Call, Decision, Served
from extproc.learner import Learner
from extproc.router import Router
from extproc.telemetry.metrics import Metrics
from tests.acceptance.local import CHAT, POOL, Answer, Engine, ask, configuration
from tests.valkey import Valkey

CACHE_BLOCKS = 1921
"""KV cache of an engine: 30,720 tokens in blocks of 16, one of them reserved."""
ENGINES = ("--blocks", str(CACHE_BLOCKS))
_PATIENT_MS = 2000


class Member:
    """One replica."""

    def __init__(self, config: Config) -> None:
        self.parts = worker.compose(config)
        self.router = Router(self.parts.around, self.parts.gossip, self.parts.showing, SystemClock())
        self._learner = Learner(self.parts.around, self.parts.gossip, Metrics())

    async def decide(self, body: bytes, headers: Mapping[str, str] | None = None) -> Decision:
        """Decide for a chat; the charge stays until `settle`."""
        return await self.router.decide(Call("POST", CHAT, headers or {}, body))

    async def settle(self, decision: Decision) -> None:
        """End a charge."""
        await self.router.settle(decision)

    async def serve(self, http: aiohttp.ClientSession, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
        """Decide, ask the engine, settle, and learn from the answer, as behind a gateway. No stream."""
        decision = await self.decide(body, headers)
        try:
            answer = await ask(http, f"http://{decision.destinations[0]}{CHAT}", body)
        finally:
            await self.settle(decision)
        assert answer.status == 200, answer.body
        usage = answer.json["usage"]
        self._learner.observe(
            Served(
                charge_id=decision.charge_id,
                pool=decision.pool,
                destination=decision.destinations[0],
                status=answer.status,
                prompt_tokens=usage["prompt_tokens"],
                output_tokens=usage["completion_tokens"],
                cached_tokens=answer.cached_tokens,
                metadata=decision.metadata,
            )
        )
        return answer


def sharing(store: Valkey, engines: list[Engine], prefix: str, **sections: Any) -> Config:
    """A configuration whose replicas meet under a key prefix of their own."""
    address = {"url": store.url, "timeout_ms": _PATIENT_MS, "key_prefix": prefix}
    document = configuration({POOL: [one.address for one in engines]}, redis=address, **sections)
    document["pools"][POOL]["kv_tokens"] = (CACHE_BLOCKS - 1) * 16
    return msgspec.convert(document, Config)


@contextlib.asynccontextmanager
async def members(*configs: Config) -> AsyncIterator[list[Member]]:
    """A running replica for each configuration."""
    made = [Member(config) for config in configs]
    running: list[asyncio.Task[None]] = []
    try:
        for one, config in zip(made, configs, strict=True):
            await one.parts.store.ping()
            await one.parts.upkeep.apply(config)
            running += [asyncio.create_task(work) for work in (one.parts.upkeep.run(), one.parts.gossip.run())]
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for one in made:
            await one.parts.store.close()
