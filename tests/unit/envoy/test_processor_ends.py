"""However a stream ends, each decision is settled exactly once; and a process stops without losing a request."""

import asyncio
import logging
import stat
from pathlib import Path

import grpc
import pytest
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as stubs

from extproc._pb.warmpath.v1 import health_pb2
from extproc.clock import ManualClock
from extproc.envoy.access_log import AccessLog
from extproc.envoy.contract import Decision
from extproc.envoy.copies import Copies
from extproc.envoy.discovery import Discovery, Roster
from extproc.envoy.health import EXT_PROC, LIVENESS, OVERALL, READINESS, Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, quiet_disconnects, stop
from extproc.errors import ConfigError
from tests.unit.envoy import gateway as gw
from tests.unit.envoy.gateway import BUFFERED, DUPLEX, PICK, Ledger, connected, running

Status = health_pb2.HealthCheckResponse


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_reset_before_the_body_decides_nothing(tmp_path: Path, mode: int) -> None:
    """A client that leaves before its body has come never reaches the decider."""
    ledger = Ledger()
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=mode))
        await gw.until_true(lambda: processor.counts.open == 1)
        stream.reset()
        await gw.until_true(lambda: processor.counts.open == 0)
    assert ledger.calls == []
    assert processor.counts.settled == 0


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
@pytest.mark.parametrize("outcome", [PICK, RuntimeError("too late")])
async def test_reset_while_deciding_settles_once_decided(
    tmp_path: Path, mode: int, outcome: Decision | Exception
) -> None:
    """A client that leaves while the decision is made does not cut it short: its charge is settled right after."""
    gate = asyncio.Event()
    ledger = Ledger(outcome, gate)
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=mode), gw.body(b"{}", end=True))
        await ledger.asked.wait()
        stream.reset()
        await gw.until_true(lambda: processor.counts.open == 0)
        assert processor.counts.abandoned == 1
        gate.set()
        await processor.settled()
        assert ledger.settled == ([(PICK, "")] if outcome is PICK else [])
        assert ledger.open == []


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_reset_after_the_pick_settles_once(tmp_path: Path, mode: int) -> None:
    """A client that leaves after the pick, before or in the middle of the answer, settles its decision once."""
    ledger = Ledger()
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=mode), gw.body(b"{}", end=True))
        await stream.reply()
        stream.reset()
        await gw.until_true(lambda: processor.counts.settled == 1)
        await processor.idle()
    assert ledger.settled == [(PICK, "")]
    assert ledger.open == []


async def test_reset_while_a_large_body_is_echoed_settles_once(tmp_path: Path) -> None:
    """A client that leaves while its body is being handed back settles its decision once, and frees the body."""
    ledger = Ledger()
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        chunks = [gw.body(b"x" * 65_536, end=i == 159) for i in range(160)]
        await stream.send(gw.headers(mode=DUPLEX), *chunks)
        await stream.reply()
        stream.reset()
        await gw.until_true(lambda: processor.counts.settled == 1)
        await gw.until_true(lambda: processor.counts.open == 0)
        assert processor.counts.held_bytes == 0
    assert ledger.settled == [(PICK, "")]


async def test_lost_connection_settles_every_stream(tmp_path: Path) -> None:
    """A gateway that dies takes all its streams along: each of their decisions is settled."""
    ledger = Ledger()
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path):
        async with connected(f"unix:{tmp_path / 'worker.sock'}") as channel:
            dying = gw.Gateway(stubs.ExternalProcessorStub(channel))
            streams = [dying.open() for _ in range(10)]
            for stream in streams:
                await stream.ask(gw.headers(end=True, mode=BUFFERED))
            assert len(ledger.open) == 10
        await gw.until_true(lambda: len(ledger.settled) == 10)
        await processor.idle()
    assert ledger.open == []


async def test_leaving_clients_are_not_logged_as_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client that goes first is everyday life for a lifeline: nothing above DEBUG is logged for it."""
    processor = Processor(Ledger(), Limits())
    with caplog.at_level(logging.DEBUG):
        async with running(processor, tmp_path) as gateway:
            for _ in range(50):
                stream = gateway.open()
                await stream.ask(gw.headers(end=True, mode=BUFFERED))
                await stream.call.done_writing()
                stream.reset()
            await gw.until_true(lambda: processor.counts.settled == 50)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG] == []


@pytest.mark.parametrize(("error", "logged"), [(grpc.aio.InternalError(), False), (ValueError(), True)])
def test_only_disconnects_are_kept_out_of_grpcs_log(
    error: Exception, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The status that could not be sent to a client that had gone is not logged; every other error of grpcio is."""
    quiet_disconnects()
    logging.getLogger("grpc._cython.cygrpc").error("raised by servicer method", exc_info=error)
    assert ("raised by servicer method" in caplog.text) is logged


