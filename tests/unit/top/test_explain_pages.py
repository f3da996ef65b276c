"""The keeper's pages behind `warmpath explain`, over real HTTP and real gRPC to workers of the host."""

import base64
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from extproc import explain_pages, inner
from extproc.choose.explain import Explanation
from extproc.envoy.contract import Call
from extproc.envoy.server import bind, make_server
from extproc.errors import UnknownDecisionError
from tests.unit.top.parts import explanation

LIMIT = 1000


class Oracle:
    """A worker that knows one decision."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Call] = []

    async def explain(self, call: Call) -> Explanation:
        """See `inner.Explains`."""
        self.calls.append(call)
        return explanation(replica=self.name)

    def recall(self, name: str) -> Explanation:
        """See `inner.Explains`."""
        if name != f"of {self.name}":
            raise UnknownDecisionError("this worker does not remember it")
        return explanation(replica=self.name, request_id=name)


class Pages:
    """The pages of a running keeper."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def explain(self, question: bytes | dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and JSON of `POST /explain`."""
        data = question if isinstance(question, bytes) else json.dumps(question).encode()
        async with self._http.post(f"{self._url}/explain", data=data) as answer:
            assert answer.content_type == "application/json"
            return answer.status, await answer.json()

    async def recall(self, quoted: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of `GET /decisions/`."""
        async with self._http.get(URL(f"{self._url}/decisions/{quoted}", encoded=True)) as answer:
            assert answer.content_type == "application/json"
            return answer.status, await answer.json()


@contextlib.asynccontextmanager
async def pages(folder: Path, oracles: Sequence[Oracle], silent: Sequence[str] = ()) -> AsyncIterator[Pages]:
    """The pages over these workers; before them come workers that do not answer."""
    async with contextlib.AsyncExitStack() as cleanup:
        channels = {}
        for name in [*silent, *(oracle.name for oracle in oracles)]:
            channels[name] = await cleanup.enter_async_context(inner.channel(f"unix:{folder / name}"))
        for oracle in oracles:
            server = make_server([inner.handler(bytes, oracle)], max_body_bytes=LIMIT)
            bind(server, f"unix:{folder / oracle.name}")
            await server.start()
            cleanup.push_async_callback(server.stop, None)
        app = web.Application(client_max_size=explain_pages.largest_question(LIMIT))
        app.add_routes(explain_pages.routes(channels, LIMIT))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        cleanup.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        http = await cleanup.enter_async_context(aiohttp.ClientSession())
        yield Pages(http, f"http://127.0.0.1:{site.port}")


def encoded(body: bytes) -> str:
    """Base64."""
    return base64.b64encode(body).decode()


async def test_a_question_goes_to_a_worker(tmp_path: Path) -> None:
    """The worker gets the call as the gateway would have given it: header names in lower case, the default path."""
    oracle = Oracle("w0")
    async with pages(tmp_path, [oracle]) as keeper:
        status, told = await keeper.explain({"body_base64": encoded(b"{}"), "headers": {"X-Session-Id": "S"}})
        assert (status, told["pick"], told["replica"]) == (200, "b", "w0")
        await keeper.explain({"body_base64": "", "path": "/v1/embeddings"})
    assert oracle.calls == [
        Call("POST", "/v1/chat/completions", {"x-session-id": "S"}, b"{}"),
        Call("POST", "/v1/embeddings", {}, b""),
    ]


@pytest.mark.parametrize(
    ("question", "place"),
    [
        (b"", "truncated"),
        (b"no json", "malformed"),
        (b"[]", "Expected `object`"),
        ({}, "missing required field `body_base64`"),
        ({"body_base64": "***"}, "base64"),
        ({"body_base64": "", "path": "v1"}, "$.path"),
        ({"body_base64": "", "path": 1}, "$.path"),
        ({"body_base64": "", "headers": {"a": 1}}, "$.headers"),
        ({"body_base64": "", "model": "m"}, "unknown field `model`"),
    ],
)
async def test_a_question_that_cannot_be_read_is_answered_with_its_place(
    tmp_path: Path, question: bytes | dict[str, Any], place: str
) -> None:
    """400 in JSON: where it goes wrong, and what to send instead; the worker is not asked."""
    oracle = Oracle("w0")
    async with pages(tmp_path, [oracle]) as keeper:
        status, told = await keeper.explain(question)
    assert (status, told["error"]["type"]) == (400, "invalid_request_error")
    assert place in told["error"]["message"]
    assert "send a JSON object with body_base64" in told["error"]["message"]
    assert oracle.calls == []


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1, 150_000])
async def test_bodies_have_the_gateways_limit(tmp_path: Path, size: int) -> None:
    """The longest body that the gateway takes is explained, a longer one is answered 413."""
    async with pages(tmp_path, [Oracle("w0")]) as keeper:
        status, told = await keeper.explain({"body_base64": encoded(b"x" * size)})
    assert status == (200 if size == LIMIT else 413)
    assert size == LIMIT or "gateway.max_body_bytes" in told["error"]["message"]


async def test_the_next_worker_is_asked_when_one_does_not_answer(tmp_path: Path) -> None:
    """Any worker can explain a request."""
    async with pages(tmp_path, [Oracle("w1")], silent=["w0"]) as keeper:
        status, told = await keeper.explain({"body_base64": ""})
    assert (status, told["replica"]) == (200, "w1")


async def test_a_decision_is_found_with_the_worker_that_made_it(tmp_path: Path) -> None:
    """All workers of the host are asked, those that do not answer are passed over."""
    async with pages(tmp_path, [Oracle("w1"), Oracle("w2")], silent=["w0"]) as keeper:
        for name in ("w1", "w2"):
            status, told = await keeper.recall(f"of%20{name}")
            assert (status, told["replica"], told["request_id"]) == (200, name, f"of {name}")


@pytest.mark.parametrize("quoted", ["of%20w9", "a%2Fb", "%7Bx%7D", "%C3%A9", "x" * 2000])
async def test_a_decision_that_nobody_remembers_is_said_so(tmp_path: Path, quoted: str) -> None:
    """404 with the setting that bounds the memory, and who could not be asked; whatever letters the id has."""
    async with pages(tmp_path, [Oracle("w1")], silent=["w0"]) as keeper:
        status, told = await keeper.recall(quoted)
    assert status == 404
    assert "telemetry.recent_decisions" in told["error"]["message"]
    assert "w0 did not answer" in told["error"]["message"]


async def test_without_any_worker_nobody_says_that_it_is_not_known(tmp_path: Path) -> None:
    """A sidecar whose workers are all down cannot tell; it says that instead."""
    async with pages(tmp_path, [], silent=["w0"]) as keeper:
        for status, told in (await keeper.recall("x"), await keeper.explain({"body_base64": ""})):
            assert status == 500
            assert "worker" in told["error"]["message"]
