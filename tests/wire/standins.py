"""The other sides of a rendered Envoy, as small real servers: sidecar workers, keeper, engines.

They stand in for nothing that is under test: `test_render.py` asks what Envoy does with its configuration, so the
workers here pick what the test told them to pick.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from aiohttp import web
from envoy.config.core.v3 import base_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.endpoint.v3 import eds_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from extproc.envoy.contract import DESTINATION, METADATA, POOL

_SERVING = b"\x08\x01"
_NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_CHUNK = 64 * 1024


@dataclass
class Seen:
    """What a worker saw of one request."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    duplex: bool = False


@dataclass
class Orders:
    """What the workers do with the next requests.

    Attributes:
        pool: pool they name.
        destinations: endpoints they name, in order; empty names none.
        silent: take requests and never answer them.
        refuse: HTTP status of an immediate response with the body `refused`; 0 picks instead.
        headers: further request headers they set with the pick.
    """

    pool: str = "main"
    destinations: Sequence[str] = ()
    silent: bool = False
    refuse: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


class Worker(external_processor_pb2_grpc.ExternalProcessorServicer, als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    """One sidecar worker: picks as told, remembers requests and access-log entries."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self.seen: list[Seen] = []
        self.entries: list[accesslog_pb2.HTTPAccessLogEntry] = []
        self._server: grpc.aio.Server | None = None

    async def start(self, socket: str) -> None:
        """Listen on a Unix socket."""
        server = grpc.aio.server(options=_NO_LIMIT)
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self, server)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self, server)
        server.add_generic_rpc_handlers((_health(),))
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Close every stream at once, as a killed process would."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def Process(self, request_iterator: Any, context: Any) -> None:  # noqa: N802 -- gRPC's name
        """One request's stream."""
        seen = Seen()
        async for message in request_iterator:
            if message.HasField("protocol_config"):
                mode = message.protocol_config.request_body_mode
                seen.duplex = mode == ProcessingMode.FULL_DUPLEX_STREAMED
            for answer in self._step(seen, message):
                await context.write(answer)

    def _step(self, seen: Seen, message: ext_proc.ProcessingRequest) -> list[ext_proc.ProcessingResponse]:
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            seen.headers = {h.key: h.raw_value.decode() for h in message.request_headers.headers.headers}
            if message.request_headers.end_of_stream:
                return self._decide(seen, "request_headers")
            if seen.duplex or self._orders.silent:
                return []
            return [ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())]
        if kind == "request_body":
            seen.body += message.request_body.body
            if not seen.duplex:
                return self._decide(seen, "request_body")
            if message.request_body.end_of_stream:
                return [*self._decide(seen, "request_headers"), *_echo(seen.body)]
        return []

    def _decide(self, seen: Seen, phase: str) -> list[ext_proc.ProcessingResponse]:
        self.seen.append(seen)
        answer = ext_proc.ProcessingResponse()
        if self._orders.silent:
            return []
        if self._orders.refuse:
            answer.immediate_response.status.code = self._orders.refuse
            answer.immediate_response.body = b"refused"
            return [answer]
        common = getattr(answer, phase).response
        common.clear_route_cache = True
        _set(common, POOL, self._orders.pool)
        for name, value in self._orders.headers.items():
            _set(common, name, value)
        answer.dynamic_metadata.update({METADATA: {"charge": "c-1", "predicted": 12}})
        if self._orders.destinations:
            _set(common, DESTINATION, ",".join(self._orders.destinations))
            answer.dynamic_metadata.update({"envoy.lb": {DESTINATION: ",".join(self._orders.destinations)}})
        return [answer]

    async def StreamAccessLogs(  # noqa: N802 -- gRPC's name
        self, request_iterator: Any, _context: Any
    ) -> als_pb2.StreamAccessLogsResponse:
        """Keep every entry."""
        async for message in request_iterator:
            self.entries.extend(message.http_logs.log_entry)
        return als_pb2.StreamAccessLogsResponse()


