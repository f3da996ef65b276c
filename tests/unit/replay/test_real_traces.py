"""Public traces read as their publications and earlier measurements say; skipped where they are not at hand."""

from itertools import pairwise

import pytest

from extproc.replay.rows import Trace, leading
from extproc.replay.traces import load
from tests.traces import trace_path
from tests.unit.replay.sound import assert_sound


def found(trace: Trace, *, partial: bool) -> float:
    """Share of prompt blocks that an endless cache finds; `partial` counts a last block that is not full."""
    seen: set[int] = set()
    hits = total = 0
    for row in trace.rows:
        hits += leading(row.blocks, seen)
        total += -(-row.prompt_tokens // trace.block_tokens) if partial else len(row.blocks)
        seen.update(row.blocks)
    return hits / total


@pytest.mark.parametrize(
    ("name", "requests", "measured", "full", "tokens"),
    [
        ("mooncake/conversation_trace.jsonl", 12_031, 0.366, 0.382, 0.373),
        ("mooncake/synthetic_trace.jsonl", 3_993, 0.640, 0.659, 0.650),
        ("dynamo/mooncake_trace_1000.jsonl", 1_000, 0.380, 0.400, 0.390),
    ],
)
def test_mooncake_traces_share_what_was_measured(
    name: str, requests: int, measured: float, full: float, tokens: float
) -> None:
    """The measured shares count ids, partial tails included; rows know full blocks alone, hence 0.3 points."""
    trace = load(trace_path(name))
    assert_sound(trace)
    assert trace.requests == requests
    assert found(trace, partial=True) == pytest.approx(measured, abs=0.003)
    assert found(trace, partial=False) == pytest.approx(full, abs=0.001)
    assert trace.ideal_cached_share == pytest.approx(tokens, abs=0.001)


def test_mooncake_arrivals_are_spread_over_their_ticks() -> None:
    """No ten requests of the conversation trace arrive at one instant, and none left its tick."""
    arrivals = [row.at_s for row in load(trace_path("mooncake/conversation_trace.jsonl")).rows]
    assert len(set(arrivals)) == len(arrivals)
    assert max(later - earlier for earlier, later in pairwise(arrivals)) <= 3.01
    assert arrivals[-1] == pytest.approx(3539, abs=3)


def test_agent_sessions_share_what_was_measured() -> None:
    """402 turns of 20 sessions at once, 93.7 % of their blocks known to an endless cache."""
    trace = load(trace_path("miniswe"), seed=1)
    assert_sound(trace)
    assert trace.requests == 402
    assert found(trace, partial=False) == pytest.approx(0.937, abs=0.001)
    assert sum(row.after < 0 for row in trace.rows) == len({row.session for row in trace.rows}) == 20
    for row in trace.rows:
        if row.after >= 0:
            before = trace.rows[row.after].blocks
            assert list(row.blocks[: len(before)]) == list(before)


def test_one_agent_run_keeps_its_sessions_and_its_sharing() -> None:
    """17 requests of five sessions in blocks of 16 tokens; 72 % of the prompt tokens were sent before."""
    trace = load(trace_path("dynamo/pi_request_trace.jsonl.gz"))
    assert_sound(trace)
    assert (trace.requests, trace.block_tokens) == (17, 16)
    assert len({row.session for row in trace.rows}) == 5
    assert trace.ideal_cached_share == pytest.approx(0.717, abs=0.002)


def test_the_smoke_file_reads() -> None:
    """Sixteen rows on two ticks."""
    trace = load(trace_path("dynamo/mooncake_tiny.jsonl"))
    assert_sound(trace)
    assert trace.requests == 16


def test_published_arrivals_have_lengths_and_no_sharing() -> None:
    """8,819 requests within an hour whose prompts have nothing in common."""
    trace = load(trace_path("azure/AzureLLMInferenceTrace_code.csv"))
    assert_sound(trace)
    assert trace.requests == 8_819
    assert trace.ideal_cached_share == 0.0
    assert trace.rows[-1].at_s == pytest.approx(3436, abs=1)
