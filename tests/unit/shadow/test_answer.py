"""Answers out of the bytes that engines send, wherever those are cut, packed, wrong or too long."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.model import RouteKind
from extproc.shadow.answer import COMPARABLE, Answer, Collector, ToolCall, unreached
from tests.unit.shadow.parts import JSON, SSE, chat, read, sse, typed

KINDS = sorted(COMPARABLE)
WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=8)
FIELDS = ("choices", "delta", "message", "content", "type", "usage", "output", "index", "error", "tool_calls", "text")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["stop", "text", "response.completed"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=14,
)
CUTS = st.lists(st.integers(0, 4000), max_size=10)


def streamed(kind: RouteKind, words: list[str]) -> bytes:
    """A stream that says these words, as vLLM writes one of this API."""
    match kind:
        case RouteKind.CHAT:
            said = [chat({"role": "assistant", "content": ""}), *(chat({"content": word}) for word in words)]
            return sse([*said, chat({}, "stop"), {"choices": [], "usage": {"completion_tokens": len(words)}}])
        case RouteKind.COMPLETION:
            said = [{"choices": [{"index": 0, "text": word, "finish_reason": None}]} for word in words]
            said.append({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
            return sse([*said, {"choices": [], "usage": {"completion_tokens": len(words)}}])
        case RouteKind.RESPONSES:
            whole = {"status": "completed", "output": [], "usage": {"output_tokens": len(words)}}
            said = [{"type": "response.output_text.delta", "output_index": 0, "delta": word} for word in words]
            return typed(
                [{"type": "response.created", "response": {}}, *said, {"type": "response.completed", "response": whole}]
            )
    said = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in words
    ]
    end = {"type": "message_delta", "delta": {"stop_reason": "stop"}, "usage": {"output_tokens": len(words)}}
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    return typed([{"type": "message_start", "message": {}}, start, *said, end, {"type": "message_stop"}])


@given(kind=st.sampled_from(KINDS), words=WORDS, cuts=CUTS, packed=st.booleans())
def test_a_stream_is_read_the_same_wherever_it_is_cut(
    kind: RouteKind, words: list[str], cuts: list[int], packed: bool
) -> None:
    """Cuts fall anywhere, within a character of several bytes or a packed block: text, tokens and end are the same."""
    body = streamed(kind, words)
    headers = {**SSE, "content-encoding": "gzip"} if packed else SSE
    found = read(kind, gzip.compress(body, mtime=0) if packed else body, headers, cuts)
    assert (found.text, found.tokens, found.finish, found.flaw) == ("".join(words), len(words), "stop", "")
    assert found.events == len(words)


@given(kind=st.sampled_from(KINDS), words=WORDS, at=st.integers(0, 4000))
def test_what_came_of_a_stream_that_was_cut_is_its_beginning(kind: RouteKind, words: list[str], at: int) -> None:
    """A stream that ends too early is told as such, and its text is how the whole one begins."""
    body = streamed(kind, words)
    found = read(kind, body[: min(at, len(body) - 2)], SSE, complete=False)
    assert "".join(words).startswith(found.text)
    assert found.complete == (found.flaw == "")
    assert found.flaw in ("", "cut")
    if found.flaw == "":
        assert found.text == "".join(words)


@given(
    kind=st.sampled_from(KINDS),
    body=st.binary(max_size=300) | VALUES.map(lambda value: json.dumps(value).encode()),
    headers=st.sampled_from([SSE, JSON, {}, {**JSON, "content-encoding": "gzip"}, {**SSE, "content-encoding": "br"}]),
)
def test_any_bytes_give_an_answer(kind: RouteKind, body: bytes, headers: dict[str, str]) -> None:
    """Whatever an engine sends, an answer or a flaw comes of it, and nothing is raised."""
    as_event = b"data: " + body + b"\n\n" if headers == SSE else body
    assert isinstance(read(kind, as_event, headers), Answer)


PAGES = Path(__file__).parent / "pages"
"""What vLLM 0.32 on a CPU answered at temperature 0 with a limit of 12 tokens, one model, each API in both forms."""
SAID = dict.fromkeys(KINDS, " ha containing" + " ha" * 10) | {RouteKind.COMPLETION: " R" * 11 + " tuple"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_real_engine_sent_is_read_the_same_in_both_forms(kind: RouteKind) -> None:
    """Golden: the text, the end and the tokens that vLLM tells, of a stream and of an answer in one piece."""
    stream = read(kind, (PAGES / f"vllm_0.32_{kind}.sse").read_bytes(), SSE, range(0, 6000, 97))
    whole = read(kind, (PAGES / f"vllm_0.32_{kind}.json").read_bytes(), JSON, [100])
    end = "max_tokens" if kind == RouteKind.MESSAGES else "length"
    for found in (stream, whole):
        assert (found.text, found.tokens, found.finish, found.flaw) == (SAID[kind], 12, end, "")
        assert (found.tools, found.reasoning, found.choices) == ((), 0, 1)
    # It sends several tokens in one event when the next one is there already, as here twice.
    assert stream.events == (10 if kind == RouteKind.RESPONSES else 12)


def test_times_are_those_of_what_was_generated() -> None:
    """The role comes with the headers, and the end after the last token: neither is a token."""
    collector = Collector(RouteKind.CHAT, streamed=True, asked=10.0)
    collector.began(200, SSE, 10.1)
    for at, delta in ((10.2, {"role": "assistant"}), (10.5, {"content": "a"}), (10.9, {"content": "b"})):
        collector.chunk(sse([chat(delta)], done=False), at)
    collector.chunk(sse([chat({}, "stop")]), 11.5)
    collector.over(12.0, complete=True)
    found = collector.answer()
    assert [found.ttft_s, found.last_s, found.duration_s, found.tpot_s] == pytest.approx([0.5, 0.9, 2.0, 0.4])
    assert (found.tokens, found.events) == (None, 2)


def test_reasoning_counts_as_generated() -> None:
    """The first token of a model that thinks is a thought; both names of the field are read (vLLM new and old)."""
    body = sse([chat({"reasoning": "hm"}), chat({"reasoning_content": "so"}), chat({"content": "yes"}, "stop")])
    found = read(RouteKind.CHAT, body, SSE)
    assert (found.text, found.reasoning, found.events) == ("yes", 4, 3)


def whole_chat(**message: Any) -> bytes:
    """A chat in one piece."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": 7}}).encode()


