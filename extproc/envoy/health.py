"""The gRPC health service, with the names that the Endpoint Picker Protocol asks for."""

from collections.abc import Iterable
from typing import Final

import grpc

from extproc._pb.warmpath.v1 import health_pb2
from extproc.envoy.changes import Changes

OVERALL: Final = ""
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_SERVICE: Final = "grpc.health.v1.Health"

Status = health_pb2.HealthCheckResponse.ServingStatus
Request = health_pb2.HealthCheckRequest
Response = health_pb2.HealthCheckResponse

_SERVING: Final = Response.SERVING
_NOT_SERVING: Final = Response.NOT_SERVING
_UNKNOWN: Final = Response.SERVICE_UNKNOWN


class Health:
    """Answers whether this process takes requests. It is alive from the start, and ready only when told so.

    Every name but `liveness` follows readiness, so that a gateway may ask whichever it is configured with.
    """

    def __init__(self, names: Iterable[str] = (OVERALL, READINESS, EXT_PROC)) -> None:
        self._ready = False
        self._closed = False
        self._names = frozenset(names)
        self._changes = Changes()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Say whether requests are taken; watchers learn at once."""
        if ready != self._ready:
            self._ready = ready
            self._changes.announce()

    def close(self) -> None:
        """Tell watchers that nothing is served any more, and end their streams."""
        self._ready = False
        self._closed = True
        self._changes.announce()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service `grpc.health.v1.Health` for a gRPC server."""
        parse = Request.FromString
        serialise = Response.SerializeToString
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, parse, serialise),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, parse, serialise),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, methods)

    def _status(self, name: str) -> Status:
        if name == LIVENESS:
            return _SERVING
        if name not in self._names:
            return _UNKNOWN
        return _SERVING if self._ready else _NOT_SERVING

    async def _check(self, request: Request, context: grpc.aio.ServicerContext[Request, Response]) -> Response:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service of this name")
        return Response(status=status)

    async def _watch(self, request: Request, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        sent: Status | None = None
        while True:
            version = self._changes.version
            status = self._status(request.service)
            if status != sent:
                await context.write(Response(status=status))
                sent = status
            if self._closed:
                return
            await self._changes.after(version)
