"""One answer, out of the bytes of it as they came: kept while it passes, read once it is over.

Keeping costs the stream that it is copied from an append a piece. Reading is Python's work, 7 µs an event, and is
meant for a thread: it rests now and then, so that an event loop beside it gets its turn.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from extproc.errors import RelayError
from extproc.relay.events import DONE, Splitter
from extproc.request.model import RouteKind
from extproc.shadow.forms import EVENTS, WHOLES, Found

LONGEST: Final = 8 << 20
"""Bytes of an answer that are kept, as sent and unpacked: some 38,000 tokens of a chat that vLLM streams."""
COMPARABLE: Final = frozenset(EVENTS)
"""APIs whose answers can be compared."""

Flaw = Literal["", "unreached", "status", "failed", "aborted", "cut", "unreadable", "too_long"]
"""What is wrong with an answer: no answer at all; another status than 200; an error sent in the answer; the engine says
that it stopped; it ended before its end; it is not what its API sends; it is longer than is kept."""

_OK: Final = 200
_ABORTED: Final = frozenset({"abort", "aborted", "error"})
"""Values of `finish_reason` by which engines say that they were stopped (vLLM and SGLang)."""
_REFUSED: Final = frozenset({"content_filter", "refusal"})
"""Values of `finish_reason` and `stop_reason` by which an answer says that it refuses."""
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS
_EVENTS_A_TURN: Final = 16
"""Events that are read before a rest: about 0.1 ms."""

_object = msgspec.json.Decoder(dict[str, Any]).decode
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeError, RecursionError, RelayError, zlib.error)


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool: its name, and its arguments as JSON whose keys are in order, so that equal ones are equal."""

    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request. Times are seconds since it was sent.

    Attributes:
        status: HTTP status; 0 when none came.
        flaw: what is wrong with it; empty for a whole answer.
        text: its text, as far as it came.
        reasoning: characters of its reasoning.
        tools: its tool calls, in their order.
        finish: why the engine ended, as it says it.
        refused: whether the engine marks it as a refusal.
        choices: how many answers were in it; only the first is here.
        tokens: generated tokens as the engine tells them; None when it does not.
        events: events that held something generated; 0 for an answer in one piece.
        ttft_s: when the first of them came; None for an answer in one piece.
        last_s: when the last of them came; None likewise.
        duration_s: when it was over.
    """

    status: int
    flaw: Flaw
    text: str = ""
    reasoning: int = 0
    tools: tuple[ToolCall, ...] = ()
    finish: str = ""
    refused: bool = False
    choices: int = 0
    tokens: int | None = None
    events: int = 0
    ttft_s: float | None = None
    last_s: float | None = None
    duration_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether all of it came."""
        return not self.flaw

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None when it is not known of several tokens."""
        tokens = self.tokens or self.events
        if self.ttft_s is None or self.last_s is None or tokens < 2:
            return None
        return (self.last_s - self.ttft_s) / (tokens - 1)


def unreached(duration_s: float) -> Answer:
    """The answer of an engine that could not be reached."""
    return Answer(status=0, flaw="unreached", duration_s=duration_s)


class Collector:
    """Keeps the bytes of one answer. Its methods return at once and never raise; times are of one clock, in seconds.

    `answer` may be called from another thread, once `over` was.
    """

    def __init__(self, kind: RouteKind, streamed: bool, asked: float, longest: int = LONGEST) -> None:
        """Begin.

        Args:
            kind: API that was called.
            streamed: whether a stream was asked for.
            asked: when the request was sent.
            longest: bytes that are kept; an answer that is longer is given up.
        """
        self._kind = kind
        self._streamed = streamed
        self._asked = asked
        self._longest = longest
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._pieces: list[tuple[float, bytes]] = []
        self._size = 0
        self._over = asked
        self._complete = False

    def began(self, status: int, headers: Mapping[str, str], now: float) -> None:
        """The answer's headers came, names in lower case."""
        self._status, self._over = status, now
        self._headers = {name: headers.get(name, "").lower() for name in ("content-type", "content-encoding")}

    def chunk(self, body: bytes, now: float) -> None:
        """A piece of the body came."""
        self._size += len(body)
        self._over = now
        if self._size > self._longest:
            self._pieces.clear()
        elif body:
            self._pieces.append((now, body))

    def over(self, now: float, *, complete: bool) -> None:
        """Nothing more comes; `complete` says that the body came to its end."""
        self._over, self._complete = now, complete

    @property
    def size(self) -> int:
        """Bytes of the body that came."""
        return self._size

    def answer(self, rest: Callable[[], None] = lambda: None) -> Answer:
        """The answer; `rest` is called now and then while it is read."""
        duration_s = max(0.0, self._over - self._asked)
        if self._status != _OK:
            return Answer(status=self._status, flaw="status" if self._status else "unreached", duration_s=duration_s)
        if self._size > self._longest:
            return Answer(status=_OK, flaw="too_long", duration_s=duration_s)
        kind = self._headers["content-type"]
        streams = "text/event-stream" in kind or (not kind and self._streamed)
        reading = _Reading(self._kind, self._asked)
        try:
            pieces = _unpacked(self._pieces, self._headers["content-encoding"], self._longest)
            if streams:
                reading.stream(pieces, self._longest, rest)
            else:
                reading.whole(b"".join(piece for _, piece in pieces))
        except _UNREADABLE:
            # The end of a packed or whole answer that was cut cannot be read either.
            flaw: Flaw = "unreadable" if streams or self._complete else "cut"
            return reading.answer(flaw, duration_s)
        except _TooLongError:
            return Answer(status=_OK, flaw="too_long", duration_s=duration_s)
        return reading.answer(reading.flaw, duration_s)