WHOLE: dict[RouteKind, dict[str, Any]] = {
    RouteKind.COMPLETION: {
        "choices": [{"index": 0, "text": "hi there", "finish_reason": "length"}],
        "usage": {"completion_tokens": 7},
    },
    RouteKind.RESPONSES: {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "content": [{"type": "output_text", "text": "hi there"}]},
        ],
        "usage": {"output_tokens": 7},
    },
    RouteKind.MESSAGES: {
        "type": "message",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi there"}],
        "stop_reason": "length",
        "usage": {"output_tokens": 7},
    },
}


@pytest.mark.parametrize("kind", WHOLE)
def test_an_answer_in_one_piece_is_read(kind: RouteKind) -> None:
    """Text, end and tokens stand where each API has them; there is no time of a first token."""
    found = read(kind, json.dumps(WHOLE[kind]).encode(), JSON, [5])
    assert (found.text, found.finish, found.tokens, found.flaw) == ("hi there", "length", 7, "")
    assert (found.ttft_s, found.tpot_s, found.duration_s) == (None, None, 3.5)


def test_a_chat_in_one_piece_is_read() -> None:
    """The same of a chat; content that is null is no text."""
    found = read(RouteKind.CHAT, whole_chat(content="hi"), JSON)
    assert (found.text, found.tokens, found.flaw) == ("hi", 7, "")
    assert read(RouteKind.CHAT, whole_chat(content=None), JSON).text == ""


CALL = {"name": "f", "arguments": '{"b": 1, "a": [2]}'}
CALLED = (ToolCall("f", '{"a":[2],"b":1}'),)


