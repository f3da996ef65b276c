"""Bytes into a `Request`: every field, every flaw, and no input that breaks it."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.model import Request, RouteKind
from extproc.request.shapes import Flaw, parse, peek
from tests.unit.request.calls import CHAT, FIELDS, JSON, PATHS, RESPONSES, call

MESSAGES = [{"role": "user", "content": "hi"}]


@given(st.sampled_from(PATHS), st.binary(max_size=200))
def test_no_bytes_break_the_parser(path: str, body: bytes) -> None:
    """Arbitrary bytes give a request of the path's kind, with a flaw or segments but never both."""
    request = parse(path, {}, body)
    assert request.kind is not RouteKind.OTHER
    assert (request.flaw == "") == bool(request.segments)


@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8), st.text(max_size=8))
def test_no_json_breaks_the_parser(path: str, body: dict[str, Any], header: str) -> None:
    """Fields of any type, half surrogate pairs and NaN give a request whose values are within their ranges."""
    headers = {"x-warmpath-priority": header, "x-session-id": header}
    request = parse(path, headers, json.dumps(body).encode())
    assert request.flaw in {"", *Flaw}
    assert (request.flaw == "") == bool(request.segments)
    assert 1 <= request.n < 2**31
    assert request.max_tokens is None or 0 <= request.max_tokens < 2**31
    assert abs(request.priority) < 2**31


@given(st.text(), st.binary(max_size=50))
def test_no_path_breaks_the_parser(path: str, body: bytes) -> None:
    """Any path gives a kind."""
    assert isinstance(parse(path, {}, body).kind, RouteKind)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (CHAT, RouteKind.CHAT),
        ("/v1/completions", RouteKind.COMPLETION),
        ("/v1/embeddings", RouteKind.EMBEDDING),
        ("/v1/chat/completions/", RouteKind.CHAT),
        ("/v1/chat/completions?api-version=1&x=/v1/embeddings", RouteKind.CHAT),
        ("/v1/completions/?a", RouteKind.COMPLETION),
        ("/team/llm/v1/embeddings", RouteKind.EMBEDDING),
        ("/v1/responses", RouteKind.RESPONSES),
        ("/v1/messages", RouteKind.MESSAGES),
        ("/v1/chat/completions/batch", RouteKind.CHAT),
        ("/rerank", RouteKind.RERANK),
        ("/v1/rerank", RouteKind.RERANK),
        ("/v2/rerank?x=1", RouteKind.RERANK),
        ("/team/v2/rerank/", RouteKind.RERANK),
        ("/score", RouteKind.SCORE),
        ("/v1/score", RouteKind.SCORE),
        ("/team/score", RouteKind.OTHER),
        ("/v2/score", RouteKind.OTHER),
        ("/v1/messages/count_tokens", RouteKind.OTHER),
        ("/v1/responses/resp_1/cancel", RouteKind.OTHER),
        ("/v1/chat/completions/render", RouteKind.OTHER),
        ("/v1/chat", RouteKind.OTHER),
        ("/v2/chat/completions", RouteKind.OTHER),
        ("/chat/completions", RouteKind.OTHER),
        ("/x?/v1/embeddings", RouteKind.OTHER),
        ("/v1/models", RouteKind.OTHER),
        ("/", RouteKind.OTHER),
        ("", RouteKind.OTHER),
    ],
)
def test_the_path_names_the_api(path: str, kind: RouteKind) -> None:
    """A query, a slash at the end and a prefix make no difference; every other path is picked by load."""
    assert parse(path, {}, b"{}").kind is kind


def test_the_body_of_another_path_is_not_read() -> None:
    """Only headers say anything about a call of no known API."""
    headers = {"x-session-id": "s", "x-warmpath-tenant": "t", "x-warmpath-priority": "3"}
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    assert parse("/v1/models", headers, body) == Request(session="s", tenant="t", priority=3)


def test_every_field_is_read() -> None:
    """A complete chat body arrives in full."""
    request = call(
        CHAT,
        {"x-warmpath-tenant": "acme"},
        model="m",
        messages=MESSAGES,
        stream=True,
        n=3,
        max_tokens=7,
        max_completion_tokens=9,
        priority=-2,
        cache_salt="salt",
        session_id="s",
    )
    assert request == Request(
        kind=RouteKind.CHAT,
        model="m",
        tenant="acme",
        session="s",
        priority=-2,
        stream=True,
        max_tokens=9,
        n=3,
        segments=(b"\xffuser\xfethi",),
        salt=b"m\0\0\0\1ms\0\0\0\4salt",
        turn=bytes.fromhex("fa95e4e62470a6cb5878bc29ba74fd98"),
    )


