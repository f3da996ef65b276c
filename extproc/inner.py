"""What processes of the sidecar ask workers, an API of their own.

The keeper asks those of its host for their metrics page, their readiness, and why they decided; workers ask each other
to end requests, and hand each other copies of answers.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import grpc
import msgspec
from google.protobuf.empty_pb2 import Empty
from google.protobuf.wrappers_pb2 import BytesValue, StringValue

from extproc._pb.warmpath.v1 import health_pb2
from extproc.choose.explain import Explanation
from extproc.envoy.contract import Call, Copy
from extproc.envoy.health import READINESS
from extproc.errors import WarmpathError, WorkerError

_SERVICE = "warmpath.v1.Worker"
_CALL_S = 1.0
# Reading a prompt of the largest size takes a worker some 0.2 s, and it has decisions to make meanwhile.
_EXPLAIN_S = 10.0
# grpc refuses messages over 4 MiB by default; the page of a pool with thousands of endpoints is longer.
_OPTIONS = [("grpc.max_receive_message_length", -1)]


class Question(msgspec.Struct, frozen=True):
    """A request to explain, as the gateway would hand it on: header names in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class Told(msgspec.Struct, frozen=True):
    """A worker's answer as HTTP has it: 200 with an `Explanation`, or the status and body of an error. UTF-8 JSON."""

    status: int
    body: bytes


class Explains(Protocol):
    """Who explains decisions. Both raise `WarmpathError` for what cannot be explained."""

    async def explain(self, call: Call) -> Explanation:
        """What would be decided for `call` now."""
        ...

    def recall(self, name: str) -> Explanation:
        """Why a past decision was made, by its charge id or its request's id."""
        ...


# In MessagePack a body is itself; JSON would make it a third longer, over the limit of a worker's messages.
_pack = msgspec.msgpack.encode
_read_question = msgspec.msgpack.Decoder(Question).decode
_read_told = msgspec.msgpack.Decoder(Told).decode
_read_ends = msgspec.msgpack.Decoder(dict[str, str]).decode
_read_copy = msgspec.msgpack.Decoder(tuple[str, Copy | None]).decode


End = Callable[[Mapping[str, str]], Awaitable[str]]
"""Ends requests, by the charge and the time limit that ran out, and returns the worker's id. Never raises."""

Taken = Callable[[str, Copy | None], Awaitable[None]]
"""Takes a copy of an answer, and the charge that it belongs to. Never raises."""


def handler(
    page: Callable[[], bytes], explains: Explains, end: End | None = None, taken: Taken | None = None
) -> grpc.GenericRpcHandler:
    """The service for a worker's gRPC server; `page` gives its metrics page."""

    async def metrics(_request: Empty, _context: Any) -> BytesValue:
        return BytesValue(value=page())

    async def explain(request: BytesValue, _context: Any) -> BytesValue:
        question = _read_question(request.value)
        return await _telling(explains.explain(Call("POST", question.path, question.headers, question.body)))

    async def recall(request: StringValue, _context: Any) -> BytesValue:
        async def found() -> Explanation:
            return explains.recall(request.value)

        return await _telling(found())

    async def ended(request: BytesValue, _context: Any) -> StringValue:
        told = _read_ends(request.value)
        return StringValue(value="" if end is None else await end(told))

    async def captured(request: BytesValue, _context: Any) -> Empty:
        if taken is not None:
            await taken(*_read_copy(request.value))
        return Empty()

    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Captured": grpc.unary_unary_rpc_method_handler(captured, BytesValue.FromString, Empty.SerializeToString),
        "End": grpc.unary_unary_rpc_method_handler(ended, BytesValue.FromString, StringValue.SerializeToString),
        "Metrics": grpc.unary_unary_rpc_method_handler(metrics, Empty.FromString, BytesValue.SerializeToString),
        "Explain": grpc.unary_unary_rpc_method_handler(explain, BytesValue.FromString, BytesValue.SerializeToString),
        "Recall": grpc.unary_unary_rpc_method_handler(recall, StringValue.FromString, BytesValue.SerializeToString),
    }
    return grpc.method_handlers_generic_handler(_SERVICE, methods)


async def _telling(explained: Awaitable[Explanation]) -> BytesValue:
    try:
        told = Told(200, msgspec.json.encode(await explained))
    except WarmpathError as error:
        told = Told(error.status, error.body())
    return BytesValue(value=_pack(told))


def channel(address: str) -> grpc.aio.Channel:
    """A channel to the worker at `address`; it connects when it is first used."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


async def read_page(channel: grpc.aio.Channel) -> bytes:
    """Ask a worker for its page. Raises WorkerError when it does not answer within a second."""
    call = channel.unary_unary(f"/{_SERVICE}/Metrics", Empty.SerializeToString, BytesValue.FromString)
    try:
        reply: BytesValue = await call(Empty(), timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        raise WorkerError(f"a worker's metrics cannot be read: {error.code().name}") from error
    return reply.value


async def explain(channel: grpc.aio.Channel, question: Question) -> Told:
    """Ask a worker what it would decide. Raises WorkerError when it does not answer within ten seconds."""
    call = channel.unary_unary(f"/{_SERVICE}/Explain", BytesValue.SerializeToString, BytesValue.FromString)
    try:
        reply: BytesValue = await call(BytesValue(value=_pack(question)), timeout=_EXPLAIN_S)
    except grpc.aio.AioRpcError as error:
        raise WorkerError(f"a worker does not explain: {error.code().name}") from error
    return _read_told(reply.value)


async def recall(channel: grpc.aio.Channel, name: str) -> Told:
    """Ask a worker for a past decision. Raises WorkerError when it does not answer within a second."""
    call = channel.unary_unary(f"/{_SERVICE}/Recall", StringValue.SerializeToString, BytesValue.FromString)
    try:
        reply: BytesValue = await call(StringValue(value=name), timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        raise WorkerError(f"a worker does not tell its decisions: {error.code().name}") from error
    return _read_told(reply.value)


async def end(channel: grpc.aio.Channel, told: Mapping[str, str]) -> str:
    """Ask a worker to end requests, see `End`; returns its id. Raises WorkerError when it does not answer in time."""
    call = channel.unary_unary(f"/{_SERVICE}/End", BytesValue.SerializeToString, StringValue.FromString)
    try:
        reply: StringValue = await call(BytesValue(value=_pack(told)), timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        raise WorkerError(f"a worker does not end requests: {error.code().name}") from error
    return reply.value


async def captured(channel: grpc.aio.Channel, charge_id: str, copy: Copy | None) -> None:
    """Give a worker the copy that it waits for. Raises WorkerError when it does not take it within a second."""
    call = channel.unary_unary(f"/{_SERVICE}/Captured", BytesValue.SerializeToString, Empty.FromString)
    try:
        await call(BytesValue(value=_pack((charge_id, copy))), timeout=_CALL_S)
    except grpc.aio.AioRpcError as error:
        raise WorkerError(f"a worker takes no copy: {error.code().name}") from error


async def is_ready(channel: grpc.aio.Channel) -> bool:
    """Whether a worker says that it takes requests; False when it does not answer within a second."""
    call = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    try:
        reply = await call(health_pb2.HealthCheckRequest(service=READINESS), timeout=_CALL_S)
    except grpc.aio.AioRpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