@pytest.mark.parametrize(
    ("kind", "body", "headers"),
    [
        (RouteKind.CHAT, whole_chat(content=None, tool_calls=[{"id": "x", "function": CALL}]), JSON),
        (
            RouteKind.CHAT,
            sse(
                [
                    chat({"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": '{"b": 1,'}}]}),
                    chat({"tool_calls": [{"index": 0, "function": {"arguments": ' "a": [2]}'}}]}, "tool_calls"),
                ]
            ),
            SSE,
        ),
        (
            RouteKind.RESPONSES,
            json.dumps({"status": "completed", "output": [{"type": "function_call", **CALL}]}).encode(),
            JSON,
        ),
        (
            RouteKind.RESPONSES,
            typed(
                [
                    {
                        "type": "response.output_item.added",
                        "output_index": 1,
                        "item": {"type": "function_call", **CALL},
                    },
                    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '{"b":1,'},
                    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '"a":[2]}'},
                    {"type": "response.completed", "response": {"status": "completed"}},
                ]
            ),
            SSE,
        ),
        (
            RouteKind.MESSAGES,
            json.dumps(
                {"content": [{"type": "tool_use", "name": "f", "input": {"b": 1, "a": [2]}}], "stop_reason": "tool_use"}
            ).encode(),
            JSON,
        ),
        (
            RouteKind.MESSAGES,
            typed(
                [
                    {
                        "type": "content_block_start",
                        "index": 0,
                        "content_block": {"type": "tool_use", "name": "f", "input": {}},
                    },
                    {"type": "content_block_delta", "index": 0, "delta": {"partial_json": '{"b":1,"a":'}},
                    {"type": "content_block_delta", "index": 0, "delta": {"partial_json": "[2]}"}},
                    {"type": "message_stop"},
                ]
            ),
            SSE,
        ),
    ],
)
def test_tool_calls_are_read_as_what_they_mean(kind: RouteKind, body: bytes, headers: dict[str, str]) -> None:
    """Names and arguments are put together; white space and the order of keys make no difference."""
    found = read(kind, body, headers)
    assert (found.tools, found.flaw) == (CALLED, "")


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    """A model may call a tool with anything."""
    calls = [{"function": {"name": "f", "arguments": "{oops"}}, {"function": {"name": "g", "arguments": "1"}}]
    found = read(RouteKind.CHAT, whole_chat(tool_calls=calls), JSON)
    assert found.tools == (ToolCall("f", "{oops"), ToolCall("g", "1"))


@pytest.mark.parametrize(
    ("kind", "body", "flaw"),
    [
        (RouteKind.CHAT, sse([chat({"content": "a"}), {"error": {"code": 500}}]), "failed"),
        (RouteKind.CHAT, sse([chat({"content": "a"}), chat({}, "abort")]), "aborted"),
        (RouteKind.CHAT, sse([chat({"content": "a"})], done=False), "cut"),
        (RouteKind.CHAT, b"data: {oops\n\n", "unreadable"),
        (RouteKind.RESPONSES, typed([{"type": "response.failed", "response": {}}]), "failed"),
        (RouteKind.RESPONSES, typed([{"type": "response.output_text.delta", "delta": "a"}]), "cut"),
        (RouteKind.MESSAGES, typed([{"type": "error", "error": {}}]), "failed"),
        (RouteKind.MESSAGES, sse([{"error": {"message": "m"}}]), "failed"),
    ],
)
def test_a_stream_that_failed_is_told_by_how(kind: RouteKind, body: bytes, flaw: str) -> None:
    """The status was sent long before: only the stream itself tells that the engine gave up."""
    assert read(kind, body, SSE).flaw == flaw


@pytest.mark.parametrize(
    ("body", "complete", "flaw"),
    [(b'{"choices": [', False, "cut"), (b'{"choices": [', True, "unreadable"), (b"[]", True, "unreadable")],
)
def test_an_answer_in_one_piece_that_cannot_be_read_was_cut_or_is_none(body: bytes, complete: bool, flaw: str) -> None:
    """Half a JSON object is a cut answer if the connection broke, and else no answer of this API."""
    assert read(RouteKind.CHAT, body, JSON, complete=complete).flaw == flaw


def test_a_status_is_the_whole_answer() -> None:
    """An error's body is not read: it may quote the prompt."""
    collector = Collector(RouteKind.CHAT, streamed=True, asked=0.0)
    collector.began(429, JSON, 1.0)
    collector.chunk(b'{"error": "prompt"}', 1.5)
    collector.over(2.0, complete=True)
    assert collector.answer() == Answer(status=429, flaw="status", duration_s=2.0)


def test_an_engine_that_was_not_reached_gave_no_answer() -> None:
    """The same whether no headers came, or nobody was asked."""
    collector = Collector(RouteKind.CHAT, streamed=True, asked=1.0)
    collector.over(3.0, complete=False)
    assert collector.answer() == unreached(2.0) == Answer(status=0, flaw="unreached", duration_s=2.0)


def test_what_is_behind_the_end_is_no_part_of_an_answer() -> None:
    """TensorRT-LLM sends its metrics behind `[DONE]`."""
    body = sse([chat({"content": "a"}, "stop")]) + b'event: trtllm.perf_metrics\ndata: {"choices": 3}\n\ndata: oops\n\n'
    found = read(RouteKind.CHAT, body, SSE)
    assert (found.text, found.flaw) == ("a", "")


