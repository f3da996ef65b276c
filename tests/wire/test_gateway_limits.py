"""Limits of one request and of all connections, kept by a real Envoy, and the answers to those who pass them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from extproc.config import Gateway, Timeouts
from extproc.config_gateway import GatewayRoute
from tests.waiting import until_async
from tests.wire.gateway import CHAT, Answer, Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

MALFORMED = {
    "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "an unknown method": b"BREW /v1/chat/completions HTTP/1.1\r\nhost: a\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    "a negative length": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\nabcdef",
    "a length that is no number": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0x5\r\n\r\nabcde",
    "length and chunks": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
    "a chunk without size": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n",
    "a chunk of endless size": b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"f" * 40
    + b"\r\n",
    "a zero byte": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\x00b\r\n\r\n",
    "a folded line": b"GET / HTTP/1.1\r\nhost: a\r\nx: a\r\n b\r\n\x00\r\n\r\n",
}
LARGE = {
    "one": b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 9000 + b"\r\n\r\n",
    "an endless one": b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000,
    "an endless path": b"GET /" + b"y" * 100_000,
    "many": b"GET / HTTP/1.1\r\nhost: a\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(31)) + b"\r\n",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Running]:
    """A gateway with tight limits."""
    gateway = Gateway(
        max_body_bytes=1_000_000,
        max_headers_kb=8,
        max_header_count=30,
        receive_s=1.0,
        routes=[GatewayRoute(path="/v1/embeddings", max_body_bytes=2000)],
    )
    async with running_gateway(gateway) as running:
        yield running


async def sent(running: Running, request: bytes, *, half_close: bool = False) -> Answer:
    """What a request was answered that was written by hand."""
    head, _, body = (await running.raw(request, half_close=half_close)).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(first.split(" ")[1]), headers, body)


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED.keys())
async def test_what_is_no_request_is_answered_400(gateway: Running, request_: bytes) -> None:
    """In JSON, with a reason, and the connection is closed; nothing of it reaches the sidecar or an engine."""
    decided = len(gateway.desk.calls)
    answer = await sent(gateway, request_)
    assert answer.is_refusal(400, "malformed")
    assert answer.headers["connection"] == "close"
    assert len(gateway.desk.calls) == decided
    assert (await gateway.ask()).status == 200


async def test_other_refusals_of_envoy_keep_their_status(gateway: Running) -> None:
    """An old version is 426, an upgrade 403, an unknown encoding 501."""
    upgrade = b"GET /x HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
    assert (await sent(gateway, b"GET /v1/models HTTP/1.0\r\n\r\n")).is_refusal(426, "malformed")
    assert (await sent(gateway, upgrade)).is_refusal(403, "malformed")
    encoded = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n"
    assert (await sent(gateway, encoded)).is_refusal(501, "malformed")


@pytest.mark.parametrize("request_", LARGE.values(), ids=LARGE.keys())
async def test_too_large_or_too_many_headers_are_answered_431(gateway: Running, request_: bytes) -> None:
    """As soon as they pass the limit, without waiting for their end."""
    assert (await sent(gateway, request_)).is_refusal(431, "headers_too_large")


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx: ",
        b"P",
    ],
    ids=["body", "chunks", "headers", "one byte"],
)
async def test_a_request_that_does_not_come_is_answered_408(gateway: Running, request_: bytes) -> None:
    """`receive_s` is for the whole request, its headers included."""
    assert (await sent(gateway, request_)).is_refusal(408, "receive_time_limit")


async def test_a_slow_trickle_does_not_help(gateway: Running) -> None:
    """A byte now and then resets no timer."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n")
    answer = asyncio.create_task(reader.read(4096))
    with contextlib.suppress(ConnectionError):
        while not answer.done():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.1)
    assert (await answer).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_the_limit_ends_with_the_last_byte_of_a_body(gateway: Running) -> None:
    """Neither the sidecar's time nor the engine's counts."""
    gateway.desk.silent_s = 0.8
    assert (await gateway.ask(path=f"{CHAT}?wait=1")).status == 200
    gateway.desk.silent_s = 0.0


async def test_a_client_that_closes_its_side_half_way_is_forgotten(gateway: Running) -> None:
    """Half a request and no more to come: nothing is kept of it."""
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"
    assert await gateway.raw(request, half_close=True) == b""

    async def gone() -> bool:
        return await gateway.stat("http.public.downstream_rq_active") == 0

    await until_async(gone)


@pytest.mark.parametrize(("path", "limit"), [(CHAT, 1_000_000), ("/v1/embeddings", 2000), ("/v1/embeddings/x?y", 2000)])
@pytest.mark.parametrize("over", [1, 100_000])
async def test_a_path_may_have_its_own_limit_on_bodies(gateway: Running, path: str, limit: int, over: int) -> None:
    """Exact to the byte, and the answer names the limit that was passed."""
    assert (await gateway.ask(path=path, body=b"x" * limit)).status == 200
    answer = await gateway.ask(path=path, body=b"x" * (limit + over))
    assert answer.is_refusal(413, "body_too_large")
    assert f"{limit} bytes" in answer.json["error"]["message"]


async def test_one_connection_too_many_is_closed_and_the_others_work() -> None:
    """`max_connections` counts clients, not who looks at Envoy's own pages."""
    async with running_gateway(Gateway(max_connections=5)) as running:
        await running.http.close()
        open_ones = [await asyncio.open_connection(*running.address) for _ in range(5)]
        request = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
        for reader, writer in open_ones:
            writer.write(request)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await running.raw(request) == b""
        open_ones[0][1].close()

        async def admitted() -> bool:
            return b"200 OK" in await running.raw(request, limit_s=1.0)

        await until_async(admitted)
        for _, writer in open_ones:
            writer.close()


async def test_limits_of_time_are_told_apart() -> None:
    """A request that is not received is 408, one that is not answered 504."""
    async with running_gateway(Gateway(receive_s=0.5), timeouts=Timeouts(request_s=1.5)) as running:
        assert (await running.ask(path=f"{CHAT}?wait=30")).is_refusal(504, "time_limit")
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{"
        assert (await sent(running, request)).is_refusal(408, "receive_time_limit")
