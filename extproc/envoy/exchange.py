"""The phases of one ext_proc stream, as one table without I/O.

A stream is a conversation: the gateway sends messages, each of which moves the stream to its next phase and asks for
one action. `TABLE` holds every pair that a correct gateway produces. Any other pair is answered by `fallback`: with
the reply of the message's own kind that changes nothing while the gateway may wait for one, and with silence
afterwards; it is never an error. The module knows neither gRPC nor protobuf.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple


class Message(Enum):
    """What a stream can meet: a message of the gateway, the outcome of a decision, or the end of the stream."""

    HEADERS = "request headers"
    HEADERS_END = "request headers, no body"
    BODY = "request body"
    BODY_END = "request body, last"
    TRAILERS = "request trailers"
    RESPONSE_HEADERS = "response headers"
    RESPONSE_BODY = "response body"
    RESPONSE_BODY_END = "response body, last"
    RESPONSE_TRAILERS = "response trailers"
    DECIDED = "decided"
    REFUSED = "refused"
    EXPIRED = "time limit ran out"
    GONE = "end of stream"


class Phase(Enum):
    """How far a stream has come. The three first ones differ in where the gateway can still act on a pick."""

    START_BUFFERED = "start, buffered"
    START_DUPLEX = "start, duplex"
    START_HEADERS = "start, headers only"
    BODY_DUE = "body due"
    GATHERING = "gathering body"
    DECIDING_HEADERS = "deciding, headers unanswered"
    DECIDING_EARLY = "deciding, headers unanswered, body follows"
    DECIDING_BODY = "deciding, body unanswered"
    DECIDING_DUPLEX = "deciding, headers and body held"
    DECIDING_TRAILERS = "deciding, headers, body and trailers held"
    PASSING = "picked, body passes"
    SERVING = "picked"
    ECHOED = "picked, body echoed"
    ANSWERED = "answer complete"
    UNPICKED = "answer complete, never picked"
    ENDED = "ended by a time limit"
    CLOSED = "closed"


class Action(Enum):
    """What the owner of the stream does next."""

    FORWARD_HEADERS = "let the headers through"
    FORWARD_BODY = "let the body through"
    FORWARD_TRAILERS = "let the trailers through"
    FORWARD_RESPONSE_HEADERS = "let the response headers through"
    FORWARD_RESPONSE_BODY = "let the response body through"
    FORWARD_RESPONSE_TRAILERS = "let the response trailers through"
    HOLD = "keep, answer nothing yet"
    DECIDE = "decide"
    ANSWER_HEADERS = "answer the headers with the pick"
    ANSWER_BODY = "answer the body with the pick"
    ANSWER_DUPLEX = "answer the headers with the pick, echo the body"
    ANSWER_TRAILERS = "answer the headers with the pick, echo the body, let the trailers through"
    REFUSE = "answer the client directly"
    ABANDON = "settle once the decision is known"
    SETTLE = "settle"
    DROP = "nothing"


class Step(NamedTuple):
    """One cell of the table."""

    action: Action
    phase: Phase


_A, _M, _P = Action, Message, Phase

STARTS: Final = (Phase.START_BUFFERED, Phase.START_DUPLEX, Phase.START_HEADERS)
"""Phases a stream can begin in."""

OUTCOMES: Final = frozenset({Message.DECIDED, Message.REFUSED, Message.EXPIRED})
"""Messages the owner feeds itself: after `Action.DECIDE`; `REFUSED` also while it gathers a body; `EXPIRED` later."""

_DECIDING: Final = {
    _P.DECIDING_HEADERS: Step(_A.ANSWER_HEADERS, _P.SERVING),
    _P.DECIDING_EARLY: Step(_A.ANSWER_HEADERS, _P.PASSING),
    _P.DECIDING_BODY: Step(_A.ANSWER_BODY, _P.SERVING),
    _P.DECIDING_DUPLEX: Step(_A.ANSWER_DUPLEX, _P.ECHOED),
    _P.DECIDING_TRAILERS: Step(_A.ANSWER_TRAILERS, _P.ECHOED),
}
_FORWARD: Final = {
    _M.HEADERS: _A.FORWARD_HEADERS,
    _M.HEADERS_END: _A.FORWARD_HEADERS,
    _M.BODY: _A.FORWARD_BODY,
    _M.BODY_END: _A.FORWARD_BODY,
    _M.TRAILERS: _A.FORWARD_TRAILERS,
    _M.RESPONSE_HEADERS: _A.FORWARD_RESPONSE_HEADERS,
    _M.RESPONSE_BODY: _A.FORWARD_RESPONSE_BODY,
    _M.RESPONSE_BODY_END: _A.FORWARD_RESPONSE_BODY,
    _M.RESPONSE_TRAILERS: _A.FORWARD_RESPONSE_TRAILERS,
}


def _request_cells() -> dict[tuple[Phase, Message], Step]:
    """The request's way to its decision."""
    return {
        # Buffered: the headers go through at once, or the gateway would never send the body.
        (_P.START_BUFFERED, _M.HEADERS): Step(_A.FORWARD_HEADERS, _P.BODY_DUE),
        (_P.START_BUFFERED, _M.HEADERS_END): Step(_A.DECIDE, _P.DECIDING_HEADERS),
        # One message is the whole body; it is not the last one when request trailers follow.
        (_P.BODY_DUE, _M.BODY): Step(_A.DECIDE, _P.DECIDING_BODY),
        (_P.BODY_DUE, _M.BODY_END): Step(_A.DECIDE, _P.DECIDING_BODY),
        # Trailers without a body: too late for a pick, since the headers have gone on.
        (_P.BODY_DUE, _M.TRAILERS): Step(_A.FORWARD_TRAILERS, _P.BODY_DUE),
        # Duplex: nothing is answered before the request's end, since the pick travels with the headers.
        (_P.START_DUPLEX, _M.HEADERS): Step(_A.HOLD, _P.GATHERING),
        (_P.START_DUPLEX, _M.HEADERS_END): Step(_A.DECIDE, _P.DECIDING_HEADERS),
        (_P.GATHERING, _M.BODY): Step(_A.HOLD, _P.GATHERING),
        (_P.GATHERING, _M.BODY_END): Step(_A.DECIDE, _P.DECIDING_DUPLEX),
        (_P.GATHERING, _M.TRAILERS): Step(_A.DECIDE, _P.DECIDING_TRAILERS),
        # Refused for its size before its end has come.
        (_P.GATHERING, _M.REFUSED): Step(_A.REFUSE, _P.CLOSED),
        # No body, or one in pieces: the answer to the headers is the last that can carry a pick.
        (_P.START_HEADERS, _M.HEADERS): Step(_A.DECIDE, _P.DECIDING_EARLY),
        (_P.START_HEADERS, _M.HEADERS_END): Step(_A.DECIDE, _P.DECIDING_HEADERS),
        (_P.PASSING, _M.BODY): Step(_A.FORWARD_BODY, _P.PASSING),
        (_P.PASSING, _M.BODY_END): Step(_A.FORWARD_BODY, _P.SERVING),
        (_P.PASSING, _M.TRAILERS): Step(_A.FORWARD_TRAILERS, _P.SERVING),
        (_P.SERVING, _M.TRAILERS): Step(_A.FORWARD_TRAILERS, _P.SERVING),
    }


