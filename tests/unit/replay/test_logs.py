"""Request logs are read by the parser of live traffic, with what a log leaves open filled in as stated."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import TraceError
from extproc.replay.logs import LogSettings, openai_log
from extproc.replay.traces import load
from extproc.request.blocks import chain
from extproc.request.shapes import parse
from tests.unit.replay.sound import assert_sound

CHAT = "/v1/chat/completions"


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    """Body of a chat whose messages alternate between user and assistant."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)], **fields}


def log(folder: Path, *lines: object) -> Path:
    """Write one object a line."""
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def far_from_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose own time is not UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def test_a_line_may_be_a_body_or_hold_one(tmp_path: Path) -> None:
    """A body alone, under `body`, under `request`, and as a text of JSON are the same request."""
    body = chat("question " * 100)
    texts = (body, {"body": body}, {"request": body}, {"body": json.dumps(body), "url": CHAT})
    trace = openai_log(log(tmp_path, *texts))
    assert_sound(trace)
    blocks = {tuple(row.blocks) for row in trace.rows}
    assert blocks == {tuple(chain(parse(CHAT, {}, json.dumps(body).encode()).segments, b"", 256))}
    assert {len(one) for one in blocks} == {900 // 256}


def test_what_the_request_says_is_kept(tmp_path: Path) -> None:
    """Session, limit, number of answers and streaming come from the request, headers in any case."""
    body = chat("hi", stream=True, max_tokens=77, n=2)
    (row,) = openai_log(log(tmp_path, {"body": body, "headers": {"X-Session-Id": "s1"}, "output_tokens": 12})).rows
    assert (row.session, row.max_tokens, row.n, row.stream, row.output_tokens) == ("s1", 77, 2, True, 12)


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ({"body": chat("hi", max_tokens=9), "output_tokens": 5, "response": "four" * 3}, 5),
        ({"body": chat("hi", max_tokens=9), "response": "four" * 3}, 3),
        ({"body": chat("hi", max_tokens=9), "response": {"usage": {"completion_tokens": 8}}}, 8),
        ({"body": chat("hi", n=4), "response": {"usage": {"completion_tokens": 8}}}, 2),
        ({"body": chat("hi"), "response": {"choices": [{"message": {"content": "abcdefgh"}}]}}, 2),
        ({"body": {"prompt": "hi"}, "response": {"choices": [{"text": "abcdefgh"}]}}, 2),
        ({"body": chat("hi", max_tokens=9), "response": {"choices": []}}, 9),
        ({"body": chat("hi", max_tokens=9)}, 9),
        ({"body": chat("hi", max_tokens=9), "response": "hi"}, 1),
        ({"input": ["hi", "you"]}, 1),
        (chat("hi"), 33),
    ],
)
def test_the_length_of_an_answer_is_the_best_known(tmp_path: Path, line: object, tokens: int) -> None:
    """The row's own count goes before the response, that before the client's limit, that before the default."""
    (row,) = openai_log(log(tmp_path, line), settings=LogSettings(output_tokens=33)).rows
    assert row.output_tokens == tokens


@pytest.mark.usefixtures("far_from_greenwich")
@pytest.mark.parametrize(
    ("early", "late"),
    [
        ({"at_s": 3.0}, {"at_s": 5.5}),
        ({"timestamp": 1760428436}, {"timestamp": 1760428438.5}),
        ({"timestamp": 1760428436000}, {"timestamp": 1760428438500}),
        ({"timestamp": 1760428436000000}, {"timestamp": 1760428438500000}),
        ({"timestamp": 1760428436000000000}, {"timestamp": 1760428438500000000}),
        ({"timestamp": "2026-03-01T10:00:00Z"}, {"timestamp": "2026-03-01T11:00:02.5+01:00"}),
        ({"timestamp": "2026-03-01T10:00:00"}, {"timestamp": "2026-03-01T10:00:02.500000Z"}),
    ],
)
def test_times_of_every_kind_are_read(tmp_path: Path, early: dict[str, Any], late: dict[str, Any]) -> None:
    """Seconds from the start, Unix time in any unit and ISO 8601 (UTC without a zone) give arrivals from 0 in order."""
    lines = [{**late, "body": chat("s")}, {**early, "body": chat("first of both")}]
    rows = openai_log(log(tmp_path, *lines)).rows
    assert [row.at_s for row in rows] == pytest.approx([0.0, 2.5], abs=1e-5)
    assert rows[0].prompt_tokens > rows[1].prompt_tokens


