"""One relayed request on its way: sent to an engine, and to another one when the first is lost."""

import asyncio
import logging
from typing import Final

from aiohttp import web

from extproc.errors import RelayError, TimeLimitError
from extproc.relay.answer import Answer, Lost
from extproc.relay.asked import Asked
from extproc.relay.client import Client
from extproc.relay.events import Splitter
from extproc.relay.gateway import Gateway, Headers, Reply, headers_of
from extproc.relay.limits import WHY, Failure, Limits, Room
from extproc.relay.resuming import Form, Hindered, Sending, continued, first
from extproc.telemetry.relay_metrics import RelayMetrics, RelayOutcome

log = logging.getLogger(__name__)

_OK: Final = 200
_BUSY: Final = 429
_FAILED: Final = 500
_REASON: Final = "x-warmpath-reason"
_FALLBACK: Final = "x-warmpath-fallback"
"""Response header that names the model that answers in place of a saturated one."""
_VERSION: Final = "x-warmpath-version"
"""Response header that names the version that answers, of a model with several."""
_PAUSE_S: Final = 0.1
"""Wait before another engine is asked after one that took nothing over; it doubles each time."""


class Passage:
    """One request and its tries.

    Attributes:
        outcome: what became of it.
    """

    def __init__(self, asked: Asked, path: str, headers: Headers, body: bytes, limits: Limits) -> None:
        """`path` is the path and query that the client called."""
        self.outcome: RelayOutcome = "gone"
        self._asked = asked
        self._path = path
        self._headers = headers
        self._body = body
        self._limits = limits
        self._avoid: dict[str, None] = {}
        self._attempt = 0
        self._head: Headers = {}
        self._served = ""
        self._model = asked.model
        self._version = ""
        self._continued = False

    async def run(self, gateway: Gateway, client: Client, room: Room, metrics: RelayMetrics) -> web.StreamResponse:
        """Answer the request.

        Raises:
            Gone: the client has left.
            RelayError: a whole answer could not be had, or is too long.
            OverloadedError: there is no room for it.
        """
        self._gateway, self._client, self._room, self._metrics = gateway, client, room, metrics
        try:
            async with asyncio.timeout(self._limits.request_s(self._asked) or None):
                return await (self._streamed() if self._asked.stream else self._whole())
        except TimeoutError:
            self.outcome = "failed"
            return await client.fail(TimeLimitError("The request took longer than this gateway allows."))

    async def _whole(self) -> web.StreamResponse:
        """An answer in one piece is held until it is complete, so it can be asked for anew until then."""
        while True:
            got = await self._whole_try()
            if not isinstance(got, Lost):
                return got
            if failure := self._final(got, empty=True):
                raise self._given_up(failure)
            await self._again("whole", got)

    async def _whole_try(self) -> web.Response | Lost:
        self._attempt += 1
        headers, held = headers_of(self._headers, self._attempt, self._avoid), bytearray()
        try:
            async with self._gateway.send(self._path, headers, self._body, stream=False) as reply:
                self._note(reply)
                await self._hold(reply, held)
                return self._died(Lost("failed")) if self._has_failed(reply) else self._passed(reply, bytes(held))
        except Lost as lost:
            return self._died(lost)
        finally:
            self._room.give(len(held))

    async def _hold(self, reply: Reply, held: bytearray) -> None:
        while piece := await reply.piece():
            self._metrics.received(len(piece))
            self._room.take(len(piece))
            held += piece
            if len(held) > self._limits.max_body:
                raise RelayError(f"the answer is longer than the {self._limits.max_body} bytes that a relay holds")

    async def _streamed(self) -> web.StreamResponse:
        answer = Answer(self._asked, self._limits.max_body, self._room)
        try:
            return await self._answered(answer)
        finally:
            answer.release()

    async def _answered(self, answer: Answer) -> web.StreamResponse:
        sending = self._first()
        while True:
            got = await self._stream_try(sending, answer)
            if isinstance(got, web.StreamResponse):
                return got
            if got is None or answer.finished or self._spent(answer):
                return await self._close(answer)
            failure = self._final(got, empty=answer.received.empty)
            if failure is None:
                try:
                    sending = self._next(answer)
                except Hindered as hindered:
                    failure = hindered.hindrance
            if failure is not None:
                return await self._client.fail(self._given_up(failure))
            await self._again(sending.form, got)

    async def _stream_try(self, sending: Sending, answer: Answer) -> web.Response | Lost | None:
        """One engine's part of a stream; an answer to hand on as it is, what was lost, or None at its good end."""
        self._attempt += 1
        answer.begin(sending)
        headers = headers_of(self._headers, self._attempt, self._avoid)
        try:
            async with self._gateway.send(sending.path, headers, sending.body, stream=True) as reply:
                self._note(reply)
                if not reply.streams:
                    return await self._no_stream(reply)
                self._note_model(reply, sending)
                await self._pass_on(reply, answer)
                return None
        except Lost as lost:
            return self._died(lost)

    async def _pass_on(self, reply: Reply, answer: Answer) -> None:
        splitter = Splitter(self._limits.max_body)
        while piece := await reply.piece():
            self._metrics.received(len(piece))
            events: list[bytes] = []
            lost = None
            try:
                for data in splitter.feed(piece):
                    events += answer.take(data)
                    if answer.complete:
                        break
            except Lost as end:
                lost = end
            except RelayError:
                lost = Lost("error")
            # What came before the end counts as received, so the client must have it.
            await self._client.send(events, self._head)
            if lost is not None:
                raise lost
            if answer.complete:
                await reply.finish()
                return
        if not answer.finished:
            raise Lost("cut")

    async def _no_stream(self, reply: Reply) -> web.Response:
        """Whatever is no stream is the client's to see, unless it has some of the answer already."""
        if self._client.begun:
            refused = _OK <= reply.status < _FAILED and reply.status != _BUSY
            raise Lost("refused" if refused else "failed")
        held = bytearray()
        try:
            await self._hold(reply, held)
            if self._has_failed(reply):
                raise Lost("failed")
            return self._passed(reply, bytes(held))
        finally:
            self._room.give(len(held))

    def _has_failed(self, reply: Reply) -> bool:
        """Whether to ask another engine in place of handing an error on.

        vLLM answers 500 while its core is dead or it is shutting down. Envoy hands that on at once, but has tried
        others already before it says 502, 503 or 504.
        """
        ours = _REASON in reply.headers
        left = self._attempt < self._limits.max_attempts and self._limits.on_death != "fail"
        return reply.status == _FAILED and not ours and left

    def _spent(self, answer: Answer) -> bool:
        """Whether every token that was asked for came before the engine was lost."""
        limit = self._asked.limit
        return self._asked.choices == 1 and limit is not None and 0 < limit <= answer.received.tokens

    def _final(self, lost: Lost, *, empty: bool) -> Failure | None:
        """Why no other engine is asked; None when one may be. `empty` says that nothing was received."""
        mode = self._limits.on_death
        if mode == "fail" or (mode == "restart_before_first" and not empty):
            return "mode"
        if lost.death in ("refused", "unfit"):
            return "refused"
        return "attempts" if self._attempt >= self._limits.max_attempts else None

    def _first(self) -> Sending:
        return first(self._asked, self._path, ids=self._asked.model not in self._limits.silent)

    def _next(self, answer: Answer) -> Sending:
        """What to ask the next engine. Raises Hindered when the answer cannot be continued."""
        if answer.received.empty:
            return self._first()
        if answer.too_long:
            raise Hindered("size")
        asked = self._asked if self._model == self._asked.model else self._asked.of_model(self._model)
        return continued(asked, self._path, answer.received, open_messages=self._model not in self._limits.silent)

    async def _again(self, form: Form, lost: Lost) -> None:
        self._metrics.resumed(form)
        if form != "whole":
            self._continued = True
        if lost.death == "failed":
            await asyncio.sleep(_PAUSE_S * 2 ** (self._attempt - 1))

    def _note(self, reply: Reply) -> None:
        self._served, self._head = reply.served, reply.headers

    def _note_model(self, reply: Reply, sending: Sending) -> None:
        """An answer is continued by the model that began it, be that the client's or one that answers in its place.

        Raises:
            Lost: another model, or another version of it, would continue it.
        """
        instead, version = reply.headers.get(_FALLBACK, ""), reply.headers.get(_VERSION, "")
        if sending.form == "whole":
            self._model, self._version = instead or self._asked.model, version
        elif instead or version != self._version:
            raise Lost("failed")

    def _died(self, lost: Lost) -> Lost:
        """Count a lost engine, and leave it out from now on."""
        self._metrics.died(lost.death)
        log.warning("an engine was lost", extra={"endpoint": self._served, "how": lost.death, "attempt": self._attempt})
        if self._served:
            self._avoid[self._served] = None
        self._served = ""
        return lost

    def _given_up(self, failure: Failure) -> RelayError:
        self.outcome = "failed"
        self._metrics.failed(failure)
        return RelayError(f"The engine that was answering is lost, and the answer is not continued: {WHY[failure]}.")

    def _passed(self, reply: Reply, body: bytes) -> web.Response:
        self.outcome = self._ended() if reply.status == _OK else "passed"
        return web.Response(status=reply.status, body=body, headers=reply.headers)

    async def _close(self, answer: Answer) -> web.StreamResponse:
        response = await self._client.end(answer.close(), self._head)
        self.outcome = self._ended()
        return response

    def _ended(self) -> RelayOutcome:
        if self._attempt == 1:
            return "whole"
        return "continued" if self._continued else "moved"
