"""The phase table of an ext_proc stream: every pair, and any order of messages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.envoy.exchange import (
    OUTCOMES,
    STARTS,
    TABLE,
    Action,
    Exchange,
    Message,
    Phase,
    fallback,
    table_markdown,
    table_mermaid,
)

PAIRS = list(itertools.product(Phase, Message))
GATEWAY = [message for message in Message if message not in OUTCOMES and message is not Message.GONE]
DECIDING = {phase for phase in Phase if phase.name.startswith("DECIDING")}
PICKED = {Phase.PASSING, Phase.SERVING, Phase.ECHOED, Phase.ANSWERED}
REPLY_TO = {
    Action.FORWARD_HEADERS: {Message.HEADERS, Message.HEADERS_END},
    Action.FORWARD_BODY: {Message.BODY, Message.BODY_END},
    Action.FORWARD_TRAILERS: {Message.TRAILERS},
    Action.FORWARD_RESPONSE_HEADERS: {Message.RESPONSE_HEADERS},
    Action.FORWARD_RESPONSE_BODY: {Message.RESPONSE_BODY, Message.RESPONSE_BODY_END},
    Action.FORWARD_RESPONSE_TRAILERS: {Message.RESPONSE_TRAILERS},
}
ANSWERS = {Action.ANSWER_HEADERS, Action.ANSWER_BODY, Action.ANSWER_DUPLEX, Action.ANSWER_TRAILERS}


def at(phase: Phase) -> Exchange:
    """An exchange that stands in `phase`."""
    exchange = Exchange(Phase.START_BUFFERED)
    exchange.phase = phase
    return exchange


def identifier(value: Phase | Message) -> str:
    """Readable parameter names."""
    return value.name


@pytest.mark.parametrize(("phase", "message"), PAIRS, ids=identifier)
def test_every_pair_has_a_harmless_step(phase: Phase, message: Message) -> None:
    """Each pair gives a step and never raises: from the table, or the stated fallback, which is counted."""
    exchange = at(phase)
    action = exchange.feed(message)
    known = (phase, message) in TABLE
    assert (action, exchange.phase) == (TABLE[phase, message] if known else fallback(phase, message))
    assert exchange.unexpected == (0 if known else 1)


@pytest.mark.parametrize(("phase", "message"), PAIRS, ids=identifier)
def test_replies_are_of_the_messages_kind(phase: Phase, message: Message) -> None:
    """A reply that changes nothing is only ever given to a message of its own kind."""
    action = at(phase).feed(message)
    assert message in REPLY_TO.get(action, {message})


@pytest.mark.parametrize(("phase", "message"), PAIRS, ids=identifier)
def test_decisions_begin_and_end_in_their_phases(phase: Phase, message: Message) -> None:
    """DECIDE leads to a deciding phase and nothing else does; answers leave one; only a picked stream settles."""
    exchange = at(phase)
    action = exchange.feed(message)
    assert (action is Action.DECIDE) == (exchange.phase in DECIDING and phase not in DECIDING)
    if action in ANSWERS:
        assert phase in DECIDING
        assert exchange.phase in PICKED
    if action is Action.SETTLE:
        assert phase in {*PICKED, Phase.ENDED}
    if action is Action.ABANDON:
        assert phase in DECIDING


@pytest.mark.parametrize(("phase", "message"), [pair for pair in PAIRS if pair not in TABLE], ids=identifier)
def test_fallback_decides_nothing(phase: Phase, message: Message) -> None:
    """Outside the table nothing is decided, settled or refused: the message passes or is dropped."""
    step = fallback(phase, message)
    assert step.action in {*REPLY_TO, Action.DROP}
    assert step.phase in {phase, Phase.ANSWERED, Phase.UNPICKED}


@pytest.mark.parametrize("phase", Phase, ids=identifier)
def test_end_of_stream_closes_every_phase_as_expected(phase: Phase) -> None:
    """A stream may end anywhere: it is in the table, and closes."""
    exchange = at(phase)
    exchange.feed(Message.GONE)
    assert exchange.phase is Phase.CLOSED
    assert exchange.unexpected == 0


def test_every_phase_can_be_reached() -> None:
    """The table has no dead phase."""
    reached, todo = set(STARTS), list(STARTS)
    while todo:
        phase = todo.pop()
        for step in (TABLE[pair] for pair in TABLE if pair[0] is phase):
            if step.phase not in reached:
                reached.add(step.phase)
                todo.append(step.phase)
    assert reached == set(Phase)


class Books:
    """Drives an exchange as its owner does, and writes down what a gateway would see.

    Attributes:
        pending: decisions that are open, made and not settled.
        ends: end-of-stream marks sent, for the request and the response.
        unanswered: messages of a correct non-duplex gateway that got no reply.
    """

    def __init__(self, start: Phase, outcome: Message) -> None:
        self.exchange = Exchange(start)
        self.duplex = start is Phase.START_DUPLEX
        self.outcome = outcome
        self.decisions = 0
        self.settlements = 0
        self.replies = 0
        self.refusals = 0
        self.ends = {"request": 0, "response": 0}

    def feed(self, message: Message) -> Action:
        """One message of the gateway, or its end, and the outcome of the decision it may start."""
        action = self.exchange.feed(message)
        if action in REPLY_TO:
            self.replies += 1
        if action is Action.FORWARD_RESPONSE_BODY and message is Message.RESPONSE_BODY_END:
            self.ends["response"] += 1
        self.settlements += action is Action.SETTLE
        if action is Action.DECIDE:
            action = self.exchange.feed(self.outcome)
            self.decisions += self.outcome is Message.DECIDED
            self.replies += 1
            self.refusals += action is Action.REFUSE
            self.ends["request"] += action is Action.ANSWER_DUPLEX
        return action


any_start = st.sampled_from(STARTS)
any_outcome = st.sampled_from(sorted(OUTCOMES, key=lambda message: message.name))


@given(any_start, any_outcome, st.lists(st.sampled_from(GATEWAY), max_size=30))
def test_any_order_decides_at_most_once_and_settles_what_it_decided(
    start: Phase, outcome: Message, messages: list[Message]
) -> None:
    """Whatever a gateway sends: at most one decision, settled exactly once at the end, no second end of stream."""
    books = Books(start, outcome)
    for message in messages:
        books.feed(message)
    assert books.settlements == 0
    for _ in range(2):
        books.feed(Message.GONE)
    assert books.decisions <= 1
    assert books.settlements == books.decisions
    assert books.refusals <= 1
    assert books.ends["request"] <= 1
    assert books.ends["response"] <= 1


@given(any_start, st.lists(st.sampled_from(GATEWAY), max_size=30))
def test_nothing_is_answered_after_a_refusal(start: Phase, messages: list[Message]) -> None:
    """The gateway reads nothing after a direct answer, so nothing more is sent."""
    books = Books(start, Message.REFUSED)
    for message in messages:
        refused = books.refusals
        action = books.feed(message)
        if refused:
            assert action is Action.DROP


@given(
    st.sampled_from([Phase.START_BUFFERED, Phase.START_HEADERS]),
    st.lists(st.sampled_from([message for message in GATEWAY if not message.name.startswith("RESPONSE")]), max_size=30),
)
def test_outside_duplex_every_request_message_gets_one_reply(start: Phase, messages: list[Message]) -> None:
    """Outside duplex a gateway waits for one reply to each message of the request, even to one out of order."""
    books = Books(start, Message.DECIDED)
    for message in messages:
        before = books.replies
        books.feed(message)
        assert books.replies == before + 1


@given(st.integers(0, 5), st.booleans(), st.booleans(), st.integers(0, 3), st.sampled_from(["end", "trailers", "cut"]))
def test_correct_gateways_stay_inside_the_table(
    pieces: int, duplex: bool, trailers: bool, response_pieces: int, ending: str
) -> None:
    """Every conversation a correct gateway can have is in the table, and each of its messages gets its reply."""
    books = Books(Phase.START_DUPLEX if duplex else Phase.START_BUFFERED, Message.DECIDED)
    request = [Message.HEADERS if pieces or trailers else Message.HEADERS_END]
    count = pieces if duplex else min(pieces, 1)
    last = Message.BODY if trailers else Message.BODY_END
    request += [Message.BODY] * (count - 1) + [last] * (count > 0)
    if trailers:
        request.append(Message.TRAILERS)
    response = [Message.RESPONSE_HEADERS] + [Message.RESPONSE_BODY] * response_pieces
    response += {"end": [Message.RESPONSE_BODY_END], "trailers": [Message.RESPONSE_TRAILERS], "cut": []}[ending]
    for message in request:
        books.feed(message)
    replies = books.replies
    for message in response:
        books.feed(message)
    books.feed(Message.GONE)
    assert books.exchange.unexpected == 0
    assert books.replies - replies == len(response)
    picked = not (trailers and not duplex and not count)
    assert books.settlements == books.decisions == picked
    assert books.ends["request"] == (duplex and count > 0 and not trailers)


def test_pictures_show_the_whole_table() -> None:
    """The documentation's table has one row a pair, and its diagram every phase and every change of phase."""
    rows = table_markdown().splitlines()[2:]
    assert len(rows) == len(TABLE)
    assert "| body due | request body, last | decide | deciding, body unanswered |" in rows
    diagram = table_mermaid()
    for phase in Phase:
        assert f"{phase.name}: {phase.value}" in diagram
    assert "DECIDING_BODY --> SERVING: decided" in diagram
