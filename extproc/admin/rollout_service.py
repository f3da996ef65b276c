"""The operator API over gRPC: service `warmpath.v1.Rollouts` on a keeper's port, the same calls as over HTTP."""

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import unquote

import grpc
import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from extproc._pb.warmpath.v1 import rollouts_pb2 as pb
from extproc.admin.entry import Asking, Entry, operator
from extproc.admin.rollout_pages import status_of
from extproc.admin.rollouts import RolloutCalls
from extproc.admin.values import Change, Forget, Promote, Start, Verdict
from extproc.errors import BadQuestionError, WarmpathError

SERVICE: Final = "warmpath.v1.Rollouts"
_CODES: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_USUAL_LINES: Final = 100
_MOST_TEXT: Final = 500
T = TypeVar("T")
Call = Callable[[str, Any, str], Awaitable[msgspec.Struct]]


def handler(calls: RolloutCalls, entry: Entry) -> grpc.GenericRpcHandler:
    """The service for a keeper's gRPC server."""

    def changing(kind: type[T], call: Callable[[str, T, str], Awaitable[msgspec.Struct]]) -> Call:
        async def made(model: str, asked: Any, by: str) -> msgspec.Struct:
            return await call(model, _converted(asked, kind), by)

        return made

    async def status(model: str, _asked: Any, _by: str) -> msgspec.Struct:
        return await calls.status(model)

    async def history(model: str, asked: Any, _by: str) -> msgspec.Struct:
        return await calls.history(model, asked.get("limit") or _USUAL_LINES, asked.get("before", ""))

    change = (pb.ChangeRequest, pb.ChangeReply)
    methods: dict[str, tuple[type[Message], type[Message], Call]] = {
        "Start": (pb.StartRequest, pb.StartReply, changing(Start, calls.start)),
        "Status": (pb.StatusRequest, pb.StatusReply, status),
        "Promote": (pb.PromoteRequest, pb.ChangeReply, changing(Promote, calls.promote)),
        "Pause": (*change, changing(Change, calls.pause)),
        "Resume": (*change, changing(Change, calls.resume)),
        "Abort": (*change, changing(Change, calls.abort)),
        "Forget": (pb.ForgetRequest, pb.ChangeReply, changing(Forget, calls.forget)),
        "PostVerdict": (pb.VerdictRequest, pb.ChangeReply, changing(Verdict, calls.verdict)),
        "History": (pb.HistoryRequest, pb.HistoryReply, history),
    }
    return grpc.method_handlers_generic_handler(
        SERVICE, {name: _method(entry, *each) for name, each in methods.items()}
    )


def _method(entry: Entry, asks: type[Message], replies: type[Message], call: Call) -> "grpc.RpcMethodHandler[Any, Any]":
    async def answer(request: bytes, context: Any) -> Message:
        headers = _metadata(context)
        try:
            # Before anything of the request is read.
            await entry.admit(Asking(peer_of(context.peer()), headers, web=False))
            asked = _plain(_read(request, asks))
            return _message(await call(asked.pop("model", ""), asked, operator(headers)), replies)
        except WarmpathError as error:
            await _abort(context, error)

    return grpc.unary_unary_rpc_method_handler(answer, None, lambda reply: reply.SerializeToString())


async def _abort(context: Any, error: WarmpathError) -> NoReturn:
    code = _CODES.get(status_of(error), grpc.StatusCode.INTERNAL)
    await context.abort(code, str(error), (("x-warmpath-reason", error.reason),))
    raise AssertionError("grpc ends a call that is aborted")


def peer_of(told: str) -> str:
    """Address of a caller, as grpc tells it, without its port; empty for a Unix socket, `-` for what is neither."""
    kind, _, rest = told.partition(":")
    if kind == "unix":
        return ""
    host, colon, _ = unquote(rest).rpartition(":")
    return host.strip("[]") or "-" if kind in ("ipv4", "ipv6") and colon else "-"


def _metadata(context: Any) -> dict[str, str]:
    """Metadata by key; of a key that was sent twice all values, which then are no token."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata():
        text = value if isinstance(value, str) else ""
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found


def _read(request: bytes, kind: type[Message]) -> Message:
    try:
        return kind.FromString(request)
    except DecodeError:
        raise BadQuestionError("the request is no message of this method") from None


def _plain(request: Message) -> dict[str, Any]:
    """Plain values of a request, fields that it lacks left out. Raises BadQuestionError for fields that are none."""
    if len(UnknownFieldSet(request)):
        raise BadQuestionError("the request has fields that this version does not know")
    try:
        plain: dict[str, Any] = json_format.MessageToDict(request, preserving_proto_field_name=True)
    except (json_format.Error, RecursionError, ValueError):
        raise BadQuestionError(
            "the request cannot be read: its overrides are nested too deeply, or no numbers"
        ) from None
    if "overrides" in plain:
        plain["overrides"] = _whole(plain["overrides"])
    return plain


def _whole(value: Any) -> Any:
    """Numbers of a `Struct` are doubles; those without a fraction are whole ones, as in JSON."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return value


def _converted(asked: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(asked, kind)
    except msgspec.ValidationError as error:
        raise BadQuestionError(f"the request: {error}"[:_MOST_TEXT]) from None


def _message(value: msgspec.Struct, kind: type[Message]) -> Message:
    """The message of the same field names; what the message lacks is left out."""
    return json_format.ParseDict(_finite(msgspec.to_builtins(value)), kind(), ignore_unknown_fields=True)


def _finite(value: Any) -> Any:
    """Numbers as protobuf's JSON writes them: those that are none by name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0.0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
