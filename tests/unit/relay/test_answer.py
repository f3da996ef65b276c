"""One answer for the client, whoever wrote which part of it."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.relay.answer import Answer, Lost
from extproc.relay.asked import Api, read
from extproc.relay.events import DONE, Splitter
from extproc.relay.limits import Room
from extproc.relay.resuming import Sending, continued, first
from extproc.telemetry.relay_metrics import RelayMetrics

PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
PROMPT_IDS = [101, 102, 103]
LONGEST = 1 << 20
TOKENS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4), min_size=1, max_size=12)


def roomy(size: int = 1 << 30) -> Room:
    """Memory of a relay that holds nothing yet."""
    return Room(size, RelayMetrics("test"))


class Engine:
    """An engine that says fixed tokens, of which the n-th has the id n. It continues from wherever it is asked to.

    Args:
        tokens: the whole answer.
        ids: whether it knows `return_token_ids`.
        running: whether it knows `continuous_usage_stats`.
    """

    def __init__(self, tokens: Sequence[str], *, ids: bool, running: bool) -> None:
        self._tokens = tokens
        self._ids = ids
        self._running = running
        self._numbers = itertools.count(1)

    def events(self, sending: Sending) -> list[bytes]:
        """The data of the events of its answer, `[DONE]` included."""
        asked = json.loads(sending.body)
        chat = "messages" in asked
        head = {"id": f"id-{next(self._numbers)}", "object": "chunk", "created": 7, "model": "m"}
        start, prompt = self._place(asked)
        ids = self._ids and asked.get("return_token_ids")
        events: list[dict[str, Any]] = []
        if chat:
            role: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            events.append({**head, "choices": [role], **({"prompt_token_ids": prompt} if ids else {})})
        for number in range(start, len(self._tokens)):
            text = self._tokens[number]
            last = number == len(self._tokens) - 1
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if last else None}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if ids:
                choice["token_ids"] = [number]
                if not chat and number == start:
                    choice["prompt_token_ids"] = prompt
            events.append({**head, "choices": [choice]})
            if self._running:
                events[-1]["usage"] = usage(len(prompt), number + 1 - start)
        if asked["stream_options"]["include_usage"]:
            final = usage(len(prompt), len(self._tokens) - start) | {"prompt_tokens_details": {"cached_tokens": 1}}
            events.append({**head, "choices": [], "usage": final})
        return [*(json.dumps(event).encode() for event in events), DONE]

    def _place(self, asked: dict[str, Any]) -> tuple[int, list[int]]:
        """How many tokens of the answer the prompt holds already, and the prompt's ids."""
        if asked.get("continue_final_message"):
            text = asked["messages"][-1]["content"]
        elif isinstance(asked.get("prompt"), list):
            begun: list[int] = asked["prompt"][len(PROMPT_IDS) :]
            assert begun == list(range(len(begun)))
            return len(begun), asked["prompt"]
        else:
            text = asked.get("prompt", "p").removeprefix("p")
        lengths = [len("".join(self._tokens[:count])) for count in range(len(self._tokens) + 1)]
        start = lengths.index(len(text))
        assert "".join(self._tokens[:start]) == text
        return start, [*PROMPT_IDS, *range(start)]


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """Usage as vLLM writes it in the middle of a stream."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def request(api: Api, **fields: Any) -> Any:
    """A request for a stream with usage at its end."""
    content: dict[str, Any] = {"messages": [{"role": "user", "content": "p"}]} if api == "chat" else {"prompt": "p"}
    asking = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 99, **fields}
    return read(api, json.dumps(content | asking).encode())


class Seen:
    """What the client received."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        data = Splitter(LONGEST).feed(b"".join(pieces))
        assert data.count(DONE) == 1
        assert data[-1] == DONE
        self.events: list[dict[str, Any]] = [json.loads(one) for one in data[:-1]]
        self.choices = [choice for event in self.events for choice in event["choices"]]
        self.usages = [event["usage"] for event in self.events if "usage" in event]

    @property
    def text(self) -> str:
        """All text."""
        return "".join(one["delta"].get("content") or "" if "delta" in one else one["text"] for one in self.choices)

    @property
    def ids(self) -> set[str]:
        """Ids that events bear."""
        return {event["id"] for event in self.events}

    @property
    def roles(self) -> int:
        """How often the role was said."""
        return sum("role" in one.get("delta", {}) for one in self.choices)

    @property
    def reasons(self) -> list[str]:
        """Finish reasons."""
        return [one["finish_reason"] for one in self.choices if one["finish_reason"]]