def _echo(body: bytes) -> list[ext_proc.ProcessingResponse]:
    chunks = [body[at : at + _CHUNK] for at in range(0, len(body), _CHUNK)] or [b""]
    answers = []
    for index, chunk in enumerate(chunks):
        answer = ext_proc.ProcessingResponse()
        streamed = answer.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk, index == len(chunks) - 1
        answers.append(answer)
    return answers


def _set(common: Any, name: str, value: str) -> None:
    option = common.header_mutation.set_headers.add()
    option.header.key, option.header.raw_value = name, value.encode()
    option.append_action = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def _health() -> grpc.GenericRpcHandler:
    async def check(_request: bytes, _context: Any) -> bytes:
        return _SERVING

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )


class Keeper(eds_pb2_grpc.EndpointDiscoveryServiceServicer):  # type: ignore[misc]
    """Serves the same endpoints for every cluster that asks."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = endpoints
        self._server: grpc.aio.Server | None = None

    async def start(self, socket: str) -> None:
        """Listen on a Unix socket."""
        server = grpc.aio.server()
        eds_pb2_grpc.add_EndpointDiscoveryServiceServicer_to_server(self, server)
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """Close every stream."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def StreamEndpoints(  # noqa: N802 -- gRPC's name
        self, request_iterator: Any, _context: Any
    ) -> AsyncIterator[discovery_pb2.DiscoveryResponse]:
        """Answer each subscription once; acknowledgements get nothing new."""
        async for request in request_iterator:
            if request.response_nonce:
                continue
            answer = discovery_pb2.DiscoveryResponse(version_info="1", nonce="1", type_url=request.type_url)
            for name in request.resource_names:
                answer.resources.add().Pack(self.members(name))
            yield answer

    def members(self, name: str) -> endpoint_pb2.ClusterLoadAssignment:
        """Endpoints of one cluster."""
        return _assignment(name, self._endpoints)


def _assignment(name: str, endpoints: Sequence[str]) -> endpoint_pb2.ClusterLoadAssignment:
    assignment = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    locality = assignment.endpoints.add()
    for address in endpoints:
        host, _, port = address.rpartition(":")
        socket = locality.lb_endpoints.add().endpoint.address.socket_address
        socket.address, socket.port_value = host, int(port)
    return assignment


class Engine:
    """An HTTP server that tells what it got, in the shape of a chat completion.

    Query options of any POST: `stream=S` sends SSE, S seconds after the headers; `wait=S` sends the headers that
    late; `object=NAME` names another kind of answer; `full=ADDRESS` answers 503 if that is this engine's address;
    `say=NAME:VALUE` adds a header to a JSON answer.

    Attributes:
        address: where it listens.
        last_body: what the last POST brought.
        lengths: `content-length` of every POST so far; empty text where it had none.
    """

    def __init__(self) -> None:
        self.address = ""
        self.last_body = b""
        self.lengths: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", _healthy)
        app.router.add_route("*", "/{path:.*}", self._tell)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"127.0.0.1:{site.port}"

    async def stop(self) -> None:
        """Close the listener and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.last_body = body
        self.lengths.append(request.headers.get("content-length", ""))
        if request.query.get("full") == self.address:
            return web.json_response({"error": "queue is full"}, status=503)
        await asyncio.sleep(float(request.query.get("wait", 0)))
        if "stream" in request.query:
            return await _stream(request)
        kind = request.query.get("object", "chat.completion")
        told = {"endpoint": self.address, "headers": dict(request.headers), "bytes": len(body)}
        more = dict(pair.split(":", 1) for pair in request.query.getall("say", []))
        return web.json_response({"object": kind, "model": "m", "choices": [{}], "usage": _USAGE, **told}, headers=more)


_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 5,
    "total_tokens": 105,
    "prompt_tokens_details": {"cached_tokens": 64},
}


async def _healthy(_request: web.Request) -> web.Response:
    return web.Response()


async def _stream(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    await asyncio.sleep(float(request.query["stream"]))
    kind = "chat.completion.chunk"
    chunks: list[dict[str, Any]] = [{"choices": [{}]}, {"choices": [], "usage": _USAGE}]
    for chunk in chunks:
        await answer.write(b"data: " + json.dumps({"object": kind, "model": "m", **chunk}).encode() + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")
    return answer