@pytest.mark.parametrize(
    ("body", "flaw"),
    [
        (b"", Flaw.EMPTY),
        (b" ", Flaw.NOT_JSON),
        (b"{", Flaw.NOT_JSON),
        (b'{"messages":[]} x', Flaw.NOT_JSON),
        (b'{"n":NaN}', Flaw.NO_PROMPT),
        (b'{"n":1e999}', Flaw.NO_PROMPT),
        (b'{"n":' + b"1" * 5000 + b"}", Flaw.NOT_JSON),
        (b'{"model":"\xff"}', Flaw.NOT_JSON),
        (b"[" * 100_000, Flaw.TOO_DEEP),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", Flaw.TOO_DEEP),
        (b"[]", Flaw.NOT_OBJECT),
        (b'"hi"', Flaw.NOT_OBJECT),
        (b"null", Flaw.NOT_OBJECT),
        (b"{}", Flaw.NO_PROMPT),
        (b'{"messages":[]}', Flaw.NO_PROMPT),
        (b'{"messages":null}', Flaw.NO_PROMPT),
        (b'{"messages":"hi"}', Flaw.BAD_PROMPT),
        (b'{"messages":[{"content":"hi"}]}', Flaw.BAD_PROMPT),
        (b" " * (1 << 20) + b"\xff", Flaw.NOT_JSON),
    ],
)
def test_a_body_that_cannot_be_read_says_why(body: bytes, flaw: Flaw) -> None:
    """Each way to be unreadable has its own word, and the headers still count."""
    request = parse(CHAT, {"x-session-id": "s"}, body)
    assert (request.kind, request.flaw, request.segments, request.session) == (RouteKind.CHAT, flaw, (), "s")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_hides_nothing(number: str) -> None:
    """Engines that read JSON with Python take such a body (vLLM 0.32), so its model and its limits must be known."""
    body = b'{"model":"m","n":4,"max_tokens":9,"messages":[{"role":"user","content":"hi"}],"x":%s}' % number.encode()
    plain = call(model="m", n=4, max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    assert parse(CHAT, {}, body) == plain


def test_every_depth_is_read_or_called_too_deep() -> None:
    """Also a body just shallow enough to be decoded and just too deep for what comes after."""
    flaws = []
    for depth in range(sys.getrecursionlimit()):
        tools = b"[" * depth + b"]" * depth
        body = b'{"messages":[{"role":"user","content":"hi"}],"tools":[{"x":' + (tools or b"0") + b"}]}"
        flaws.append(parse(CHAT, {}, body).flaw)
    assert flaws == sorted(flaws)
    assert set(flaws) == {"", Flaw.TOO_DEEP}


def test_a_bad_prompt_leaves_the_rest_readable() -> None:
    """Model, stream and session survive messages of the wrong type."""
    request = call(model="m", stream=True, session_id="s", messages=7)
    assert (request.model, request.stream, request.session) == ("m", True, "s")
    assert request.flaw == Flaw.BAD_PROMPT


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_what_engines_decode_is_decoded(encoding: str) -> None:
    """A byte order mark and the other encodings of JSON are read as the engine reads them."""
    body = json.dumps({"model": "m", "messages": MESSAGES})
    assert parse(CHAT, {}, body.encode(encoding)) == parse(CHAT, {}, body.encode())


def test_the_lenient_reader_is_kept_from_large_bodies() -> None:
    """A body over 1 MiB gets the fast reader only, so that broken bodies cannot buy ten times their CPU."""
    body = json.dumps({"model": "m"}).encode("utf-8-sig")
    assert parse(CHAT, {}, body.ljust(1 << 20)).model == "m"
    assert parse(CHAT, {}, body.ljust((1 << 20) + 1)).flaw == Flaw.NOT_JSON


def test_half_a_surrogate_pair_is_read() -> None:
    """Clients that cut a text inside an emoji send one; the prompt counts and differs by it."""
    one, other = (call(messages=[{"role": "user", "content": text}]) for text in ("a\ud83d", "a\ud83e"))
    assert one.flaw == other.flaw == ""
    assert one.segments != other.segments


def test_half_a_surrogate_pair_does_not_change_its_neighbours() -> None:
    """Only the message that holds it changes, so earlier turns stay cached."""
    tools = [{"type": "function", "function": {"name": "é", "parameters": {"b": 1e16, "a": 2.5}}}]
    before = call(messages=MESSAGES, tools=tools)
    after = call(messages=[*MESSAGES, {"role": "user", "content": "\ud83d"}], tools=tools)
    assert after.segments[: len(before.segments)] == before.segments


def test_the_last_of_two_equal_keys_counts() -> None:
    """As in the engine's own JSON reader."""
    assert parse(CHAT, {}, b'{"model":"a","model":"b"}').model == "b"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(kind: Any) -> None:
    """The body may be any of the buffer types, also when the lenient reader has to look at it."""
    good, marked = b'{"model":"m"}', b'\xef\xbb\xbf{"model":"m"}'
    assert parse(CHAT, {}, kind(good)).model == parse(CHAT, {}, kind(marked)).model == "m"
    assert parse(CHAT, {}, kind(b"")).flaw == Flaw.EMPTY


@pytest.mark.parametrize("value", [True, -1, 0, 1.5, "2", None, [], 16_385, 2**31, 10**30])
def test_a_strange_n_counts_as_one(value: object) -> None:
    """Booleans, floats, texts and numbers that engines refuse fall back to one answer: no charge stands for them."""
    assert call(n=value).n == 1


@pytest.mark.parametrize("value", [True, -1, 1.5, "2", None, {}, 2**31])
def test_a_strange_limit_counts_as_none(value: object) -> None:
    """A limit that is no number of tokens is as if it had not been sent; the older name then counts."""
    assert call(max_tokens=value).max_tokens is None
    assert call(max_completion_tokens=value, max_tokens=5).max_tokens == 5


@pytest.mark.parametrize("value", [1, "true", None, [True]])
def test_only_true_asks_for_a_stream(value: object) -> None:
    """Nothing but the JSON value true is taken for a stream."""
    assert call(stream=value).stream is False


@pytest.mark.parametrize("value", [5, None, [], {"a": 1}])
def test_a_strange_name_counts_as_none(value: object) -> None:
    """A model or salt that is no text is as if it had not been sent."""
    request = call(model=value, cache_salt=value)
    assert (request.model, request.salt) == ("", b"")


@pytest.mark.parametrize(
    ("header", "priority"),
    [("5", 5), ("-3", -3), (" +2 ", 2), ("", 9), ("high", 9), ("1.5", 9), ("1_0", 9), ("٣", 9), ("9" * 5000, 9)],
)
def test_the_priority_header_goes_before_the_body(header: str, priority: int) -> None:
    """A header that is an integer wins; any other leaves the body's value."""
    assert call(CHAT, {"x-warmpath-priority": header}, priority=9).priority == priority


@pytest.mark.parametrize("value", [True, 1.5, "3", None, 2**31])
def test_a_strange_priority_counts_as_normal(value: object) -> None:
    """A priority that is no small integer is 0."""
    assert call(priority=value).priority == 0


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "prompt_token_ids"), ("/v1/completions", "prompt"), ("/v1/embeddings", "input")]
)
def test_token_ids_are_a_prompt(path: str, field: str) -> None:
    """Each API takes a prompt that is already tokenized."""
    assert call(path, **{field: [1, 2]}).prompt_bytes == 9


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
def test_batches_are_one_segment_a_prompt(path: str, field: str) -> None:
    """Lists of texts and lists of token id lists give a segment each; a list that is empty is malformed."""
    assert call(path, **{field: ["a", "b"]}).segments == (b"\xfda", b"\xfdb")
    assert len(call(path, **{field: [[1], [2, 3]]}).segments) == 2
    assert call(path, **{field: []}).flaw == Flaw.BAD_PROMPT