async def test_unreadable_message_ends_the_stream_and_settles(tmp_path: Path) -> None:
    """Bytes that are no ProcessingRequest end the stream with an error; what was decided before is settled."""
    ledger = Ledger()
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path), connected(f"unix:{tmp_path / 'worker.sock'}") as channel:
        call = channel.stream_stream(f"/{EXT_PROC}/Process")()
        await call.write(gw.headers(end=True, mode=BUFFERED).SerializeToString())
        await call.read()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call.read()
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert ledger.settled == [(PICK, "")]
    assert processor.counts.unreadable == 1


@pytest.mark.parametrize("observing", [True, False])
@pytest.mark.parametrize("copies", [None, Copies(ManualClock())])
async def test_streams_that_cannot_be_served_are_refused_at_the_start(
    tmp_path: Path, observing: bool, copies: Copies | None
) -> None:
    """A gRPC body mode, and a gateway that ignores replies, get an error that names the modes to use."""
    request = gw.headers(mode=BUFFERED if observing else gw.Mode.GRPC)
    request.observability_mode = observing
    ledger = Ledger()
    async with running(Processor(ledger, Limits(), copies), tmp_path) as gateway:
        stream = gateway.open()
        with pytest.raises(grpc.aio.AioRpcError, match="use BUFFERED or FULL_DUPLEX_STREAMED"):
            await stream.ask(request)
    assert ledger.calls == []


