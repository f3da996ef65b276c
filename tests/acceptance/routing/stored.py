"""An engine that stores responses, as vLLM does: only the one that gave a response can continue it."""

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from tests.ports import free_port

_BYTES_A_TOKEN = 4
_ANSWER_TOKENS = 40


class StoringEngine:
    """The Responses API, and as much of a metrics page as makes it an engine.

    Attributes:
        address: its `ip:port`.
        bodies: bodies of the requests it got, in order.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.bodies: list[dict[str, Any]] = []
        self._stored: dict[str, tuple[int, dict[str, Any]]] = {}

    async def create(self, request: web.Request) -> web.Response:
        """`POST /v1/responses`; a request's `request_id` names the response."""
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        cached, previous = 0, body.get("previous_response_id")
        if previous is not None:
            if previous not in self._stored:
                return self._unknown(previous)
            cached, _ = self._stored[previous]
        name = body.get("request_id") or f"resp_{uuid.uuid4().hex}"
        tokens = cached + len(body["input"]) // _BYTES_A_TOKEN
        answer = self._answer(name, body, tokens, cached)
        self._stored[name] = (tokens + _ANSWER_TOKENS, answer)
        return web.json_response(answer)

    async def retrieve(self, request: web.Request) -> web.Response:
        """`GET /v1/responses/{name}`."""
        name = request.match_info["name"]
        return web.json_response(self._stored[name][1]) if name in self._stored else self._unknown(name)

    async def metrics(self, _request: web.Request) -> web.Response:
        """`GET /metrics`."""
        return web.Response(text='vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n')

    def _unknown(self, name: str) -> web.Response:
        error = {"message": f"Response with id '{name}' not found.", "type": "invalid_request_error", "code": 404}
        return web.json_response({"error": error}, status=404)

    def _answer(self, name: str, body: dict[str, Any], tokens: int, cached: int) -> dict[str, Any]:
        said = {"type": "output_text", "text": "word " * _ANSWER_TOKENS, "annotations": []}
        return {
            "id": name,
            "object": "response",
            "status": "completed",
            "model": body["model"],
            "output": [{"type": "message", "role": "assistant", "status": "completed", "content": [said]}],
            "usage": {
                "input_tokens": tokens,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": _ANSWER_TOKENS,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens + _ANSWER_TOKENS,
            },
        }


@contextlib.asynccontextmanager
async def storing() -> AsyncIterator[StoringEngine]:
    """Run one."""
    port = free_port()
    engine = StoringEngine(f"127.0.0.1:{port}")
    app = web.Application()
    app.router.add_post("/v1/responses", engine.create)
    app.router.add_get("/v1/responses/{name}", engine.retrieve)
    app.router.add_get("/metrics", engine.metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield engine
    finally:
        await runner.cleanup()