def relayed(asked: Any, engine: Engine, cuts: Sequence[int]) -> tuple[Seen, list[Sending]]:
    """An answer whose engine is lost after so many events, again and again, and then is whole."""
    api = asked.api
    answer, sent, pieces = Answer(asked, LONGEST, roomy()), [], []
    sending = first(asked, PATHS[api], ids=True)
    for cut in [*cuts, None]:
        sent.append(sending)
        answer.begin(sending)
        for data in engine.events(sending)[:cut]:
            pieces += answer.take(data)
        if answer.complete or answer.finished:
            break
        if answer.received.empty:
            sending = first(asked, PATHS[api], ids=True)
        else:
            sending = continued(asked, PATHS[api], answer.received)
    return Seen([*pieces, *answer.close()]), sent


@settings(deadline=None)
@given(
    api=st.sampled_from(["chat", "completion"]),
    tokens=TOKENS,
    ids=st.booleans(),
    running=st.booleans(),
    cuts=st.lists(st.integers(0, 14), max_size=3),
)
def test_an_answer_is_the_same_wherever_its_engines_are_lost(
    api: Api, tokens: list[str], ids: bool, running: bool, cuts: list[int]
) -> None:
    """No token is lost or doubled; one id, one role, one reason, one end; the tokens are those of one whole answer."""
    engine = Engine(tokens, ids=ids, running=running)
    seen, sent = relayed(request(api), engine, cuts)
    assert seen.text == "".join(tokens)
    assert len(seen.ids) == 1
    assert seen.roles == (api == "chat")
    assert seen.reasons == ["stop"]
    if seen.usages or ids or running:
        [told] = seen.usages
        assert (told["prompt_tokens"], told["completion_tokens"]) == (len(PROMPT_IDS), len(tokens))
        assert told["total_tokens"] == len(PROMPT_IDS) + len(tokens)
    assert {one.form for one in sent} <= {"whole", "ids" if ids else "text"}


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_an_undisturbed_answer_is_as_the_engine_wrote_it(api: Api) -> None:
    """Usage keeps its details, and nothing that the client did not ask for stays in the events."""
    seen, _ = relayed(request(api), Engine(["a", "b"], ids=True, running=True), [])
    assert seen.usages == [usage(3, 2) | {"prompt_tokens_details": {"cached_tokens": 1}}]
    assert not any("token_ids" in one or "prompt_token_ids" in one for one in [*seen.choices, *seen.events])


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_a_client_that_asked_for_ids_has_all_of_them(api: Api) -> None:
    """The prompt's once, the answer's in order, whoever generated them."""
    engine = Engine(["a", "b", "c"], ids=True, running=True)
    seen, _ = relayed(request(api, return_token_ids=True), engine, [2])
    assert [number for one in seen.choices for number in one.get("token_ids") or []] == [0, 1, 2]
    told = [one["prompt_token_ids"] for one in [*seen.choices, *seen.events] if "prompt_token_ids" in one]
    assert told == [PROMPT_IDS]


def test_usage_is_not_told_to_a_client_that_did_not_ask() -> None:
    """Neither at the end nor in between."""
    engine = Engine(["a", "b", "c"], ids=True, running=True)
    seen, _ = relayed(request("chat", stream_options=None), engine, [2])
    assert not seen.usages