async def test_message_of_no_known_kind_is_counted(tmp_path: Path) -> None:
    """An empty message is counted and not answered; the stream goes on."""
    processor = Processor(Ledger(), Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.ask(gw.headers(mode=BUFFERED))
        await stream.send(pb.ProcessingRequest())
        reply = await stream.ask(gw.body(b"{}", end=True))
        gw.assert_picks(reply, reply.request_body.response)
    assert processor.counts.unexpected == 1


async def test_more_streams_than_allowed_are_turned_away(tmp_path: Path) -> None:
    """Past `max_streams` a stream gets RESOURCE_EXHAUSTED, and those that were there first go on."""
    processor = Processor(Ledger(), Limits())
    address = f"unix:{tmp_path / 'w.sock'}"
    server = make_server([processor.handler()], max_body_bytes=1024, max_streams=1)
    bind(server, address)
    await server.start()
    async with connected(address) as channel:
        gateway = gw.Gateway(stubs.ExternalProcessorStub(channel))
        first = gateway.open()
        await first.ask(gw.headers(mode=BUFFERED))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await gateway.open().ask(gw.headers(mode=BUFFERED))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.ask(gw.body(b"{}", end=True))
    await server.stop(0)
    await processor.settled()


class Worker:
    """Everything a worker process serves, on one socket."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.address = f"unix:{folder / 'worker.sock'}"
        self.processor = Processor(ledger, Limits())
        self.health = Health()
        self.log = AccessLog(gw.Notebook())
        self.discovery = Discovery(Roster())
        parts = (self.processor, self.health, self.log, self.discovery)
        self.server = make_server([part.handler() for part in parts], max_body_bytes=1024)
        bind(self.server, self.address)

    async def stop(self, drain_s: float) -> None:
        """Stop as a worker does."""
        long_lived = (self.log, self.discovery)
        await stop(self.server, self.health, [self.processor], long_lived, drain_s=drain_s)


async def test_shutdown_lets_open_streams_finish(tmp_path: Path) -> None:
    """Readiness goes first, new streams are turned away, 20 open ones finish without an error, then it is over."""
    ledger = Ledger()
    worker = Worker(tmp_path, ledger)
    worker.health.set_ready(True)
    await worker.server.start()
    async with connected(worker.address) as channel:
        gateway = gw.Gateway(stubs.ExternalProcessorStub(channel))
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(
            health_pb2.HealthCheckRequest(service=READINESS).SerializeToString()
        )
        assert Status.FromString(await watch.read()).status == Status.SERVING
        tail = channel.stream_unary("/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs")()
        await tail.write(b"")
        streams = [gateway.open() for _ in range(20)]
        for stream in streams:
            await stream.ask(gw.headers(mode=BUFFERED))
        stopping = asyncio.ensure_future(worker.stop(drain_s=3600))
        assert Status.FromString(await watch.read()).status == Status.NOT_SERVING
        for stream in streams:
            reply = await stream.ask(gw.body(b"{}", end=True))
            gw.assert_picks(reply, reply.request_body.response)
        assert not stopping.done()
        for stream in streams:
            assert await stream.finish() == []
        # Ends with the last request, although the health and access-log streams are still held open.
        await asyncio.wait_for(stopping, 60)
        with pytest.raises(grpc.aio.AioRpcError):
            await gateway.open().ask(gw.headers(mode=BUFFERED))
    assert len(ledger.settled) == 20


async def test_shutdown_cancels_and_settles_what_does_not_finish(tmp_path: Path) -> None:
    """Streams that outlast the drain time are cancelled, and their decisions settled before the stop returns."""
    ledger = Ledger(settle_s=0.2)
    worker = Worker(tmp_path, ledger)
    await worker.server.start()
    async with connected(worker.address) as channel:
        gateway = gw.Gateway(stubs.ExternalProcessorStub(channel))
        streams = [gateway.open() for _ in range(5)]
        for stream in streams:
            await stream.ask(gw.headers(end=True, mode=BUFFERED))
        await worker.stop(drain_s=0.1)
        assert len(ledger.settled) == 5
        assert ledger.open == []


async def test_health_names(tmp_path: Path) -> None:
    """`liveness` serves from the start; the others follow readiness; an unknown name is NOT_FOUND, or watched so."""
    worker = Worker(tmp_path, Ledger())
    await worker.server.start()
    async with connected(worker.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")

        async def status(name: str) -> int:
            return Status.FromString(
                await check(health_pb2.HealthCheckRequest(service=name).SerializeToString())
            ).status

        following = (OVERALL, READINESS, EXT_PROC)
        assert await status(LIVENESS) == Status.SERVING
        assert [await status(name) for name in following] == [Status.NOT_SERVING] * 3
        worker.health.set_ready(True)
        assert [await status(name) for name in following] == [Status.SERVING] * 3
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await status("nobody")
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\x0a\x06nobody")
        assert Status.FromString(await watch.read()).status == Status.SERVICE_UNKNOWN
    await worker.stop(drain_s=0)


async def test_socket_file_is_replaced_and_private(tmp_path: Path) -> None:
    """A socket left by a dead process does not block a start; only owner and group may connect."""
    path = tmp_path / "worker.sock"
    for _ in range(2):
        server = make_server([Processor(Ledger(), Limits()).handler()], max_body_bytes=1024)
        bind(server, f"unix:{path}")
        await server.start()
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        # A dead process leaves its file behind; a stopped server would take it along.
        path.rename(tmp_path / "kept")
        await server.stop(0)
        (tmp_path / "kept").rename(path)


async def test_socket_of_a_living_process_is_not_taken_over(tmp_path: Path) -> None:
    """A second sidecar on one folder is refused; the first keeps its socket and goes on."""
    address = f"unix:{tmp_path / 'worker.sock'}"
    first = make_server([Processor(Ledger(), Limits()).handler()], max_body_bytes=1024)
    bind(first, address)
    await first.start()
    second = make_server([Processor(Ledger(), Limits()).handler()], max_body_bytes=1024)
    with pytest.raises(ConfigError, match="socket_dir"):
        bind(second, address)
    assert (tmp_path / "worker.sock").is_socket()
    await first.stop(0)


async def test_taken_port_is_a_clear_error() -> None:
    """A TCP port in use is named, with the section that sets it."""
    server = make_server([], max_body_bytes=1024)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    other = make_server([], max_body_bytes=1024)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*gateway.sidecar"):
        bind(other, f"127.0.0.1:{port}")
    await server.stop(0)


def test_service_runs_under_uvloop(tmp_path: Path) -> None:
    """The whole exchange works on uvloop too, which is what workers run on."""
    ledger = Ledger()

    async def once() -> None:
        async with running(Processor(ledger, Limits()), tmp_path) as gateway:
            stream = gateway.open()
            await stream.ask(gw.headers(mode=BUFFERED))
            reply = await stream.ask(gw.body(b"{}", end=True))
            gw.assert_picks(reply, reply.request_body.response)
            stream.reset()
            await gw.until_true(lambda: len(ledger.settled) == 1)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(once())
    assert ledger.settled == [(PICK, "")]
