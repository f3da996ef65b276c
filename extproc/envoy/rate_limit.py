"""Envoy's rate-limit service: limits of requests for gateways that ask before they have read a body.

A descriptor says whose request it is: entries `tenant` and `model`; without `model`, rules that count by model are left
out. An entry `method` that only reads takes nothing. Other entries, such as `path`, change nothing: limits are for
all paths. The domain is not looked at.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import grpc
import msgspec
from envoy.config.core.v3 import base_pb2
from envoy.service.ratelimit.v3 import rls_pb2 as pb

from extproc.envoy.contract import REASON
from extproc.errors import RateLimitedError

SERVICE: Final = "envoy.service.ratelimit.v3.RateLimitService"
TENANT: Final = "tenant"
MODEL: Final = "model"
METHOD: Final = "method"
PATH: Final = "path"

_OK: Final = pb.RateLimitResponse.OK
_OVER: Final = pb.RateLimitResponse.OVER_LIMIT
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Asked(msgspec.Struct, frozen=True, gc=False):
    """What one descriptor asks for.

    Attributes:
        tenant: whose request it is; empty where nobody says.
        model: model that it is for; None when that is not known.
        hits: requests at once; 0 to look only.
    """

    tenant: str
    model: str | None
    hits: float


class Passed(msgspec.Struct, frozen=True, gc=False):
    """What goes with a request that was allowed.

    Attributes:
        headers: response headers that tell what is left.
        metadata: flat values for our metadata namespace, which the access log brings back.
    """

    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)


class Limiter(Protocol):
    """Who keeps up limits of requests."""

    async def ahead(self, asked: Sequence[Asked]) -> Passed:
        """Take what is asked for, all or nothing.

        Raises:
            RateLimitedError: a limit does not allow it.
        """
        ...


class RateLimits:
    """The service."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    def handler(self) -> grpc.GenericRpcHandler:
        """The service for a gRPC server."""
        methods: dict[str, grpc.RpcMethodHandler[Any, bytes]]
        methods = {"ShouldRateLimit": grpc.unary_unary_rpc_method_handler(self._check, pb.RateLimitRequest.FromString)}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _check(self, request: pb.RateLimitRequest, _context: Any) -> bytes:
        asked = asked_of(request)
        answer = pb.RateLimitResponse(overall_code=_OK)
        headers: Mapping[str, str]
        try:
            passed = await self._limiter.ahead(asked) if asked else Passed()
            headers = passed.headers
            if passed.metadata:
                answer.dynamic_metadata.update(passed.metadata)
        except RateLimitedError as error:
            answer.overall_code = _OVER
            answer.raw_body = error.body()
            headers = {"content-type": "application/json", REASON: error.reason, **error.headers}
        # Which of several descriptors was over is not told: limits are taken together, all or nothing.
        answer.statuses.extend(
            pb.RateLimitResponse.DescriptorStatus(code=answer.overall_code) for _ in request.descriptors
        )
        for name, value in headers.items():
            answer.response_headers_to_add.append(base_pb2.HeaderValue(key=name, value=value))
        serialised: bytes = answer.SerializeToString()
        return serialised


def asked_of(request: pb.RateLimitRequest) -> list[Asked]:
    """What the descriptors of a request ask for; those that take nothing are left out."""
    found = []
    for descriptor in request.descriptors:
        entries = {entry.key: entry.value for entry in descriptor.entries}
        if entries.get(METHOD, "") in _READING:
            continue
        own = descriptor.hits_addend
        # An absent number stands for one request; a descriptor's own may be 0, which only looks.
        hits = float(own.value) if descriptor.HasField("hits_addend") else float(request.hits_addend or 1)
        found.append(Asked(entries.get(TENANT, ""), entries.get(MODEL), hits))
    return found
