"""Rows as real requests: any router and any engine sees the sharing that the rows have."""

import json
from typing import Any

import pytest

from extproc.replay.generate import generated
from extproc.replay.rows import Row, Trace
from extproc.replay.text import body, headers, messages
from extproc.request.blocks import chain
from extproc.request.shapes import parse
from extproc.sim.bodies import Message
from extproc.sim.tokens import answer, block_hashes, render_chat

MODEL = "m"


def common(left: Any, right: Any) -> int:
    """Leading items that two sequences share."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def routed(trace: Trace, index: int, answers: dict[int, str]) -> list[int]:
    """Blocks of 64 tokens as the router hashes the body."""
    request = parse("/v1/chat/completions", {}, body(trace, index, answers, MODEL))
    assert not request.flaw
    return chain(request.segments, request.salt, 256)


def engine(trace: Trace, index: int, answers: dict[int, str], size: int) -> list[int]:
    """Blocks as a simulated engine hashes the rendered chat."""
    said = [Message(one["role"], one["content"]) for one in messages(trace, index, answers)]
    return block_hashes(render_chat(said), size)


@pytest.mark.parametrize("size", [64, 512])
def test_bodies_share_exactly_the_blocks_that_the_rows_share(size: int) -> None:
    """For any two rows, router and engine find as many tokens in common as the rows' blocks say, not one block more."""
    rows = [
        Row(0.0, -1, 4 * size - 1, 1, (11, 12, 13)),
        Row(0.0, -1, 4 * size - 1, 1, (11, 12, 13)),
        Row(0.0, -1, 3 * size + 9, 1, (11, 12, 14)),
        Row(0.0, -1, 4 * size, 1, (11, 12, 13, 15)),
        Row(0.0, -1, size, 1, (21,)),
        Row(0.0, -1, size - 3, 1, ()),
    ]
    trace = Trace("t", size, rows)
    for left in range(len(rows)):
        for right in range(left):
            blocks = common(rows[left].blocks, rows[right].blocks)
            assert common(routed(trace, left, {}), routed(trace, right, {})) == blocks * size // 64
            # Framing in front of the first message is a few tokens that all chats share.
            assert common(engine(trace, left, {}, 64), engine(trace, right, {}, 64)) == blocks * size // 64


@pytest.mark.parametrize("name", ["shared_prefixes", "mixed_lengths"])
def test_a_prompt_has_the_tokens_of_its_row(name: str) -> None:
    """The one message of a first turn has exactly as many tokens of four bytes as the row."""
    trace = generated(name, 1, seconds=1.0)
    for index, row in enumerate(trace.rows):
        (message,) = messages(trace, index, {})
        assert len(message["content"].encode()) == 4 * row.prompt_tokens


def test_the_same_row_always_gives_the_same_body() -> None:
    """Text depends on nothing but the trace."""
    trace = generated("multi_turn", 1, seconds=2.0)
    assert [body(trace, n, {}, MODEL) for n in range(9)] == [body(trace, n, {}, MODEL) for n in range(9)]
    assert len({body(trace, n, {}, MODEL) for n in range(trace.requests)}) == trace.requests


def test_a_later_turn_sends_the_history_with_the_real_answers() -> None:
    """A conversation only grows, and an engine that said the answers finds all but the new question cached."""
    trace = generated("multi_turn", 1, seconds=3.0)
    answers: dict[int, str] = {}
    known: set[int] = set()
    for index, row in enumerate(trace.rows):
        sent = messages(trace, index, answers)
        prompt = render_chat([Message(one["role"], one["content"]) for one in sent])
        said = answer(prompt, row.output_tokens)
        if row.after >= 0:
            earlier = messages(trace, row.after, answers)
            assert sent[: len(earlier) + 1] == [*earlier, {"role": "assistant", "content": answers[row.after]}]
            assert len(sent) == len(earlier) + 2
            cached = 16 * common([block in known for block in block_hashes(prompt, 16)], [True] * len(prompt))
            before = trace.rows[row.after]
            assert before.prompt_tokens + before.output_tokens - 16 <= cached < row.prompt_tokens
        # Frames of messages are all that a chat has beyond its row.
        assert 0 < len(prompt) // 4 - row.prompt_tokens <= 9 * len(sent)
        answers[index] = said.decode()
        known.update(block_hashes(prompt + said, 16))


def test_an_answer_that_never_came_is_left_out() -> None:
    """The client goes on without it."""
    trace = generated("multi_turn", 1, seconds=3.0)
    index = next(n for n, row in enumerate(trace.rows) if row.after >= 0)
    assert [one["role"] for one in messages(trace, index, {})] == ["user", "user"]


def test_a_history_without_answers_is_sent_without_them() -> None:
    """Where a row's blocks leave the answer out, so does the body; where they leave the prompt, it starts afresh."""
    rows = [
        Row(0.0, -1, 130, 100, (1, 2), answer_blocks=(3,)),
        Row(0.0, 0, 200, 5, (1, 2, 4)),
        Row(0.0, 1, 290, 5, (1, 9, 4, 5)),
        Row(0.0, 2, 90, 5, (1,)),
    ]
    trace = Trace("t", 64, rows)
    first, second = messages(trace, 1, {0: "said"})
    assert [first] == messages(trace, 0, {})
    assert (second["role"], len(second["content"])) == ("user", 4 * 70)
    for index in (2, 3):
        (fresh,) = messages(trace, index, {0: "said", 1: "said", 2: "said"})
        assert len(fresh["content"]) == 4 * trace.rows[index].prompt_tokens


def test_a_body_asks_for_what_the_row_asks_for() -> None:
    """Length of the answer, streaming, number of answers and the session's header come from the row."""
    rows = [Row(0.0, -1, 5, 42, (), session="s1", n=3, stream=False), Row(0.0, -1, 5, 1, ())]
    trace = Trace("t", 64, rows)
    first, second = (json.loads(body(trace, n, {}, MODEL)) for n in range(2))
    assert (first["model"], first["max_tokens"], first["ignore_eos"]) == (MODEL, 42, True)
    assert (first["stream"], first["n"], second["stream"], second.get("n")) == (False, 3, True, None)
    assert [headers(row) for row in rows] == [{"x-session-id": "s1"}, {}]
