"""Streams through the relay of a real stack, and what a client sees of them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec

from tests.acceptance.local import Engine, Local
from tests.waiting import until_async

RELAYED = {"x-warmpath-relay": "1"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATIENT = {"redis": {"timeout_ms": 2000}, "gateway": {"message_timeout_ms": 20_000}}
"""Sections for stacks on a busy machine."""


class Stream:
    """One stream as it comes in. `events` are what was read so far, `[DONE]` left out."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.events: list[dict[str, Any]] = []
        self.done = False

    async def tokens(self, count: int) -> None:
        """Read until so many pieces of text have come."""
        while sum(bool(text_of(one)) for one in self.events) < count:
            assert await self.next(), f"ended after {len(self.events)} events"

    async def next(self) -> bool:
        """Read one event; False at the end."""
        while line := await self.response.content.readline():
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                assert not self.done
                self.done = True
            elif data:
                self.events.append(json.loads(data))
                return True
        return False

    async def rest(self) -> "Stream":
        """Read to the end."""
        while await self.next():
            pass
        return self

    @property
    def text(self) -> str:
        """All text."""
        return "".join(map(text_of, self.events))

    @property
    def usages(self) -> list[dict[str, Any]]:
        """Every report of usage."""
        return [one["usage"] for one in self.events if one.get("usage")]

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that the last event tells."""
        found: dict[str, Any] | None = self.events[-1].get("error")
        return found

    @property
    def form(self) -> tuple[int, int, list[str]]:
        """How many ids and roles there are, and the finish reasons."""
        choices = [choice for one in self.events for choice in one.get("choices", ())]
        roles = sum("role" in choice.get("delta", {}) for choice in choices)
        ids = {one["id"] for one in self.events if "id" in one}
        return len(ids), roles, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def text_of(event: Mapping[str, Any]) -> str:
    """Text in one event."""
    choices = event.get("choices", ())
    return "".join(one["delta"].get("content") or "" if "delta" in one else one["text"] for one in choices)


def request(path: str, prompt: str, model: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """Body of a request for a stream that tells its usage."""
    content = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    options = {"include_usage": True}
    return {"model": model, "max_tokens": tokens, "stream": True, "stream_options": options, **content, **fields}


@contextlib.asynccontextmanager
async def streaming(
    local: Local, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = RELAYED
) -> AsyncIterator[Stream]:
    """Send a request and read its answer as it comes; given up when the block ends."""
    async with local.http.post(f"{local.url}{path}", json=body, headers=headers) as response:
        yield Stream(response)


async def server_of(engines: list[Engine]) -> Engine:
    """The one engine that works on something."""
    busy: list[Engine] = []

    async def found() -> bool:
        lives = await asyncio.gather(*map(_live, engines))
        busy[:] = [one for one, live in zip(engines, lives, strict=True) if live]
        return bool(busy)

    await until_async(found)
    [serving] = busy
    return serving


async def _live(engine: Engine) -> int:
    with contextlib.suppress(aiohttp.ClientError):
        return await engine.live()
    return 0


class Expected(msgspec.Struct, frozen=True):
    """An answer that nothing disturbed."""

    text: str
    usage: dict[str, Any]


async def undisturbed(local: Local, path: str, body: Mapping[str, Any]) -> Expected:
    """What the client sees without the relay."""
    async with streaming(local, path, body, {}) as stream:
        await stream.rest()
        assert stream.done
        return Expected(stream.text, counts(stream.usages[-1]))


def counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of usage that do not depend on caches."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
