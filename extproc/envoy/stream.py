"""One ext_proc stream: reads the gateway's messages, asks the phase table, and does what it says."""

import asyncio
import logging
import traceback

import grpc
import msgspec
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError

from extproc.config import BodyMode
from extproc.envoy import incoming, replies
from extproc.envoy.contract import Call, Decision
from extproc.envoy.counts import Counts
from extproc.envoy.decisions import Decisions
from extproc.envoy.exchange import Action, Exchange, Message, Phase
from extproc.errors import BodyTooLargeError, OverloadedError, WarmpathError

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one process takes on.

    Attributes:
        body_mode: mode assumed for a gateway that does not name its own.
        fail_open: a fault of ours lets the request go on without a pick; otherwise it is answered 500.
        max_body_bytes: largest request body; a larger one is answered 413.
        max_held_bytes: duplex bodies held at once by all streams; past it a request is answered 429.
    """

    body_mode: BodyMode = "buffered"
    fail_open: bool = True
    max_body_bytes: int = 32 * 1024 * 1024
    max_held_bytes: int = 512 * 1024 * 1024


class Stream:
    """One stream: reads messages in order, feeds the exchange, does what it says."""

    __slots__ = (
        "_body",
        "_call",
        "_chunks",
        "_context",
        "_counts",
        "_decision",
        "_decisions",
        "_echoes",
        "_exchange",
        "_held",
        "_limits",
        "_pending",
        "_served",
    )

    def __init__(self, context: Context, limits: Limits, counts: Counts, decisions: Decisions) -> None:
        self._context = context
        self._limits = limits
        self._counts = counts
        self._decisions = decisions
        self._exchange = Exchange(Phase.START_BUFFERED)
        self._echoes = False
        self._call = Call("", "", {})
        self._chunks: list[bytes] = []
        self._held = 0
        self._body = b""
        self._pending: asyncio.Task[Decision] | None = None
        self._decision: Decision | None = None
        self._served = ""

    async def run(self) -> None:
        """Serve the stream until the gateway ends it."""
        request = await self._read()
        if request is None:
            return
        start = incoming.start_of(request, self._limits.body_mode)
        if start is None:
            await self._give_up("unsupported body mode or observability mode: use BUFFERED or FULL_DUPLEX_STREAMED")
            return
        self._exchange = Exchange(start)
        self._echoes = incoming.echoes_response(request)
        while request is not None:
            await self._take(request)
            request = await self._read()

    def close(self) -> None:
        """The stream is over, however it ended: see that its decision is settled, exactly once."""
        action = self._exchange.feed(Message.GONE)
        if action is Action.SETTLE and self._decision is not None:
            self._decisions.settle(self._decision, self._served)
        elif action is Action.ABANDON and self._pending is not None:
            self._decisions.abandon(self._pending)
        self._counts.held_bytes -= self._held
        self._counts.unexpected += self._exchange.unexpected

    async def _read(self) -> pb.ProcessingRequest | None:
        raw: object = await self._context.read()
        if not isinstance(raw, bytes):  # grpc.aio.EOF
            return None
        try:
            return pb.ProcessingRequest.FromString(raw)
        except DecodeError:
            await self._give_up("not a ProcessingRequest")
            return None

    async def _give_up(self, why: str) -> None:
        """End the stream with an error; a gateway that fails open lets the request go on."""
        self._counts.unreadable += 1
        _log.error("ext_proc stream ended: %s", why)
        await self._context.abort(grpc.StatusCode.UNIMPLEMENTED, why)

    async def _take(self, request: pb.ProcessingRequest) -> None:
        kind = incoming.kind_of(request)
        if kind is None:
            self._counts.unexpected += 1
            return
        action = self._exchange.feed(kind)
        constant = replies.CONSTANT.get(action)
        if kind in (Message.HEADERS, Message.HEADERS_END):
            self._call = incoming.call_of(request)
        elif kind is Message.RESPONSE_HEADERS or kind is Message.RESPONSE_TRAILERS:
            self._note_served(incoming.served_of(request))
        if action is Action.FORWARD_RESPONSE_BODY and self._echoes:
            body = request.response_body
            await self._context.write(replies.echo_response(body.body, last=body.end_of_stream))
        elif constant is not None:
            await self._context.write(constant)
        elif action is Action.HOLD or action is Action.DECIDE:
            error = self._hold(request.request_body.body) if kind in (Message.BODY, Message.BODY_END) else None
            if error is not None:
                await self._refuse(error)
            elif action is Action.DECIDE:
                await self._decide()

    def _note_served(self, served: str) -> None:
        """Tell early who answers: a long answer would be charged elsewhere until its end."""
        if served and served != self._served and self._decision is not None:
            self._decisions.served(self._decision, served)
        self._served = served or self._served

    def _hold(self, chunk: bytes) -> WarmpathError | None:
        """Keep a piece of the body; returns why it cannot be."""
        counts, limits = self._counts, self._limits
        self._held += len(chunk)
        counts.held_bytes += len(chunk)
        if self._held > limits.max_body_bytes:
            return BodyTooLargeError(f"The request body is larger than {limits.max_body_bytes} bytes.")
        if counts.held_bytes > limits.max_held_bytes:
            return OverloadedError("too many request bodies are being received at once")
        self._chunks.append(chunk)
        return None

    async def _decide(self) -> None:
        self._body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        call = msgspec.structs.replace(self._call, body=self._body) if self._body else self._call
        self._pending = self._decisions.decide(call)
        try:
            # Shielded: when the stream is cancelled here, `close` still settles what comes of it.
            decision = await asyncio.shield(self._pending)
        except WarmpathError as error:
            await (self._fail(error) if error.status == WarmpathError.status else self._refuse(error))
        except Exception as error:  # noqa: BLE001  # any fault of a decision fails open, and is counted and logged
            await self._fail(error)
        else:
            self._counts.decided += 1
            self._decision = decision if self._body else _as_it_came(decision)
            await self._answer()

    async def _fail(self, error: Exception) -> None:
        """A fault of ours. The error's own text stays out of the log: it may quote the request."""
        where = "".join(traceback.format_tb(error.__traceback__))
        _log.error("decision failed with %s at\n%s", type(error).__name__, where)
        if not self._limits.fail_open:
            await self._refuse(WarmpathError("the request could not be routed"))
            return
        self._counts.failed_open += 1
        await self._answer()

    async def _refuse(self, error: WarmpathError) -> None:
        refused = self._counts.refused
        refused[error.reason] = refused.get(error.reason, 0) + 1
        self._exchange.feed(Message.REFUSED)
        self._release()
        await self._context.write(replies.refusal(error))

    async def _answer(self) -> None:
        """Send what is owed, with the pick when there is one."""
        action = self._exchange.feed(Message.DECIDED)
        write, decision, body = self._context.write, self._decision, self._body
        if action is Action.ANSWER_BODY:
            self._release()
            await write(replies.on_body(decision))
            return
        await write(replies.on_headers(decision))
        if action is not Action.ANSWER_HEADERS:
            if decision is not None and decision.body is not None:
                body = decision.body
            last = action is Action.ANSWER_DUPLEX
            if last or body:
                for piece in replies.echo(body, last=last):
                    await write(piece)
            if not last:
                await write(replies.CONSTANT[Action.FORWARD_TRAILERS])
        self._release()

    def _release(self) -> None:
        """Let go of the body, the client's and the engine's: the stream may stay open for minutes."""
        self._counts.held_bytes -= self._held
        self._held = 0
        self._body = b""
        self._chunks.clear()
        self._call = Call("", "", {})
        if self._decision is not None:
            self._decision = _as_it_came(self._decision)
        # Its result holds the body as well; nobody waits for it any more.
        self._pending = None


def _as_it_came(decision: Decision) -> Decision:
    """The decision without a body of its own."""
    return decision if decision.body is None else msgspec.structs.replace(decision, body=None)
