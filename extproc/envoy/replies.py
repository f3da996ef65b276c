"""Replies to the gateway, as serialised `ProcessingResponse` messages.

Those that never vary are constants. A header goes out as `raw_value` only: a `HeaderValue` that has both `value` and
`raw_value` is refused by Envoy.
"""

from collections.abc import Iterator
from typing import Any, Final

from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.envoy.contract import DESTINATION, METADATA, ONCE, POOL, REASON, Decision
from extproc.envoy.exchange import Action
from extproc.errors import WarmpathError

CHUNK_BYTES: Final = 62_000
"""Largest piece of an echoed body; Envoy's documentation asks for at most 64 KB, frame overhead included."""

CHARGE_KEY: Final = "charge_id"
"""Key in our metadata namespace that holds the decision's charge."""
POOL_KEY: Final = "pool"
"""Key in our metadata namespace that holds the decision's pool."""

_LB: Final = "envoy.lb"
_OK: Final = 200
_OVERWRITE: Final = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

CONSTANT: Final[dict[Action, bytes]] = {
    Action.FORWARD_HEADERS: pb.ProcessingResponse(request_headers=pb.HeadersResponse()).SerializeToString(),
    Action.FORWARD_BODY: pb.ProcessingResponse(request_body=pb.BodyResponse()).SerializeToString(),
    Action.FORWARD_TRAILERS: pb.ProcessingResponse(request_trailers=pb.TrailersResponse()).SerializeToString(),
    Action.FORWARD_RESPONSE_HEADERS: pb.ProcessingResponse(response_headers=pb.HeadersResponse()).SerializeToString(),
    Action.FORWARD_RESPONSE_BODY: pb.ProcessingResponse(response_body=pb.BodyResponse()).SerializeToString(),
    Action.FORWARD_RESPONSE_TRAILERS: pb.ProcessingResponse(
        response_trailers=pb.TrailersResponse()
    ).SerializeToString(),
}
"""Replies that change nothing, one for each kind of message."""


def on_headers(decision: Decision | None, *, once: bool = False) -> bytes:
    """Reply to the request headers that carries the pick; without a decision, the reply that changes nothing else.

    Args:
        decision: the pick.
        once: see `contract.ONCE`.
    """
    if decision is None and not once:
        return CONSTANT[Action.FORWARD_HEADERS]
    reply = pb.ProcessingResponse()
    common = reply.request_headers.response
    common.clear_route_cache = True
    if decision is not None:
        _pick(reply, common, decision)
    if once:
        _set_header(common.header_mutation, ONCE, b"1")
    serialised: bytes = reply.SerializeToString()
    return serialised


def on_body(decision: Decision | None) -> bytes:
    """Reply to a buffered request body that carries the pick; without a decision, the reply that changes nothing.

    A changed body goes with its length: Envoy answers 500 when the client's `content-length` no longer fits.
    """
    if decision is None:
        return CONSTANT[Action.FORWARD_BODY]
    reply = pb.ProcessingResponse()
    common = reply.request_body.response
    _pick(reply, common, decision)
    if decision.body is not None:
        common.body_mutation.body = decision.body
        _set_header(common.header_mutation, "content-length", b"%d" % len(decision.body))
    serialised: bytes = reply.SerializeToString()
    return serialised


def patience(seconds: float) -> bytes:
    """Reply that answers nothing yet: the gateway is to wait so much longer, if its configuration allows that.

    It may be sent once for each message of the gateway, which then starts its timer anew.
    """
    reply = pb.ProcessingResponse()
    reply.override_message_timeout.FromMilliseconds(max(1, round(seconds * 1000)))
    serialised: bytes = reply.SerializeToString()
    return serialised


def echo(body: bytes, *, last: bool) -> Iterator[bytes]:
    """Replies that hand a held request body on in pieces.

    Args:
        body: the whole body.
        last: whether nothing follows it; exactly the final piece is then marked as the end of the stream.
    """
    view = memoryview(body)
    for start in range(0, max(len(body), 1), CHUNK_BYTES):
        reply = pb.ProcessingResponse()
        piece = reply.request_body.response.body_mutation.streamed_response
        piece.body = bytes(view[start : start + CHUNK_BYTES])
        piece.end_of_stream = last and start + CHUNK_BYTES >= len(body)
        yield reply.SerializeToString()


def echo_response(body: bytes, *, last: bool) -> bytes:
    """Reply that hands one piece of a full-duplex response body on."""
    reply = pb.ProcessingResponse()
    piece = reply.response_body.response.body_mutation.streamed_response
    piece.body = body
    piece.end_of_stream = last
    serialised: bytes = reply.SerializeToString()
    return serialised


def refusal(error: WarmpathError) -> bytes:
    """Reply that answers the client directly: status, JSON body, and a header that names the reason."""
    reply = pb.ProcessingResponse()
    answer = reply.immediate_response
    answer.status.code = error.status
    answer.body = error.body()
    answer.details = f"warmpath_{error.reason}"
    _set_header(answer.headers, "content-type", b"application/json")
    _set_header(answer.headers, REASON, error.reason.encode())
    for name, value in error.headers.items():
        _set_header(answer.headers, name, value.encode())
    serialised: bytes = reply.SerializeToString()
    return serialised


def answer(body: bytes) -> bytes:
    """Reply that answers the client with 200 and this JSON."""
    reply = pb.ProcessingResponse()
    answered = reply.immediate_response
    answered.status.code = _OK
    answered.body = body
    answered.details = "warmpath_answered"
    _set_header(answered.headers, "content-type", b"application/json")
    serialised: bytes = reply.SerializeToString()
    return serialised


def _pick(reply: Any, common: Any, decision: Decision) -> None:
    """Write the pick as headers and as metadata. `clear_route_cache` makes Envoy route again, by our pool header."""
    common.clear_route_cache = True
    _set_header(common.header_mutation, POOL, decision.pool.encode())
    for name, told in decision.headers.items():
        _set_header(common.header_mutation, name, told.encode())
    fields = reply.dynamic_metadata.fields
    if decision.destinations:
        destinations = ",".join(decision.destinations)
        _set_header(common.header_mutation, DESTINATION, destinations.encode())
        fields[_LB].struct_value.fields[DESTINATION].string_value = destinations
    ours = fields[METADATA].struct_value.fields
    ours[POOL_KEY].string_value = decision.pool
    if decision.charge_id:
        ours[CHARGE_KEY].string_value = decision.charge_id
    for key, value in decision.metadata.items():
        if isinstance(value, str):
            ours[key].string_value = value
        else:
            ours[key].number_value = value


def _set_header(mutation: Any, name: str, value: bytes) -> None:
    option = mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value
    option.append_action = _OVERWRITE
