"""The other sides of the services: a gateway that plays ext_proc messages, deciders and observers that remember."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as stubs

from extproc.envoy.contract import DESTINATION, METADATA, POOL, SERVED, SUBSET, Attempt, Call, Decision, Served
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server

Mode = processing_mode_pb2.ProcessingMode
BUFFERED, DUPLEX, STREAMED, NONE = Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED, Mode.STREAMED, Mode.NONE

PICK = Decision(
    pool="llama",
    destinations=("10.0.0.1:8000", "10.0.0.2:8000"),
    charge_id="c-1",
    metadata={"policy": "p", "cost": 2.5},
)


class Ledger:
    """A decider that keeps books: what was asked, decided and settled.

    Args:
        outcome: the decision every call gets, or what to raise.
        gate: when given, decisions wait for it.
        settle_s: how long settling takes, in seconds, as it does with a store far away.
    """

    def __init__(
        self, outcome: Decision | Exception = PICK, gate: asyncio.Event | None = None, settle_s: float = 0.0
    ) -> None:
        self.outcome = outcome
        self.gate = gate
        self.settle_s = settle_s
        self.calls: list[Call] = []
        self.open: list[Decision] = []
        self.settled: list[tuple[Decision, str]] = []
        self.told: list[tuple[Decision, str]] = []
        self.asked = asyncio.Event()

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        self.calls.append(msgspec.structs.replace(call, line=None))
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.open.append(msgspec.structs.replace(self.outcome, body=None))
        return self.outcome

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""
        self.told.append((decision, served))

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`. Settling what is not open is an error of the caller."""
        if self.settle_s:
            await asyncio.sleep(self.settle_s)
        self.open.remove(decision)
        self.settled.append((decision, served))


class Notebook:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.seen: list[Served] = []
        self.tried: list[Served] = []
        self.failed: list[Attempt] = []

    def observe(self, served: Served) -> None:
        """See `Observer.observe`."""
        self.seen.append(served)

    def attempt_failed(self, attempt: Attempt) -> None:
        """See `Observer.attempt_failed`."""
        self.failed.append(attempt)

    def tried_again(self, served: Served) -> None:
        """See `Observer.tried_again`."""
        self.tried.append(served)


def headers(
    values: Mapping[str, str] | None = None,
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    end: bool = False,
    mode: int | None = None,
    response_mode: int = NONE,
    subset: Iterable[str] | None = None,
) -> pb.ProcessingRequest:
    """The first message of a stream, as Envoy writes it: values in `raw_value`."""
    request = pb.ProcessingRequest()
    request.request_headers.end_of_stream = end
    for key, value in {":method": method, ":path": path, **(values or {})}.items():
        request.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    if mode is not None:
        request.protocol_config.request_body_mode = mode
        request.protocol_config.response_body_mode = response_mode
    if subset is not None:
        hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[SUBSET].list_value
        hint.SetInParent()
        hint.extend(list(subset))
    return request


def body(chunk: bytes, *, end: bool) -> pb.ProcessingRequest:
    """A piece of the request body."""
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=chunk, end_of_stream=end))


def trailers() -> pb.ProcessingRequest:
    """Request trailers."""
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers())


def response_headers(served: str = "") -> pb.ProcessingRequest:
    """Response headers, with the endpoint that answered when the gateway tells."""
    request = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
    if served:
        request.metadata_context.filter_metadata["envoy.lb"].fields[SERVED].string_value = served
    return request


def response_body(chunk: bytes, *, end: bool) -> pb.ProcessingRequest:
    """A piece of the response body."""
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=chunk, end_of_stream=end))


def response_trailers() -> pb.ProcessingRequest:
    """Response trailers."""
    return pb.ProcessingRequest(response_trailers=pb.HttpTrailers())


def set_headers(mutation: Any) -> dict[str, str]:
    """Headers that a mutation sets. Checks what Envoy insists on: the value in `raw_value` alone, overwriting."""
    for option in mutation.set_headers:
        assert not option.header.value
        assert option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def assert_picks(
    reply: pb.ProcessingResponse, common: Any, decision: Decision = PICK, more: Mapping[str, str] | None = None
) -> None:
    """The reply carries the pick as the Endpoint Picker Protocol wants it: header and metadata, equal.

    `more` are headers that it sets besides.
    """
    destinations = ",".join(decision.destinations)
    assert common.clear_route_cache
    assert set_headers(common.header_mutation) == {POOL: decision.pool, DESTINATION: destinations, **(more or {})}
    fields = reply.dynamic_metadata.fields
    assert fields["envoy.lb"].struct_value.fields[DESTINATION].string_value == destinations
    ours = {
        key: value.string_value or value.number_value for key, value in fields[METADATA].struct_value.fields.items()
    }
    assert ours == {"pool": decision.pool, "charge_id": decision.charge_id, **decision.metadata}


class Stream:
    """One ext_proc stream, from the gateway's end."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *requests: pb.ProcessingRequest) -> None:
        """Send messages without waiting for replies."""
        for request in requests:
            await self.call.write(request)

    async def reply(self) -> pb.ProcessingResponse:
        """The next reply."""
        return await asyncio.wait_for(self.call.read(), 20)

    async def ask(self, request: pb.ProcessingRequest) -> pb.ProcessingResponse:
        """Send one message and return the reply to it."""
        await self.send(request)
        return await self.reply()

    async def finish(self) -> list[pb.ProcessingResponse]:
        """End the stream as a gateway does when its request is over; returns replies nobody has read."""
        await self.call.done_writing()
        replies = []
        while isinstance(reply := await self.reply(), pb.ProcessingResponse):
            replies.append(reply)
        return replies

    def reset(self) -> None:
        """End the stream at once, as when the client goes away."""
        self.call.cancel()


class Gateway:
    """A connection to a processor."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def open(self) -> Stream:
        """Open a stream."""
        return Stream(self._stub.Process())


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    """A channel without message limits."""
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=limits) as channel:
        yield channel


@asynccontextmanager
async def running(processor: Processor, folder: Path, limits: Limits | None = None) -> AsyncIterator[Gateway]:
    """A processor on a Unix socket, and a gateway connected to it. Ends with every decision settled."""
    address = f"unix:{folder / 'worker.sock'}"
    server = make_server([processor.handler()], max_body_bytes=(limits or processor.limits).max_body_bytes)
    bind(server, address)
    await server.start()
    try:
        async with connected(address) as channel:
            yield Gateway(stubs.ExternalProcessorStub(channel))
    finally:
        await server.stop(0)
        await processor.settled()


async def until_true(condition: Callable[[], bool]) -> None:
    """Wait, a turn of the event loop at a time, for what other tasks are about to make true."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the conditions are plain values of many owners
            await asyncio.sleep(0.002)