def _decision_cells() -> dict[tuple[Phase, Message], Step]:
    """What the outcome of a decision asks for, and a stream that ends before it."""
    cells: dict[tuple[Phase, Message], Step] = {}
    for phase, answer in _DECIDING.items():
        cells[phase, _M.DECIDED] = answer
        cells[phase, _M.REFUSED] = Step(_A.REFUSE, _P.CLOSED)
        cells[phase, _M.GONE] = Step(_A.ABANDON, _P.CLOSED)
    return cells


def _answered(phase: Phase) -> Phase:
    """Phase after the end of the answer, which may come before any pick when the gateway itself answers."""
    return _P.ANSWERED if phase in (_P.PASSING, _P.SERVING, _P.ECHOED) else _P.UNPICKED


def _response_cells() -> dict[tuple[Phase, Message], Step]:
    """The answer's messages, sent when the gateway is configured to; also for answers of the gateway itself."""
    cells: dict[tuple[Phase, Message], Step] = {}
    unpicked, picked = (_P.BODY_DUE, _P.GATHERING), (_P.PASSING, _P.SERVING, _P.ECHOED)
    for phase in (*unpicked, *picked):
        end = _answered(phase)
        cells[phase, _M.RESPONSE_HEADERS] = Step(_A.FORWARD_RESPONSE_HEADERS, phase)
        cells[phase, _M.RESPONSE_BODY] = Step(_A.FORWARD_RESPONSE_BODY, phase)
        cells[phase, _M.RESPONSE_BODY_END] = Step(_A.FORWARD_RESPONSE_BODY, end)
        cells[phase, _M.RESPONSE_TRAILERS] = Step(_A.FORWARD_RESPONSE_TRAILERS, end)
    for phase in picked:
        cells[phase, _M.EXPIRED] = Step(_A.REFUSE, _P.ENDED)
    for phase in (*STARTS, *unpicked, _P.UNPICKED, _P.CLOSED):
        cells[phase, _M.GONE] = Step(_A.DROP, _P.CLOSED)
    for phase in (*picked, _P.ANSWERED, _P.ENDED):
        cells[phase, _M.GONE] = Step(_A.SETTLE, _P.CLOSED)
    # Messages that were under way when the gateway read our refusal.
    for message in _FORWARD:
        cells[_P.CLOSED, message] = Step(_A.DROP, _P.CLOSED)
        cells[_P.ENDED, message] = Step(_A.DROP, _P.ENDED)
    return cells


