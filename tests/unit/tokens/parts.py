"""What the tests of this room share."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from extproc.clock import Clock, SystemClock
from extproc.config import Config
from extproc.request.shapes import parse
from extproc.state.exact_blocks import TokenPrompt
from extproc.tokens.tokenizing import Engines, Tokenizing
from extproc.tokens.values import Why
from tests.ports import free_port


class Counted:
    """Counts what became of prompts: implements `tokenizing.Recorder`."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.found = 0
        self.made = 0

    def asked(self, pool: str, outcome: str, seconds: float) -> None:
        """See `tokenizing.Recorder.asked`."""
        assert pool
        assert seconds >= 0.0
        assert outcome == "ok" or outcome in set(Why)
        self.outcomes[str(outcome)] += 1

    def reused(self, pool: str, found: int, made: int) -> None:
        """See `values.Tally.reused`."""
        assert pool
        self.found += found
        self.made += made


class Server:
    """Stands for an engine or a render server, on loopback, with the answers of vLLM 0.32.

    Attributes:
        at: its `ip:port`.
        asked: path and body of each request, in order.
        answers: by path, status and JSON of the answer; 404 for others.
        delay_s: how long each answer takes.
        let_go: set to end all delays.
    """

    def __init__(self, answers: dict[str, tuple[int, Any]]) -> None:
        self.at = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers = answers
        self.delay_s = 0.0
        self.let_go = asyncio.Event()

    @property
    def paths(self) -> list[str]:
        """Paths that were asked for, in order."""
        return [path for path, _ in self.asked]

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one request."""
        self.asked.append((request.path, await request.json()))
        if self.delay_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.let_go.wait(), self.delay_s)
        status, value = self.answers.get(request.path, (404, {"detail": "Not Found"}))
        return web.json_response(value, status=status)


@contextlib.asynccontextmanager
async def serving(answers: dict[str, tuple[int, Any]]) -> AsyncIterator[Server]:
    """A server while the block lasts."""
    server = Server(answers)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.at = f"127.0.0.1:{port}"
        yield server
    finally:
        server.let_go.set()
        await runner.cleanup()


DISABLED = (
    403,
    {
        "error": {
            "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
            "type": "PermissionDeniedError",
        }
    },
)


def tokenized(*ids: int) -> tuple[int, Any]:
    """What `/tokenize` answers."""
    return 200, {"count": len(ids), "max_model_len": 8192, "tokens": list(ids), "token_strs": None}


def rendered(*ids: int, features: Any = None) -> tuple[int, Any]:
    """What a chat's render route answers."""
    return 200, {
        "request_id": "chatcmpl-1",
        "token_ids": list(ids),
        "features": features,
        "sampling_params": {"n": 1},
        "model": "m",
        "cache_salt": None,
    }


def pool_of(tokens: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A pool of precise profiles, as a configuration has it."""
    return {"endpoints": ["10.0.0.1:8000"], "profiles": "precise", "tokens": tokens or {}, **fields}


def config_of(pools: dict[str, Any], models: dict[str, Any] | None = None) -> Config:
    """A configuration of these pools, with a model `m` of the first one unless told otherwise."""
    return msgspec.convert({"models": models or {"m": {"pool": next(iter(pools))}}, "pools": pools}, Config)


@contextlib.asynccontextmanager
async def tokenizing(
    config: Config, engines: Engines | None = None, clock: Clock | None = None
) -> AsyncIterator[tuple[Tokenizing, Counted]]:
    """A worker's token ids while the block lasts, and what they counted."""
    counted = Counted()
    room = Tokenizing(engines or Engines(lambda _: []), counted, clock or SystemClock(), "test")
    await room.apply(config)
    try:
        yield room, counted
    finally:
        await room.close()


async def ask(
    room: Tokenizing, path: str = "/v1/chat/completions", pool: str = "p", **fields: Any
) -> TokenPrompt | None:
    """The prompt of a request with this body."""
    body = json.dumps({"model": "m", **fields}).encode()
    return await room.of(pool, path, body, parse(path, {}, body))


def ids_of(prompt: TokenPrompt | None) -> list[int]:
    """Token ids of a prompt that there is."""
    assert prompt is not None
    return list(prompt.ids)
