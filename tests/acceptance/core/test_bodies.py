"""What goes through the gateway, and in what shape it reaches the engine."""

import contextlib
import gzip
import hashlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.acceptance import h2c
from tests.acceptance.echo import echoing
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, Answer, Local, chat_body, configuration, running, simulated

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1024 * 1024
LIMIT = 21 * MIB
ECHO = "echo"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """Two echoing engines as the default pool, two simulated ones behind the model `sim`."""
    async with contextlib.AsyncExitStack() as cleanup:
        echoes = [await cleanup.enter_async_context(echoing()) for _ in range(2)]
        engines = await cleanup.enter_async_context(simulated(journal, each=2))
        pools = {ECHO: echoes, "main": [engine.address for engine in engines]}
        document = configuration(pools, gateway={"max_body_bytes": LIMIT, "message_timeout_ms": 20_000})
        yield await cleanup.enter_async_context(running(journal, folder / "warmpath.yaml", document, engines))


async def echo(local: Local, body: bytes, headers: dict[str, str] | None = None) -> Answer:
    """Send a body that the default pool gets, and check that it went in whole."""
    answer = await local.ask(body=body, headers=headers)
    assert answer.status == 200, answer.body[:500]
    assert (answer.json["bytes"], answer.json["sha256"]) == (len(body), hashlib.sha256(body).hexdigest())
    return answer


@pytest.mark.parametrize("size", [1, 32_769, 200_000, 5 * MIB, 20 * MIB])
@pytest.mark.parametrize("kind", ["bytes", "json"])
async def test_a_body_of_any_size_reaches_the_engine_unchanged(local: Local, kind: str, size: int) -> None:
    """Every byte arrives, whether the body is a request that is understood or not one at all."""
    shell = b'{"model":"echo","messages":[{"role":"user","content":""}]}'
    if kind == "json" and size > len(shell):
        body = shell.replace(b'content":"', b'content":"' + b"a b " * ((size - len(shell)) // 4 + 1))[: size - 4]
        body += b'"}]}'
        assert json.loads(body)
        assert len(body) == size
    else:
        body = random.Random(size).randbytes(size)
    await echo(local, body)


async def test_a_body_over_the_limit_is_refused_with_json(local: Local) -> None:
    """One byte more than `gateway.max_body_bytes` is a 413 that OpenAI's clients can read, and says why."""
    await echo(local, b"x" * LIMIT)
    answer = await local.ask(body=b"x" * (LIMIT + 1))
    assert answer.status == 413
    assert answer.headers["x-warmpath-reason"] == "body_too_large"
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    assert (error["code"], error["type"], error["param"]) == (413, "invalid_request_error", None)
    assert str(LIMIT) in error["message"]


async def test_a_packed_body_over_the_limit_is_refused_too(local: Local) -> None:
    """The limit counts unpacked bytes: a small gzip body cannot grow past it."""
    answer = await local.ask(body=gzip.compress(b"x" * (LIMIT + MIB)), headers={"content-encoding": "gzip"})
    assert (answer.status, answer.headers["x-warmpath-reason"]) == (413, "body_too_large")


@pytest.mark.parametrize("body", [b"x", b"{", b"[1, 2", b'{"model": 7}', b"\xff\xfe\x00", b'"text"', b"null"])
async def test_what_is_no_request_goes_on_untouched_and_is_picked_by_load(local: Local, body: bytes) -> None:
    """Warmpath judges no bodies: it passes them on, and still decides."""
    before = await local.metric("warmpath_decisions_total", pool=ECHO)
    await echo(local, body)
    assert await local.metric("warmpath_decisions_total", pool=ECHO) == before + 1
    assert await local.metric("warmpath_fallbacks_total", pool=ECHO, rung="load_only") > 0


async def test_a_gzip_body_is_a_twin_of_the_plain_one(local: Local) -> None:
    """What came plain is found in the cache when it comes packed: the sidecar and the engine see it unpacked."""
    body = chat_body("how warm is the path? " * 200)
    first, first_by = await _served(local, body, {})
    second, second_by = await _served(local, gzip.compress(body), {"content-encoding": "gzip"})
    assert first.cached_tokens == 0
    assert second.cached_tokens > 0.9 * second.json["usage"]["prompt_tokens"] - 16
    assert first_by == second_by


async def _served(local: Local, body: bytes, headers: dict[str, str]) -> tuple[Answer, str]:
    before = [await engine.prompt_tokens() for engine in local.engines]
    answer = await local.ask(body=body, headers=headers)
    assert answer.status == 200, answer.body[:500]
    after = [await engine.prompt_tokens() for engine in local.engines]
    return answer, next(one.address for one, a, b in zip(local.engines, before, after, strict=True) if b > a)


async def test_forged_routing_headers_are_ignored(local: Local) -> None:
    """A client cannot choose its pool, endpoint or tenant: such headers never reach a decision or an engine."""
    foreign = local.engines[0].address
    forged = {
        "x-gateway-destination-endpoint": foreign,
        "x-gateway-destination-endpoint-subset": foreign,
        "x-gateway-destination-endpoint-served": foreign,
        "X-Gateway-Destination-Endpoint-Anything": foreign,
        "x-warmpath-pool": "main",
        "x-warmpath-tenant": "somebody",
        "x-warmpath-reason": "none",
    }
    for headers in ({name: value} for name, value in forged.items()):
        answer = await echo(local, chat_body("hello", model=ECHO), headers)
        seen = answer.json["headers"]
        assert seen.get("x-warmpath-pool", ECHO) == ECHO
        assert foreign not in seen.get("x-gateway-destination-endpoint", "")
        assert not set(seen) & {"x-warmpath-tenant", "x-warmpath-reason"}
        assert not [name for name in seen if name.startswith("x-gateway-destination-endpoint-")]
    everything = await echo(local, chat_body("hello", model=ECHO), forged)
    assert foreign not in everything.json["headers"].values()


async def test_an_unknown_model_is_refused_with_json(local: Local) -> None:
    """A model that nobody serves is a 404 with its reason; no engine is asked."""
    answer = await local.ask(body=chat_body("hello", model="nobody's"))
    assert (answer.status, answer.headers["x-warmpath-reason"]) == (404, "unknown_model")
    error = answer.json["error"]
    assert (error["code"], error["type"]) == (404, "not_found_error")
    assert "nobody's" in error["message"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/files"), ("OPTIONS", CHAT), ("GET", "/health?deep=1"), ("DELETE", "/v1/files/1")]
)
async def test_other_methods_pass(local: Local, method: str, path: str) -> None:
    """What is no completion reaches an engine as it is."""
    answer = await local.ask(path, method=method)
    assert (answer.status, answer.json["method"], answer.json["target"]) == (200, method, path)


async def test_head_passes(local: Local) -> None:
    """HEAD is answered with headers alone."""
    answer = await local.ask("/health", method="HEAD")
    assert (answer.status, answer.body) == (200, b"")


async def test_a_client_of_cleartext_http2_is_served(local: Local) -> None:
    """The listener speaks HTTP/2 without TLS to clients that begin with it."""
    body = chat_body("hello over two " * 50, model=ECHO)
    status, answer = await h2c.post(local.url.removeprefix("http://"), CHAT, body, {"content-type": "application/json"})
    assert (status, json.loads(answer)["sha256"]) == (200, hashlib.sha256(body).hexdigest())


async def test_no_decision_failed(local: Local) -> None:
    """A fault of a decision would have failed open, and nobody would have noticed."""
    for kind in ("failed_open", "unexpected", "unreadable"):
        assert await local.metric("warmpath_exchange_anomalies_total", kind=kind) == 0