TABLE: Final[Mapping[tuple[Phase, Message], Step]] = MappingProxyType(
    _request_cells() | _decision_cells() | _response_cells()
)
"""Every pair that a correct gateway produces."""

_SILENT: Final = frozenset({*_DECIDING, _P.ANSWERED, _P.UNPICKED, _P.ENDED, _P.CLOSED})
_REQUEST_SIDE: Final = frozenset({_M.HEADERS, _M.HEADERS_END, _M.BODY, _M.BODY_END, _M.TRAILERS})
_DUPLEX: Final = frozenset({_P.START_DUPLEX, _P.GATHERING, _P.ECHOED})


def fallback(phase: Phase, message: Message) -> Step:
    """What happens on a pair outside the table: the stream stays in its phase, and goes on if it can.

    The message gets the reply of its own kind that changes nothing. It gets none where a second reply would break
    the stream: while another one is owed, after the end of the answer, and for the request's side of a duplex
    stream, whose chunks are counted by the gateway.
    """
    silent = phase in _SILENT or (phase in _DUPLEX and message in _REQUEST_SIDE) or message not in _FORWARD
    if silent:
        return Step(_A.DROP, phase)
    ends_answer = message in (_M.RESPONSE_BODY_END, _M.RESPONSE_TRAILERS)
    return Step(_FORWARD[message], _answered(phase) if ends_answer else phase)


class Exchange:
    """Where one stream stands. Feed it messages in order; it says what to do, and never raises.

    Attributes:
        phase: current phase.
        unexpected: how many messages were outside the table.
    """

    __slots__ = ("phase", "unexpected")

    def __init__(self, start: Phase) -> None:
        self.phase = start
        self.unexpected = 0

    def feed(self, message: Message) -> Action:
        """Take the next message and return what to do about it."""
        step = TABLE.get((self.phase, message))
        if step is None:
            self.unexpected += 1
            step = fallback(self.phase, message)
        self.phase = step.phase
        return step.action

    def expects(self, message: Message) -> bool:
        """Whether a message is in the table now."""
        return (self.phase, message) in TABLE

    def __repr__(self) -> str:
        return f"<Exchange {self.phase.value}, unexpected {self.unexpected}>"


def table_markdown() -> str:
    """Render the table for the documentation: one row a phase and message, in the order of a stream."""
    rows = ["| phase | message | action | next phase |", "|---|---|---|---|"]
    for phase in Phase:
        for message in Message:
            step = TABLE.get((phase, message))
            if step is not None:
                rows.append(f"| {phase.value} | {message.value} | {step.action.value} | {step.phase.value} |")
    return "\n".join(rows) + "\n"


def table_mermaid() -> str:
    """Render the table as a mermaid state diagram; messages between the same two phases share one arrow."""
    lines = ["stateDiagram-v2"]
    lines += [f"    {phase.name}: {phase.value}" for phase in Phase]
    lines += [f"    [*] --> {phase.name}" for phase in STARTS]
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, message), step in TABLE.items():
        if phase is not step.phase:
            arrows.setdefault((phase, step.phase), []).append(message.value)
    lines += [f"    {a.name} --> {b.name}: {' / '.join(labels)}" for (a, b), labels in arrows.items()]
    lines.append(f"    {Phase.CLOSED.name} --> [*]")
    return "\n".join(lines) + "\n"