class _TooLongError(Exception):
    """An answer is longer than is kept, once it is unpacked."""


class _Reading:
    """An answer while it is read, and when its first and last token came."""

    def __init__(self, kind: RouteKind, asked: float) -> None:
        self._kind = kind
        self._asked = asked
        self._found = Found()
        self._events = 0
        self._first: float | None = None
        self._last: float | None = None

    def stream(self, pieces: Iterator[tuple[float, bytes]], longest: int, rest: Callable[[], None]) -> None:
        """Read the events of a stream. Raises what `_UNREADABLE` names for one that is none."""
        splitter, take, taken = Splitter(longest), EVENTS[self._kind], 0
        for at, piece in pieces:
            for data in splitter.feed(piece):
                taken += 1
                if taken % _EVENTS_A_TURN == 0:
                    rest()
                if data == DONE:
                    # TensorRT-LLM sends its metrics behind it, which are no part of the answer.
                    self._found.ended = True
                    return
                if take(self._found, _object(data)):
                    self._events += 1
                    self._first = at if self._first is None else self._first
                    self._last = at

    def whole(self, body: bytes) -> None:
        """Read an answer in one piece. Raises what `_UNREADABLE` names for one that is none."""
        WHOLES[self._kind](self._found, _object(body))

    @property
    def flaw(self) -> Flaw:
        """What is wrong with what was read."""
        if self._found.failed:
            return "failed"
        if self._found.finish in _ABORTED:
            return "aborted"
        return "" if self._found.ended else "cut"

    def answer(self, flaw: Flaw, duration_s: float) -> Answer:
        """What was read."""
        found = self._found
        tools = (ToolCall(name, _canonical("".join(pieces))) for name, pieces in found.tools.values())
        return Answer(
            status=_OK,
            flaw=flaw,
            text="".join(found.text),
            reasoning=found.reasoning,
            tools=tuple(tools),
            finish=found.finish,
            refused=found.refused or found.finish in _REFUSED,
            choices=max(1, len(found.choices)),
            tokens=found.tokens,
            events=self._events,
            ttft_s=self._since(self._first),
            last_s=self._since(self._last),
            duration_s=duration_s,
        )

    def _since(self, at: float | None) -> float | None:
        return None if at is None else max(0.0, at - self._asked)


def _unpacked(pieces: list[tuple[float, bytes]], encoding: str, longest: int) -> Iterator[tuple[float, bytes]]:
    """The pieces as they were before gzip or zlib packed them. Raises `zlib.error` for other encodings."""
    if encoding in ("", "identity"):
        yield from pieces
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise zlib.error(f"content-encoding {encoding!r} is none of gzip and deflate")
    unpacker, left = zlib.decompressobj(_GZIP_OR_ZLIB), longest
    for at, piece in pieces:
        rest = piece
        while rest:
            if unpacker.eof:
                # A gzip body may be several, one behind the other.
                unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
            out = unpacker.decompress(rest, left + 1)
            left -= len(out)
            if left < 0:
                raise _TooLongError
            yield at, out
            rest = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail


def _canonical(arguments: str) -> str:
    """JSON without its white space and with keys in order; what is no JSON as it is."""
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted").decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return arguments
