"""The service that Envoy's `ext_authz` filter asks before anything else: who is this, and may they come in?"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.auth.v3 import external_auth_pb2 as pb

from extproc.envoy.api_keys import client_of
from extproc.request.shapes import TENANT_HEADER

SERVICE: Final = "envoy.service.auth.v3.Authorization"

_UNAUTHENTICATED: Final = grpc.StatusCode.UNAUTHENTICATED.value[0]
_UNAUTHORIZED: Final = 401
_DENIED: Final[bytes] = pb.CheckResponse(
    status={"code": _UNAUTHENTICATED}, denied_response=pb.DeniedHttpResponse(status={"code": _UNAUTHORIZED})
).SerializeToString()
"""Refuses the request. Envoy writes the body, as that of its other answers."""
_KEPT: Final[bytes] = pb.CheckResponse(ok_response=pb.OkHttpResponse()).SerializeToString()
"""Lets the request in with the tenant that it has."""


class Recorder(Protocol):
    """Who counts answers."""

    def asked(self, outcome: str) -> None:
        """One request was let in by `key` or `token`, or refused: `refused`."""
        ...


class Authorizer:
    """The service. Keys are compared and forgotten: none is kept, logged or counted by."""

    def __init__(self, clients: Callable[[], Mapping[bytes, str]], recorder: Recorder) -> None:
        """`clients` gives those that are known now, by the digest of their keys."""
        self._clients = clients
        self._recorder = recorder

    def handler(self) -> grpc.GenericRpcHandler:
        """The service for a gRPC server."""
        methods: dict[str, grpc.RpcMethodHandler[Any, bytes]]
        methods = {"Check": grpc.unary_unary_rpc_method_handler(self._check, pb.CheckRequest.FromString)}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _check(self, request: pb.CheckRequest, _context: Any) -> bytes:
        headers = _headers_of(request)
        # Envoy removes the header when a client sends it, and sets it from a token that it has verified.
        if any(headers.get(TENANT_HEADER, ())):
            self._recorder.asked("token")
            return _KEPT
        client = client_of(headers, self._clients())
        self._recorder.asked("refused" if client is None else "key")
        return _DENIED if client is None else _let_in(client)


def _headers_of(request: pb.CheckRequest) -> dict[str, list[bytes]]:
    headers: dict[str, list[bytes]] = {}
    for header in request.attributes.request.http.header_map.headers:
        headers.setdefault(header.key, []).append(header.raw_value or header.value.encode())
    return headers


def _let_in(client: str) -> bytes:
    answer = pb.CheckResponse()
    option = answer.ok_response.headers.add()
    # Unlike ext_proc, this filter reads `value` and not `raw_value`.
    option.header.key, option.header.value = TENANT_HEADER, client
    option.append_action = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    serialised: bytes = answer.SerializeToString()
    return serialised
