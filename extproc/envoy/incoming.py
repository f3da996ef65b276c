"""What the gateway sent, read out of a `ProcessingRequest`: plain functions from messages to values."""

from typing import Any, Final

from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.config import BodyMode
from extproc.envoy.contract import SERVED, SUBSET, Call
from extproc.envoy.exchange import Message, Phase

_LB: Final = "envoy.lb"
_SUBSET_HINT: Final = "envoy.lb.subset_hint"

_MODE: Final = processing_mode_pb2.ProcessingMode
_DUPLEX: Final = _MODE.FULL_DUPLEX_STREAMED
_STARTS: Final[dict[int, Phase]] = {
    _MODE.NONE: Phase.START_HEADERS,
    _MODE.STREAMED: Phase.START_HEADERS,
    _MODE.BUFFERED: Phase.START_BUFFERED,
    _MODE.BUFFERED_PARTIAL: Phase.START_BUFFERED,
    _DUPLEX: Phase.START_DUPLEX,
}
_EXPECTED: Final[dict[BodyMode, Phase]] = {"buffered": Phase.START_BUFFERED, "duplex": Phase.START_DUPLEX}

_KINDS: Final[dict[str, tuple[Message, Message]]] = {
    "request_headers": (Message.HEADERS, Message.HEADERS_END),
    "request_body": (Message.BODY, Message.BODY_END),
    "request_trailers": (Message.TRAILERS, Message.TRAILERS),
    "response_headers": (Message.RESPONSE_HEADERS, Message.RESPONSE_HEADERS),
    "response_body": (Message.RESPONSE_BODY, Message.RESPONSE_BODY_END),
    "response_trailers": (Message.RESPONSE_TRAILERS, Message.RESPONSE_TRAILERS),
}
_WITHOUT_END: Final = frozenset({"request_trailers", "response_trailers"})


def start_of(first: pb.ProcessingRequest, expected: BodyMode) -> Phase | None:
    """Phase that a stream begins in, by its first message.

    Args:
        first: the first message; gateways older than the field send no `protocol_config`.
        expected: mode that is assumed then.

    Returns:
        None when the stream cannot be served: an unknown body mode, or a stream that ignores replies.
    """
    if first.observability_mode:
        return None
    if not first.HasField("protocol_config"):
        return _EXPECTED[expected]
    return _STARTS.get(first.protocol_config.request_body_mode)


def echoes_response(first: pb.ProcessingRequest) -> bool:
    """Whether pieces of the response body have to be handed back one by one."""
    return bool(first.protocol_config.response_body_mode == _DUPLEX)


def kind_of(request: pb.ProcessingRequest) -> Message | None:
    """Kind of a message; None when it holds nothing that this version knows."""
    field: str | None = request.WhichOneof("request")
    kinds = _KINDS.get(field or "")
    if field is None or kinds is None:
        return None
    if field in _WITHOUT_END:
        return kinds[0]
    return kinds[1] if getattr(request, field).end_of_stream else kinds[0]


def call_of(request: pb.ProcessingRequest) -> Call:
    """The request's headers as a `Call` without a body. Header bytes are decoded as ISO 8859-1, which never fails."""
    method = path = ""
    headers: dict[str, str] = {}
    for header in request.request_headers.headers.headers:
        name = header.key
        value = header.raw_value.decode("latin-1") or header.value
        if not name.startswith(":"):
            headers[name] = value
        elif name == ":path":
            path = value
        elif name == ":method":
            method = value.upper()
    return Call(method=method, path=path, headers=headers, subset=_subset_of(request))


def served_of(request: pb.ProcessingRequest) -> str:
    """`ip:port` that answered, as the gateway told in its metadata; empty when it did not."""
    fields = _namespace(request, _LB)
    return "" if fields is None or SERVED not in fields else str(fields[SERVED].string_value)


def _subset_of(request: pb.ProcessingRequest) -> tuple[str, ...] | None:
    fields = _namespace(request, _SUBSET_HINT)
    if fields is None or SUBSET not in fields:
        return None
    value = fields[SUBSET]
    if value.WhichOneof("kind") == "string_value":
        return tuple(filter(None, map(str.strip, value.string_value.split(","))))
    return tuple(item.string_value for item in value.list_value.values if item.string_value)


def _namespace(request: pb.ProcessingRequest, name: str) -> Any | None:
    """Fields of a namespace of the untyped metadata; None without it. A plain lookup would create the entry."""
    if not request.HasField("metadata_context"):
        return None
    namespaces = request.metadata_context.filter_metadata
    return namespaces[name].fields if name in namespaces else None
