"""Agent sessions run at once, each turn behind the answer before it."""

import json
from pathlib import Path

import pytest

from extproc.errors import TraceError
from extproc.replay.agents import AgentSettings, dynamo, miniswe
from extproc.replay.arrivals import expected
from extproc.replay.traces import load
from tests.unit.replay.sound import assert_sound

BLOCK = 256


def turn(session: str, second: float, prompt: str, output: str) -> dict[str, object]:
    """Line of a recorded session."""
    return {"timestamp": int(second * 1e6), "input": prompt, "output": output, "session_id": session}


def recorded(folder: Path) -> Path:
    """Two sessions recorded one after another, in two files, with the lines of one out of order."""
    task = "t" * 1000
    first = [
        turn("a", 102.0, task + "tool one" * 50, "y" * 800),
        turn("a", 100.0, task, "x" * 400),
        turn("a", 500.0, task + "tool one" * 50 + "tool two" * 50, "z"),
    ]
    second = [turn("b", 900.0, task + "b", "q" * 40), turn("b", 900.01, task + "b!", "r" * 40)]
    for name, lines in (("one.jsonl", first), ("two.jsonl", second)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "LICENSE").write_text("not a trace")
    return folder


def test_sessions_are_interleaved_and_their_turns_wait(tmp_path: Path) -> None:
    """Sessions begin spread over the stated time; think times come from the recording, within their bounds."""
    settings = AgentSettings(spread_s=8.0, think_s=(0.5, 60.0), token_s=0.01)
    trace = miniswe(recorded(tmp_path), seed=1, settings=settings)
    assert_sound(trace)
    assert {row.at_s for row in trace.rows if row.after < 0} == {0.0, 4.0}
    think = {(row.session, row.prompt_tokens): row.at_s for row in trace.rows if row.after >= 0}
    assert think == {
        ("a", 350): pytest.approx(2.0 - 100 * 0.01),
        ("a", 450): 60.0,
        ("b", 250): 0.5,
    }
    sent = expected(trace.rows, 0.01)
    assert sent == sorted(sent)
    for row in trace.rows:
        if row.after >= 0:
            before = trace.rows[row.after]
            assert (row.session, row.follows) == (before.session, before.turn)
        else:
            assert row.follows == b""


def test_prompts_and_answers_are_hashed_as_the_text_they_are(tmp_path: Path) -> None:
    """A history that grows keeps its blocks; the answer's blocks chain on behind the prompt."""
    trace = miniswe(recorded(tmp_path))
    first, second, third = (row for row in trace.rows if row.session == "a")
    assert len(first.blocks) == 1000 // BLOCK
    assert list(second.blocks[: len(first.blocks)]) == list(first.blocks)
    assert list(third.blocks[: len(second.blocks)]) == list(second.blocks)
    assert len(first.answer_blocks) == 1400 // BLOCK - 1000 // BLOCK
    assert not set(first.answer_blocks) & set(second.blocks)
    other = next(row for row in trace.rows if row.session == "b")
    assert list(other.blocks) == list(first.blocks)


def test_the_seed_decides_which_session_begins_first(tmp_path: Path) -> None:
    """Equal seeds give equal traces; some seed lets the other session begin."""
    recorded(tmp_path)
    assert load(tmp_path, seed=3) == load(tmp_path, seed=3)
    assert {load(tmp_path, seed=seed).rows[0].session for seed in range(10)} == {"a", "b"}
    assert load(tmp_path / "two.jsonl").requests == 2


def test_a_broken_turn_is_named_with_its_file(tmp_path: Path) -> None:
    """In a folder the error names the file within it."""
    recorded(tmp_path)
    path = tmp_path / "two.jsonl"
    path.write_text(path.read_text() + json.dumps({**turn("b", 1, "private words", "x"), "timestamp": "noon"}) + "\n")
    with pytest.raises(TraceError, match=r"two\.jsonl, line 3: .*\$\.timestamp") as error:
        load(tmp_path)
    assert "private words" not in str(error.value)


def served(session: str, at_ms: float, took_ms: float, tokens: int, hashes: list[int]) -> dict[str, object]:
    """Line of a Dynamo request trace."""
    replay = {"trace_block_size": 16, "input_length": tokens, "input_sequence_hashes": hashes}
    request = {"request_received_ms": at_ms, "total_time_ms": took_ms, "output_tokens": 9, "replay": replay}
    context = {"session_id": session} if session else {}
    return {"event": {"event_type": "request_end", "request": request, "agent_context": context}}


def write(path: Path, *lines: object) -> Path:
    """Write one object a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_dynamo_requests_of_a_session_wait_for_one_another(tmp_path: Path) -> None:
    """Hashes are kept, the partial block is not; think time is what passed after the answer; others are events."""
    path = write(
        tmp_path / "d",
        {"event": {"event_type": "tool_start", "agent_context": {"session_id": "s"}}},
        served("s", 5000.0, 1000.0, 40, [11, 2**64 - 1, 13]),
        served("t", 5500.0, 1000.0, 8, []),
        served("s", 9000.0, 10.0, 48, [11, 2**64 - 1, 14]),
        served("", 9500.0, 10.0, 5, [1]),
    )
    trace = load(path)
    assert_sound(trace)
    assert trace.block_tokens == 16
    assert [(row.session, row.after, row.at_s) for row in trace.rows] == [
        ("s", -1, 0.0),
        ("t", -1, 0.5),
        ("s", 0, 3.0),
        ("", -1, 4.5),
    ]
    assert [list(row.blocks) for row in trace.rows] == [[11, 2**64 - 1], [], [11, 2**64 - 1, 14], []]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (served("s", 1.0, 1.0, 40, [1]), "do not fit 40 tokens"),
        (served("s", 1.0, 1.0, 16, [2**64]), "do not fit|a field"),
        ({"event": {"event_type": "request_end", "request": {}}}, r"\$.event.request"),
        ({"nothing": 1}, "event"),
    ],
)
def test_a_broken_dynamo_line_is_named(tmp_path: Path, line: object, found: str) -> None:
    """The error names file, line and what was found."""
    with pytest.raises(TraceError, match=f"line 2: .*{found}"):
        dynamo(write(tmp_path / "d", served("s", 0.0, 1.0, 16, [1]), line))


def test_one_trace_has_one_block_size(tmp_path: Path) -> None:
    """Hashes of different block sizes cannot be compared."""
    other = json.loads(
        json.dumps(served("s", 1.0, 1.0, 64, [1])).replace('"trace_block_size": 16', '"trace_block_size": 64')
    )
    with pytest.raises(TraceError, match="line 2: blocks of 64 and 16 tokens; split"):
        dynamo(write(tmp_path / "d", served("s", 0.0, 1.0, 16, [1]), other))
