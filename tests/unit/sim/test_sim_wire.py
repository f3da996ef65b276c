"""HTTP framing and connection life, byte by byte where a client library would hide it."""

import asyncio
import io
import json

import aiohttp
import pytest

from extproc.sim.fleet import SimFleet
from extproc.sim.settings import SimSettings
from tests.unit.sim.client import settled

BODY = json.dumps({"model": "sim", "prompt": "hello", "max_tokens": 2}).encode()


async def connect(fleet: SimFleet) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a plain connection to the first engine."""
    host, port = fleet.addresses[0].rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one answer that has a content length; return status and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lengths = [line for line in head.split("\r\n") if line.startswith("content-length:")]
    body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
    return int(head.split()[1]), body


def post(body: bytes, *headers: bytes) -> bytes:
    """A completions request, with its length unless the headers frame it otherwise."""
    framing = headers or (b"content-length: %d" % len(body),)
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%s\r\n\r\n%s" % (b"\r\n".join(framing), body)


async def finish(writer: asyncio.StreamWriter) -> None:
    """Close a plain connection."""
    writer.close()
    await writer.wait_closed()


async def test_pipelined_requests_are_answered_in_order(fleet: SimFleet) -> None:
    """Three requests in one write: three answers, each whole, in the order asked."""
    reader, writer = await connect(fleet)
    writer.write(post(BODY) + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" + post(BODY))
    answers = [await read_answer(reader) for _ in range(3)]
    assert [status for status, _ in answers] == [200, 200, 200]
    assert json.loads(answers[1][1]) == {"version": "0.33.0"}
    assert json.loads(answers[2][1])["object"] == "text_completion"
    await finish(writer)


async def test_a_chunked_request_body(fleet: SimFleet) -> None:
    """Pieces of any size, down to one byte."""
    reader, writer = await connect(fleet)
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    writer.write(post(pieces, b"transfer-encoding: chunked"))
    status, body = await read_answer(reader)
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2)
    await finish(writer)


async def test_a_client_may_wait_for_leave_to_send(fleet: SimFleet) -> None:
    """Expect: 100-continue gets its leave before the body is there."""
    reader, writer = await connect(fleet)
    writer.write(post(b"", b"content-length: %d" % len(BODY), b"expect: 100-continue"))
    assert await read_answer(reader) == (100, b"")
    writer.write(BODY)
    assert (await read_answer(reader))[0] == 200
    await finish(writer)


async def test_http_1_0_gets_an_answer_without_chunks(fleet: SimFleet) -> None:
    """And the connection closes after it."""
    reader, writer = await connect(fleet)
    body = json.dumps({"model": "sim", "prompt": "hello", "max_tokens": 2, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    answer = await reader.read()
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert rest.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")
    await finish(writer)


async def test_head_has_no_body(fleet: SimFleet) -> None:
    """The next answer on the connection is not misread."""
    reader, writer = await connect(fleet)
    writer.write(b"HEAD /version HTTP/1.1\r\nhost: x\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405")
    assert (await read_answer(reader))[0] == 200
    await finish(writer)


async def test_what_is_no_http_is_turned_away(fleet: SimFleet) -> None:
    """400, and the connection ends."""
    reader, writer = await connect(fleet)
    writer.write(b"\x16\x03\x01 not http\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    await finish(writer)


async def test_bodies_of_many_megabytes_and_not_more_than_allowed() -> None:
    """A picture of 20 MB is one prompt of few tokens; above the limit 413 after the body was read."""
    settings = SimSettings(max_body_bytes=21 << 20, time_factor=20.0)
    async with SimFleet(1, settings) as fleet, aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client:
        for size, status in ((20 << 20, 200), (22 << 20, 413)):
            part = {"type": "image_url", "image_url": {"url": "data:" + "x" * size}}
            body = {"model": "sim", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
            data = io.BytesIO(json.dumps(body).encode())
            async with client.post("/v1/chat/completions", data=data) as response:
                assert response.status == status


async def test_headers_come_before_the_first_token(client: aiohttp.ClientSession) -> None:
    """While the engine hangs a streamed request has its 200 already; so a status proves nothing."""
    await client.post("/sim/freeze", json={"frozen": True})
    body = json.loads(BODY) | {"stream": True}
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200
        await client.post("/sim/freeze", json={"frozen": False})
        assert (await response.read()).endswith(b"[DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(client: aiohttp.ClientSession, stream: bool) -> None:
    """Aborted while it decodes, while it is in prefill and while it waits: nothing is left in the engine."""
    long = {"model": "sim", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    prompts = ["a" * 400, "b" * 16_000, "c" * 16_000, "d" * 16_000]
    tasks = [asyncio.create_task(client.post("/v1/completions", json=long | {"prompt": prompt})) for prompt in prompts]
    before = await settled(client, live=4)
    assert before["blocks_free"] < 1024
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, aiohttp.ClientResponse):
            result.close()
    after = await settled(client, live=0)
    assert after["blocks_free"] == 1024
    async with client.get("/metrics") as response:
        page = await response.text()
    own = 'model_name="sim",engine="0"'
    assert f"vllm:num_requests_running{{{own}}} 0.0" in page.splitlines()
    assert f'vllm:request_success_total{{{own},finished_reason="length"}} 0.0' in page.splitlines()


async def test_an_idle_connection_is_closed() -> None:
    """After keep_alive_s, but not while an answer is in progress."""
    settings = SimSettings(keep_alive_s=0.05, control=True)
    async with SimFleet(1, settings) as fleet:
        reader, writer = await connect(fleet)
        assert await reader.read() == b""
        await finish(writer)
        busy_reader, busy_writer = await connect(fleet)
        long = json.dumps({"model": "sim", "prompt": "x", "max_tokens": 50}).encode()
        busy_writer.write(post(long))
        assert (await read_answer(busy_reader))[0] == 200
        assert await busy_reader.read() == b""
        await finish(busy_writer)