def test_without_times_arrivals_are_a_poisson_process_of_the_stated_rate(tmp_path: Path) -> None:
    """The seed decides the arrivals; the order of the file is kept."""
    path = log(tmp_path, *(chat("x" * n) for n in range(1, 401)))
    trace = openai_log(path, seed=1, settings=LogSettings(rate=20.0))
    assert_sound(trace)
    assert trace == openai_log(path, seed=1, settings=LogSettings(rate=20.0))
    assert trace != openai_log(path, seed=2, settings=LogSettings(rate=20.0))
    assert 400 / 20 * 0.8 < trace.rows[-1].at_s < 400 / 20 * 1.2
    lengths = [row.prompt_tokens for row in trace.rows]
    assert lengths == sorted(lengths)


def test_a_known_answer_is_part_of_the_next_prompt(tmp_path: Path) -> None:
    """The answer's blocks are those that the follow-up's prompt begins with."""
    question, answer = "question " * 100, "answer " * 200
    lines = [
        {"at_s": 0.0, "body": chat(question), "response": answer},
        {"at_s": 9.0, "body": chat(question, answer, "go on")},
    ]
    first, second = openai_log(log(tmp_path, *lines)).rows
    assert len(first.answer_blocks) > 3
    begin = [*first.blocks, *first.answer_blocks]
    assert list(second.blocks[: len(begin)]) == begin


def test_a_turn_waits_for_the_answer_of_the_turn_it_follows(tmp_path: Path) -> None:
    """A conversation in the log is closed-loop: what passed after the answer is think time, within bounds."""
    lines = [
        {"at_s": 0.0, "body": chat("a"), "output_tokens": 100},
        {"at_s": 2.0, "body": chat("unrelated")},
        {"at_s": 5.0, "body": chat("a", "said", "b"), "output_tokens": 1},
        {"at_s": 900.0, "body": chat("a", "said", "b", "more", "c")},
    ]
    rows = openai_log(log(tmp_path, *lines), settings=LogSettings(token_s=0.01, think_s=(0.1, 20.0))).rows
    assert [(row.after, row.at_s) for row in rows] == [(-1, 0.0), (-1, 2.0), (0, 4.0), (2, 20.0)]


def test_a_response_waits_for_the_one_it_continues(tmp_path: Path) -> None:
    """The id of a logged response leads from a request to the one it goes on from."""
    lines = [
        {"at_s": 0.0, "body": {"input": "hi", "instructions": "be brief"}, "response": {"id": "resp_1"}},
        {"at_s": 1.0, "body": {"input": "else", "max_output_tokens": 50}, "response": {"id": "resp_2"}},
        {"at_s": 9.0, "body": {"input": "and?", "previous_response_id": "resp_1"}},
    ]
    rows = openai_log(log(tmp_path, *lines)).rows
    assert [row.after for row in rows] == [-1, -1, 0]
    assert [row.max_tokens for row in rows] == [None, 50, None]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (chat("hi"), CHAT),
        ({"prompt": "hi"}, "/v1/completions"),
        ({"input": "hi"}, "/v1/embeddings"),
        ({"input": [{"role": "user", "content": "hi"}]}, "/v1/responses"),
        (chat("hi", system="be brief"), "/v1/messages"),
    ],
)
def test_a_body_without_a_path_is_read_as_the_api_it_looks_like(
    tmp_path: Path, body: dict[str, Any], path: str
) -> None:
    """The fields of a body tell its API; naming the path gives the same row."""
    bare, named = openai_log(log(tmp_path, {"at_s": 0, "body": body}, {"at_s": 0, "body": body, "path": path})).rows
    assert bare == named


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ({"body": {"model": "m"}}, "no prompt can be read"),
        ({"body": chat("x"), "path": "/v2/other"}, "no known API"),
        ({"messages": "hello"}, "no prompt can be read"),
        ({"body": [1]}, "a field is not what"),
        ({"body": chat("x"), "timestamp": "noon"}, "its time cannot be read"),
        ({"body": chat("x"), "timestamp": 10**400}, r"\$.timestamp|not JSON"),
        ({"body": chat("x", n=1025)}, "1025 answers"),
        ({"body": chat("x"), "output_tokens": 10**400}, r"\$.output_tokens|not JSON"),
        ({"body": chat("x"), "output_tokens": "many"}, r"\$.output_tokens"),
        ({"body": chat("x"), "at_s": 3.0}, "the time is at_s and in the first line it is missing"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, found: str) -> None:
    """The error names file, line, what was found and what to write."""
    with pytest.raises(TraceError, match=f"log.jsonl, line 2: .*{found}.*; .*write"):
        load(log(tmp_path, chat("good"), line))