def test_running_usage_counts_on_over_engines() -> None:
    """A client that asked for it in every event sees one count, and its own prompt."""
    engine = Engine(["a", "b", "c"], ids=True, running=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    seen, _ = relayed(request("completion", stream_options=options), engine, [2])
    assert [one["completion_tokens"] for one in seen.usages] == [1, 2, 3, 3]
    assert {one["prompt_tokens"] for one in seen.usages} == {3}


def started(**fields: Any) -> Answer:
    """An answer to a chat that is about to begin."""
    asked = request("chat", **fields)
    answer = Answer(asked, LONGEST, roomy())
    answer.begin(first(asked, PATHS["chat"], ids=True))
    return answer


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
    """One event of a chat."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return json.dumps({"id": "i", "choices": [choice], **more}).encode()


@pytest.mark.parametrize(
    ("data", "death"),
    [
        (b'{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}', "error"),
        (b'{"error":"gone"}', "error"),
        (chunk({"content": ""}, "abort"), "aborted"),
        (chunk({"content": ""}, "error"), "aborted"),
        (b'{"choices":[{"index":0,"delta":{},"finish_reason":[]}]}', "error"),
        (b'{"choices":[{"index":0,"delta":{},"finish_reason":{"a":1}}]}', "error"),
        (b"not JSON", "error"),
        (b"[1]", "error"),
        (b"[DONE]", "cut"),
    ],
)
def test_every_way_of_dying_is_seen(data: bytes, death: str) -> None:
    """Engines end a 200 with an error event and `[DONE]` (vLLM), with `abort`, or just say that they are done."""
    with pytest.raises(Lost) as lost:
        started().take(data)
    assert lost.value.death == death


def test_an_error_of_the_request_is_the_clients() -> None:
    """Another engine would say the same."""
    answer = started()
    error = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'
    assert json.loads(answer.take(error)[0].removeprefix(b"data: ")) == json.loads(error)
    assert answer.complete
    assert answer.close() == [b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    ("delta", "beyond"),
    [
        ({"reasoning": "hm"}, "reasoning"),
        ({"reasoning_content": "hm"}, "reasoning"),
        ({"tool_calls": [{"index": 0}]}, "tools"),
        ({"audio": {"data": ""}}, "extras"),
    ],
)
def test_more_than_text_is_noted_and_passed_on(delta: dict[str, Any], beyond: str) -> None:
    """The client gets it; the answer can no longer be continued."""
    answer = started()
    assert json.loads(answer.take(chunk(delta))[0].removeprefix(b"data: "))["choices"][0]["delta"] == delta
    assert answer.received.beyond == beyond
    assert not answer.received.empty


def test_a_continuation_that_reasons_is_not_joined_on() -> None:
    """A parser of reasoning may take the middle of an answer for its beginning."""
    answer = started()
    answer.take(chunk({"content": "so"}))
    answer.begin(continued(request("chat"), PATHS["chat"], answer.received))
    with pytest.raises(Lost) as lost:
        answer.take(chunk({"reasoning": "hm"}))
    assert lost.value.death == "unfit"


def test_the_role_alone_is_nothing_of_the_answer() -> None:
    """It is said at once (vLLM): the request may still start anew elsewhere, and the role is not said again."""
    answer = started()
    assert answer.take(chunk({"role": "assistant", "content": ""}))
    assert answer.sent
    assert answer.received.empty
    answer.begin(first(request("chat"), PATHS["chat"], ids=True))
    assert answer.take(chunk({"role": "assistant", "content": ""})) == []


@pytest.mark.parametrize(("prompt_tokens", "text"), [(4, "a\nb"), (5, "a\n\nb")])
def test_white_space_that_a_template_took_away_is_not_doubled(prompt_tokens: int, text: str) -> None:
    """Usage tells whether the open message kept its end: one token too few, and the line break is generated again."""
    asked = request("chat", stream_options={"include_usage": True})
    answer = Answer(asked, LONGEST, roomy())
    answer.begin(first(asked, PATHS["chat"], ids=True))
    pieces = answer.take(chunk({"content": "a"}, usage=usage(3, 1)))
    pieces += answer.take(chunk({"content": "\n"}, usage=usage(3, 2)))
    answer.begin(continued(asked, PATHS["chat"], answer.received))
    pieces += answer.take(chunk({"content": "\n"}, usage=usage(prompt_tokens, 1)))
    pieces += answer.take(chunk({"content": "b"}, "stop", usage=usage(prompt_tokens, 2)))
    seen = Seen([*pieces, *answer.close()])
    assert seen.text == text
    assert seen.usages[-1]["completion_tokens"] == len(text)


def test_an_engine_lost_after_the_last_token_leaves_the_answer_whole() -> None:
    """The reason and usage that it did not come to say are said for it."""
    asked = request("completion", max_tokens=2)
    engine = Engine(["a", "b", "c"], ids=True, running=True)
    answer = Answer(asked, LONGEST, roomy())
    answer.begin(sending := first(asked, PATHS["completion"], ids=True))
    pieces = [piece for data in engine.events(sending)[:2] for piece in answer.take(data)]
    seen = Seen([*pieces, *answer.close()])
    assert (seen.text, seen.reasons) == ("ab", ["length"])
    assert seen.usages == [usage(3, 2)]


def test_usage_that_nobody_told_is_not_made_up() -> None:
    """An engine that tells it at the end alone was lost just before: the text is whole, its cost unknown."""
    engine = Engine(["a", "b"], ids=False, running=False)
    seen, _ = relayed(request("completion"), engine, [2])
    assert (seen.text, seen.reasons, seen.usages) == ("ab", ["stop"], [])


def test_an_answer_beyond_the_bound_is_passed_on_but_not_kept() -> None:
    """Memory for one answer is bounded; the client still gets all of it."""
    asked = request("chat")
    answer = Answer(asked, 100, roomy())
    answer.begin(first(asked, PATHS["chat"], ids=True))
    pieces = [piece for _ in range(50) for piece in answer.take(chunk({"content": "x" * 10}))]
    assert len(pieces) == 50
    assert answer.too_long
    assert len(answer.received.text) <= 100


def test_answers_share_the_memory_of_their_relay() -> None:
    """When all together hold as much as they may, an answer is passed on and not kept; its end gives room back."""
    asked, room = request("chat"), roomy(250)
    one, other = Answer(asked, LONGEST, room), Answer(asked, LONGEST, room)
    for answer in (one, other):
        answer.begin(first(asked, PATHS["chat"], ids=True))
        assert len([piece for _ in range(20) for piece in answer.take(chunk({"content": "x" * 10}))]) == 20
    assert (one.too_long, other.too_long) == (False, True)
    assert len(other.received.text) == 50
    one.release()
    one.release()
    other.release()
    room.take(250)


def test_choices_are_passed_on_side_by_side() -> None:
    """An answer with several choices is whole when each has its reason."""
    answer = started(n=2)
    for index, reason in ((0, None), (1, "stop"), (0, "length")):
        choice = {"index": index, "delta": {"content": "x"}, "finish_reason": reason}
        assert answer.take(json.dumps({"id": "i", "choices": [choice]}).encode())
    assert answer.finished
    assert answer.take(DONE) == []
    assert answer.complete


EVENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "content", "usage", "index", "token_ids", "text", "error", "role", "finish_reason"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@given(events=st.lists(EVENTS, max_size=4), api=st.sampled_from(["chat", "completion"]))
def test_whatever_an_engine_sends_is_taken_or_its_end(events: list[Any], api: Api) -> None:
    """Events of the wrong shape are passed on, or count as the engine's death; nothing else is raised."""
    asked = request(api)
    answer = Answer(asked, LONGEST, roomy())
    answer.begin(first(asked, PATHS[api], ids=True))
    for event in events:
        try:
            answer.take(msgspec.json.encode(event))
        except Lost:
            return
    answer.close()
