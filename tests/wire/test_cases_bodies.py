"""Cases C4, C7, C9 and C10: bodies in pieces, before a second processor, not there at all, or packed."""

import asyncio
import contextlib
import copy
import gzip
import hashlib
import io
import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from extproc.config import BodyMode, Config, Gateway, Model, Pool, Sidecar
from extproc.config import split_address as split
from extproc.envoy.contract import Call, Decision
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, stop
from extproc.request.shapes import parse
from tests.ports import free_port
from tests.wire.envoy import RunningEnvoy, running_envoy
from tests.wire.standins import Keeper

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
SECOND = "second_processor"
JSON = b'{"model":"m","messages":[{"role":"user","content":"' + b"how warm is the path? " * 300 + b'"}]}'


@dataclass
class Desk:
    """Takes whatever comes, and remembers it."""

    calls: list[Call] = field(default_factory=list)

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        self.calls.append(call)
        return Decision(pool="main")

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""

    async def settle(self, decision: Decision, _served: str = "") -> None:
        """See `Decider.settle`."""


@dataclass
class Mirror:
    """An engine that answers with the body that it got, in pieces, and says what it saw in headers."""

    address: str = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Mirror"]:
        """Listen on a free port."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, auto_decompress=False)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"127.0.0.1:{site.port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @staticmethod
    async def _answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = {"x-seen-encoding": request.headers.get("content-encoding", ""), "x-seen-method": request.method}
        answer = web.StreamResponse(headers={"content-type": "application/octet-stream", **seen})
        await answer.prepare(request)
        for at in range(0, len(body), 50_000):
            await answer.write(body[at : at + 50_000])
        return answer


@dataclass
class Stack:
    """Envoy between a client and the mirror, with one processor of ours and perhaps another one."""

    envoy: RunningEnvoy
    http: aiohttp.ClientSession
    desk: Desk
    other: Processor
    processor: Processor
    address: str
    mode: BodyMode

    async def post(self, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, bytes, dict[str, str]]:
        """Send one request; status, body and headers of its answer."""
        url = f"{self.envoy.url}{PATH}"
        async with self.http.post(url, data=io.BytesIO(body), headers=headers) as answer:
            return answer.status, await answer.read(), {name.lower(): text for name, text in answer.headers.items()}


@contextlib.asynccontextmanager
async def running(mode: BodyMode, second: str = "") -> AsyncIterator[Stack]:
    """All of it; `second` is where in the chain another full-duplex processor stands: `before` or `after` ours."""
    folder = Path(tempfile.mkdtemp(prefix="wp-"))
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        mirror = await cleanup.enter_async_context(Mirror().running())
        config = Config(
            models={"m": Model(pool="main")},
            pools={"main": Pool(endpoints=[mirror.address])},
            gateway=Gateway(
                listen=f"127.0.0.1:{free_port()}",
                admin=f"127.0.0.1:{free_port()}",
                body_mode=mode,
                fail_open=False,
                sidecar=Sidecar(socket_dir=str(folder), workers=1),
            ),
        )
        desk = Desk()
        ours = Processor(desk, Limits(body_mode=mode, fail_open=False))
        other = Processor(Desk(), Limits(body_mode="duplex", fail_open=False))
        for socket, processor in (("worker-0", ours), ("second", other)):
            health = Health()
            server = make_server([processor.handler(), health.handler()], max_body_bytes=1 << 26)
            bind(server, f"unix:{folder / socket}.sock")
            await server.start()
            health.set_ready(True)
            cleanup.push_async_callback(stop, server, health, [processor], [], drain_s=1)
        keeper = Keeper([mirror.address])
        await keeper.start(f"{folder}/keeper.sock")
        cleanup.push_async_callback(keeper.stop)

        def change(rendered: dict[str, Any]) -> None:
            if second:
                add_second(rendered, f"{folder}/second.sock", second)

        envoy = await cleanup.enter_async_context(running_envoy(config, change=change))
        http = await cleanup.enter_async_context(aiohttp.ClientSession())
        yield Stack(envoy, http, desk, other, ours, config.gateway.listen, mode)


def add_second(rendered: dict[str, Any], socket: str, place: str) -> None:
    """Put another ext_proc filter into the chain, which takes bodies of both directions in full-duplex mode."""
    resources = rendered["static_resources"]
    chain = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    at = next(index for index, each in enumerate(chain) if each["name"] == "envoy.filters.http.ext_proc")
    filter_ = copy.deepcopy(chain[at])
    filter_["name"] = SECOND
    filter_["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = SECOND
    filter_["typed_config"]["processing_mode"] = {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    }
    chain.insert(at + (place == "after"), filter_)
    cluster = copy.deepcopy(next(each for each in resources["clusters"] if each["name"] == "warmpath_workers"))
    cluster["name"] = cluster["load_assignment"]["cluster_name"] = SECOND
    [endpoint] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"] = {"pipe": {"path": socket}}
    resources["clusters"].append(cluster)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_a_second_processor_in_the_chain_truncates_nothing(mode: BodyMode, place: str) -> None:
    """Case C7: two processors in one chain, both in full-duplex mode: each byte of request and answer arrives."""
    async with running(mode, place) as stack:
        for size in (1, 70_000, 3_000_000):
            body = random.Random(size).randbytes(size)
            status, got, _ = await stack.post(body)
            assert (status, len(got), hashlib.sha256(got).digest()) == (200, size, hashlib.sha256(body).digest())
            assert stack.desk.calls[-1].body == body
        assert stack.other.counts.streams == stack.processor.counts.streams == 3
        assert stack.other.counts.unexpected == stack.processor.counts.unexpected == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "duplex"])
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """One processor alone, in each body mode."""
    async with running(request.param) as started:
        yield started


async def test_a_body_in_three_pieces_and_an_empty_end_arrives_once(stack: Stack) -> None:
    """Case C4: the end of the body comes by itself; it is passed on exactly once, and the bytes are the same."""
    pieces = [b"first, ", b"second, ", b"third"]
    reader, writer = await asyncio.open_connection(*split(stack.address))
    writer.write(f"POST {PATH} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode())
    for piece in [*pieces, b""]:
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await writer.drain()
        await asyncio.sleep(0.05)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"".join(body.split(b"\r\n")[1::2]) == b"".join(pieces)
    assert stack.desk.calls[-1].body == b"".join(pieces)
    assert "spurious_msgs_received: 0" in await stack.envoy.get("/stats?filter=http.public.ext_proc.spurious")
    assert stack.processor.counts.unexpected == 0


@pytest.mark.parametrize("encoding", ["zstd", "br", "deflate", "x-unknown"])
async def test_a_body_packed_in_another_way_than_gzip_passes_untouched(stack: Stack, encoding: str) -> None:
    """Case C10: nobody here can read it, so it is decided on without its text, and the engine gets it as it was."""
    body = random.Random(7).randbytes(20_000)
    status, got, headers = await stack.post(body, {"content-encoding": encoding})
    assert (status, got, headers["x-seen-encoding"]) == (200, body, encoding)
    call = stack.desk.calls[-1]
    assert call.body == body
    assert parse(call.path, call.headers, call.body).flaw == "not_json"


async def test_a_gzip_body_is_unpacked_for_the_decision_and_the_engine(stack: Stack) -> None:
    """Case C10: both see the plain text, and no header says otherwise."""
    status, got, headers = await stack.post(gzip.compress(JSON), {"content-encoding": "gzip"})
    assert stack.desk.calls[-1].body == JSON
    assert (status, got, headers["x-seen-encoding"]) == (200, JSON, "")


@pytest.mark.parametrize("damage", ["no gzip at all", "cut off", "a flipped byte"])
async def test_a_damaged_gzip_body_is_never_served_as_something_else(stack: Stack, damage: str) -> None:
    """Case C10: Envoy passes on what it could unpack, which is no JSON any more: the engine answers 400."""
    packed = gzip.compress(JSON)
    body = {
        "no gzip at all": JSON,
        "cut off": packed[:-20],
        "a flipped byte": packed[:60] + bytes([packed[60] ^ 0xFF]) + packed[61:],
    }[damage]
    await stack.post(body, {"content-encoding": "gzip"})
    call = stack.desk.calls[-1]
    assert len(call.body) < len(JSON)
    assert parse(call.path, call.headers, call.body).flaw in {"empty", "not_json"}


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
async def test_requests_without_a_body_are_decided_on(stack: Stack, method: str) -> None:
    """Case C9: no body ever comes; the decision is made at the headers, and the request passes."""
    before = len(stack.desk.calls)
    async with stack.http.request(method, f"{stack.envoy.url}/v1/models") as answer:
        await answer.read()
        assert (answer.status, answer.headers["x-seen-method"]) == (200, method)
    assert len(stack.desk.calls) == before + 1
    assert stack.processor.counts.unexpected == 0