def test_only_the_first_of_several_choices_is_read_and_all_are_counted() -> None:
    """Requests for several answers are not compared: that they were several must be known."""
    body = sse([chat({"content": "a"}), chat({"content": "b"}, "stop", 1), chat({"content": "c"}, "stop")])
    found = read(RouteKind.CHAT, body, SSE)
    assert (found.text, found.choices) == ("ac", 2)


def test_token_ids_are_counted_until_usage_tells() -> None:
    """Engines tell ids where they are asked to (vLLM: `return_token_ids`); usage goes before them."""
    first = {"choices": [{"index": 0, "delta": {"content": "ab"}, "token_ids": [5, 6]}]}
    second = {"choices": [{"index": 0, "delta": {"content": "c"}, "token_ids": [7], "finish_reason": "stop"}]}
    assert read(RouteKind.CHAT, sse([first, second]), SSE).tokens == 3
    told = {"choices": [], "usage": {"completion_tokens": 9}}
    assert read(RouteKind.CHAT, sse([first, told, second]), SSE).tokens == 9


@pytest.mark.parametrize("told", [-1, True, "7", 1e9, 1 << 40, None])
def test_usage_that_is_no_number_of_tokens_is_not_known(told: object) -> None:
    """A count comes from outside, and is taken only as one."""
    assert read(RouteKind.CHAT, sse([chat({}, "stop"), {"usage": {"completion_tokens": told}}]), SSE).tokens is None


def test_a_refusal_that_is_marked_as_one_is_known() -> None:
    """OpenAI's field `refusal`, and the ends that filters and Anthropic's API have for it."""
    assert read(RouteKind.CHAT, whole_chat(refusal="No."), JSON).refused
    assert read(RouteKind.CHAT, sse([chat({"content": "a"}, "content_filter")]), SSE).refused
    assert not read(RouteKind.CHAT, sse([chat({"content": "a"}, "stop")]), SSE).refused


def test_an_answer_that_is_too_long_is_given_up() -> None:
    """What is kept has a bound, as sent and as unpacked: a megabyte of blanks packs into a kilobyte."""
    body = sse([chat({"content": "a" * 5000}, "stop")])
    for sent, headers in ((body, SSE), (gzip.compress(body), {**SSE, "content-encoding": "gzip"})):
        collector = Collector(RouteKind.CHAT, streamed=True, asked=0.0, longest=4000)
        collector.began(200, headers, 0.0)
        for start in range(0, len(sent), 1000):
            collector.chunk(sent[start : start + 1000], 1.0)
        collector.over(1.0, complete=True)
        found = collector.answer()
        assert (found.flaw, found.text) == ("too_long", "")


def test_what_is_too_long_is_not_held() -> None:
    """The bytes of an answer that is given up anyway must not stay until it is over."""
    collector = Collector(RouteKind.CHAT, streamed=True, asked=0.0, longest=10)
    collector.began(200, SSE, 0.0)
    for _ in range(5):
        collector.chunk(b"12345", 1.0)
    assert collector.size == 25
    assert collector._pieces == []


@pytest.mark.parametrize(
    "pack", [gzip.compress, zlib.compress, lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:])]
)
def test_packed_answers_are_unpacked(pack: Any) -> None:
    """Bodies come as gzip and zlib, and as gzip of several members, which is one body by RFC 1952."""
    encoding = "deflate" if pack is zlib.compress else "gzip"
    found = read(RouteKind.CHAT, pack(whole_chat(content="hi")), {**JSON, "content-encoding": encoding}, [3, 40])
    assert (found.text, found.flaw) == ("hi", "")


@pytest.mark.parametrize("encoding", ["br", "gzip, br", "gzip"])
def test_what_cannot_be_unpacked_is_unreadable(encoding: str) -> None:
    """Another encoding, or bytes that are not what their header says."""
    found = read(RouteKind.CHAT, whole_chat(content="hi"), {**JSON, "content-encoding": encoding})
    assert found.flaw == "unreadable"


def test_reading_rests_for_others() -> None:
    """A thread that reads a long stream lets the event loop's thread in now and then."""
    rests: list[int] = []
    collector = Collector(RouteKind.CHAT, streamed=True, asked=0.0)
    collector.began(200, SSE, 0.0)
    collector.chunk(sse([chat({"content": "a"}) for _ in range(160)]), 1.0)
    collector.over(1.0, complete=True)
    assert len(collector.answer(lambda: rests.append(1)).text) == 160
    assert len(rests) == 10
