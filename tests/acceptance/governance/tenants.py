"""Tenants with API keys at a site, and what they get of it."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from extproc.envoy import api_keys
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Answer, Engine, chat_body, simulated
from tests.acceptance.state.replicas import Plan, Site, site


class Tenants(msgspec.Struct, frozen=True):
    """Who asks, and whom."""

    here: Site
    engines: list[Engine]

    async def ask(self, tenant: str, key: str = "", front: int = 0, **fields: object) -> Answer:
        """One question of a tenant, with an idempotency key or without."""
        headers = {"authorization": f"Bearer key-of-{tenant}", **({"idempotency-key": key} if key else {})}
        return await self.here.fronts[front].ask(chat_body("How are you? " * 20, **fields), headers)

    async def at_once(self, tenant: str, number: int) -> list[Answer]:
        """So many questions at one moment."""
        return await asyncio.gather(*(self.ask(tenant) for _ in range(number)))

    @contextlib.asynccontextmanager
    async def streaming(self, tenant: str, key: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """A long answer that runs within the block, and is read no further after it."""
        headers = {
            "authorization": f"Bearer key-of-{tenant}",
            "idempotency-key": key,
            "content-type": "application/json",
        }
        body = chat_body("Tell me all.", stream=True, max_tokens=20_000, ignore_eos=True)
        async with self.here.http.post(f"{self.here.front.url}{CHAT}", data=body, headers=headers) as answer:
            await answer.content.readany()
            yield answer

    def levels(self) -> list[float]:
        """What is in use of all limits, as the store has it."""
        raw: Any = self.here.store.client()
        with contextlib.closing(raw):
            values = [raw.get(key) for key in raw.scan_iter("*:quota:*")]
        return sorted(struct.unpack("<ddd", value)[0] for value in values if value)


@contextlib.asynccontextmanager
async def tenants(
    journal: Journal,
    folder: Path,
    names: Sequence[str],
    sections: Mapping[str, Any],
    envoys: Sequence[Sequence[str]] = ((),),
) -> AsyncIterator[Tenants]:
    """Two replicas whose clients show keys."""
    keys = folder / "keys"
    keys.write_text("".join(api_keys.line(name, f"key-of-{name}") + "\n" for name in names))
    async with simulated(journal, each=2) as engines:
        # A busy machine may take long for what it does at once.
        gateway = {"auth": {"keys": str(keys)}, "message_timeout_ms": 20_000}
        whole = {"gateway": gateway, "redis": {"timeout_ms": 500}, **sections}
        async with site(journal, folder, {POOL: engines}, Plan(envoys=envoys, sections=whole)) as here:
            yield Tenants(here, engines)
