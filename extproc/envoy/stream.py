"""One ext_proc stream: reads the gateway's messages, asks the phase table, and does what it says."""

import asyncio
import logging
import traceback

import grpc
import msgspec
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError

from extproc.envoy import incoming, replies
from extproc.envoy.contract import Answered, Call, Decision
from extproc.envoy.copies import Copies
from extproc.envoy.counts import Counts
from extproc.envoy.decisions import Decisions
from extproc.envoy.endable import Endable
from extproc.envoy.exchange import Action, Exchange, Message, Phase
from extproc.envoy.limits import Limits
from extproc.envoy.line import StreamLine
from extproc.errors import BodyTooLargeError, OverloadedError, TimeLimitError, WarmpathError

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
_GRACE_S = 1.0
"""How much later than the gateway a stream ends a request that takes too long: its own answer comes first."""


class Stream:
    """One stream: reads messages in order, feeds the exchange, does what it says."""

    __slots__ = (
        "_body",
        "_call",
        "_chunks",
        "_context",
        "_copies",
        "_counts",
        "_decision",
        "_decisions",
        "_echoes",
        "_endable",
        "_exchange",
        "_held",
        "_limits",
        "_line",
        "_pending",
        "_served",
        "_timer",
    )

    def __init__(
        self,
        context: Context,
        limits: Limits,
        counts: Counts,
        decisions: Decisions,
        endable: Endable,
        copies: Copies | None = None,
    ) -> None:
        self._context = context
        self._limits = limits
        self._counts = counts
        self._decisions = decisions
        self._endable = endable
        self._copies = copies
        self._timer: asyncio.Task[None] | None = None
        self._exchange = Exchange(Phase.START_BUFFERED)
        self._echoes = False
        self._call = Call("", "", {})
        self._chunks: list[bytes] = []
        self._held = 0
        self._body = b""
        self._pending: asyncio.Task[Decision] | None = None
        self._decision: Decision | None = None
        self._line = StreamLine(context)
        self._served = ""

    async def run(self) -> None:
        """Serve the stream until the gateway ends it."""
        request = await self._read()
        if request is None:
            return
        # A copy begins with the answer's headers; a gateway that asks for decisions so would ignore them.
        if request.observability_mode and request.HasField("response_headers") and self._copies is not None:
            await self._copies.take(request, self._context)
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
            self._line.leave()
        if self._decision is not None and self._decision.limited:
            self._endable.remove(self._decision.charge_id)
        if self._timer is not None:
            self._timer.cancel()
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
        largest = limits.largest_body(self._call.path)
        if self._held > largest:
            return BodyTooLargeError(f"The request body is larger than {largest} bytes.")
        if counts.held_bytes > limits.max_held_bytes:
            return OverloadedError("too many request bodies are being received at once")
        self._chunks.append(chunk)
        return None

    async def _decide(self) -> None:
        self._body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        call = msgspec.structs.replace(self._call, body=self._body, line=self._line)
        self._pending = self._decisions.decide(call)
        try:
            # Shielded: when the stream is cancelled here, `close` still settles what comes of it.
            decision = await asyncio.shield(self._pending)
        except Answered as answered:
            self._counts.answered += 1
            await self._answer_directly(replies.answer(answered.body))
        except WarmpathError as error:
            await (self._fail(error) if error.status == WarmpathError.status else self._refuse(error))
        except Exception as error:  # noqa: BLE001  # any fault of a decision fails open, and is counted and logged
            await self._fail(error)
        else:
            self._counts.decided += 1
            self._decision = decision if self._body else _as_it_came(decision)
            await self._answer()
            if decision.limited:
                self._endable.add(decision.charge_id, self)
            if decision.total_s > 0.0:
                self._timer = asyncio.create_task(self._expire(decision.total_s + _GRACE_S))

    async def _expire(self, after_s: float) -> None:
        """End the request if nobody else does."""
        await asyncio.sleep(after_s)
        self._timer = None
        await self.end(TimeLimitError("The request took longer than this gateway allows."))

    async def end(self, error: WarmpathError) -> bool:
        """See `endable.Ends`."""
        if not self._exchange.expects(Message.EXPIRED):
            return False
        self._exchange.feed(Message.EXPIRED)
        try:
            await self._context.write(replies.refusal(error))
        except (grpc.aio.BaseError, grpc.aio.UsageError, asyncio.InvalidStateError):
            # It ended, or its end was being answered, at this very moment.
            return False
        return True

    async def _fail(self, error: Exception) -> None:
        """A fault of ours. The error's own text stays out of the log: it may quote the request."""
        where = "".join(traceback.format_tb(error.__traceback__))
        _log.error("decision failed with %s at\n%s", type(error).__name__, where)
        if not self._limits.fails_open(self._call.path):
            await self._refuse(WarmpathError("the request could not be routed"))
            return
        self._counts.failed_open += 1
        await self._answer()

    async def _refuse(self, error: WarmpathError) -> None:
        refused = self._counts.refused
        refused[error.reason] = refused.get(error.reason, 0) + 1
        await self._answer_directly(replies.refusal(error))

    async def _answer_directly(self, reply: bytes) -> None:
        """Answer the client directly."""
        self._exchange.feed(Message.REFUSED)
        self._release()
        await self._context.write(reply)

    async def _answer(self) -> None:
        """Send what is owed, with the pick when there is one."""
        action = self._exchange.feed(Message.DECIDED)
        write, decision, body = self._context.write, self._decision, self._body
        if action is Action.ANSWER_BODY:
            self._release()
            await write(replies.on_body(decision))
            return
        await write(replies.on_headers(decision, once=action is Action.ANSWER_TRAILERS))
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