def test_a_conversation_can_be_embedded() -> None:
    """An embeddings call may send messages in place of an input."""
    assert call("/v1/embeddings", messages=MESSAGES).segments == call(messages=MESSAGES).segments


IRRELEVANT = ["temperature", "user", "metadata", "stream", "seed", "stop", "n", "logprobs", "store", "cache_control"]


@given(st.dictionaries(st.sampled_from(IRRELEVANT), JSON), st.randoms())
def test_what_is_not_in_the_prompt_does_not_change_it(others: dict[str, Any], order: Any) -> None:
    """Sampling and bookkeeping fields, in any order, leave segments, salt and turn alone."""
    fields = [*others.items(), ("messages", MESSAGES), ("model", "m")]
    order.shuffle(fields)
    request = parse(CHAT, {}, json.dumps(dict(fields), allow_nan=True).encode())
    plain = call(messages=MESSAGES, model="m")
    if request.flaw != Flaw.NOT_JSON:
        assert (request.segments, request.salt, request.turn) == (plain.segments, plain.salt, plain.turn)


@pytest.mark.parametrize(
    "field",
    [
        *("chat_template", "chat_template_kwargs", "reasoning_effort", "mm_processor_kwargs", "media_io_kwargs"),
        *("documents", "tools", "truncate_prompt_tokens"),
    ],
)
def test_what_is_rendered_around_the_messages_reaches_the_prompt(field: str) -> None:
    """Each such field of the body adds one segment in front of the messages' own."""
    plain = call(messages=MESSAGES).segments
    framed = call(messages=MESSAGES, **{field: [{"a": 1}]}).segments
    assert len(framed) == len(plain) + 1
    assert framed[1:] == plain


def test_the_key_order_of_the_body_does_not_change_its_bytes() -> None:
    """Tools have their place in the prompt wherever they stand in the body."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert call(messages=MESSAGES, tools=tools).segments == call(tools=tools, messages=MESSAGES).segments


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/responses/resp_abc", "resp_abc"),
        ("/v1/responses/resp%5Fabc", "resp_abc"),
        ("/team/v1/responses/resp%5fabc/cancel?x=/v1/responses/y", "resp_abc"),
        ("/v1/responses/a%2Fb/input_items", "a/b"),
        ("/v1/responses/a%zz%", "a%zz%"),
        ("/v1/responses/a+b%2541", "a+b%41"),
        ("/v1/responses/%20a%20", "a"),
    ],
)
def test_a_stored_response_is_named_by_the_path(path: str, name: str) -> None:
    """Every percent-encoding of one id names the same response; it is decoded once, behind the split at slashes."""
    assert parse(path, {}, b"").previous_response == peek(path, {}, b"").previous_response == name
    assert call(RESPONSES, input="hi", previous_response_id=name).previous_response == name
