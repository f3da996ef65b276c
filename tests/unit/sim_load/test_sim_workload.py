"""The workloads are reproducible, append-only and arrive at the rate that was asked for."""

import argparse
import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.server import add_arguments, settings_of
from extproc.sim.tokens import TOKEN_BYTES
from extproc.sim.workload import (
    DEMO_ENGINE,
    Conversation,
    Message,
    Turn,
    WorkloadSettings,
    engine_arguments,
    ideal_cached_share,
    messages,
    mixed,
    requests,
    steady,
)


@given(seed=st.integers(0, 2**32))
def test_equal_seeds_give_equal_workloads_and_others_differ(seed: int) -> None:
    """A workload is a function of its settings and its seed."""
    small = WorkloadSettings(seconds=2.0, documents=2, document_tokens=(50, 90), system_tokens=(20, 40))
    assert mixed(small, seed) == mixed(small, seed)
    assert mixed(small, seed) != mixed(small, seed + 1)
    assert steady(20, 1, seed) == steady(20, 1, seed)
    assert steady(20, 1, seed) != steady(20, 1, seed + 1)


@given(answers=st.lists(st.text(max_size=8), min_size=1, max_size=5), opening=st.booleans())
def test_a_history_only_grows(answers: list[str], opening: bool) -> None:
    """What one turn sends is the beginning of what the next one sends, the real answers included."""
    turns = tuple(Turn(f"question {n}", 4, stream=False) for n in range(len(answers) + 1))
    talk = Conversation(0.0, "session", "", (Message("system", "rules"),) if opening else (), turns)
    sent = [messages(talk, answers[:n]) for n in range(len(turns))]
    for n, (earlier, later) in enumerate(itertools.pairwise(sent)):
        said = [Message("assistant", answers[n])] if answers[n] else []
        assert later == [*earlier, *said, Message("user", f"question {n + 1}")]


def test_conversations_arrive_in_order_at_about_the_rate() -> None:
    """Arrivals are a Poisson process: count and spread of the gaps are what the rate says, within four sigma."""
    settings = WorkloadSettings(seconds=400.0, rate=10.0, documents=2, document_tokens=(4, 8), question_tokens=(1, 2))
    starts = [one.at_s for one in mixed(settings, seed=3)]
    assert starts == sorted(starts)
    assert starts[-1] < settings.seconds
    assert abs(len(starts) - 4000) < 4 * math.sqrt(4000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.1)  # equal in an exponential distribution; 0 at a constant rate


def test_the_mix_holds_the_stated_shares_and_lengths() -> None:
    """Kinds, session headers, streams and lengths follow the settings."""
    settings = WorkloadSettings(seconds=300.0, rate=10.0, document_tokens=(30, 40), system_tokens=(20, 30))
    talks = mixed(settings, seed=5)
    kinds = Counter(one.kind for one in talks)
    assert kinds["session"] / len(talks) == pytest.approx(settings.session_share, abs=0.05)
    assert kinds["document"] / len(talks) == pytest.approx(settings.document_share, abs=0.05)
    sessions = [one for one in talks if one.kind == "session"]
    named = [one.session for one in sessions if one.session]
    assert len(named) / len(sessions) == pytest.approx(settings.header_share, abs=0.06)
    assert len(set(named)) == len(named)
    assert not any(one.session for one in talks if one.kind != "session")
    assert {len(one.turns) for one in sessions} == set(range(settings.turns[0], settings.turns[1] + 1))
    turns = [turn for one in talks for turn in one.turns]
    assert sum(turn.stream for turn in turns) / len(turns) == pytest.approx(settings.stream_share, abs=0.03)
    low, high = settings.question_tokens
    assert all(low * TOKEN_BYTES <= len(turn.question) <= high * TOKEN_BYTES for turn in turns)
    low, high = settings.answer_tokens
    assert all(low <= turn.max_tokens <= high for turn in turns)
    assert all(one.turns[0].think_s == 0 for one in talks)


def test_popular_system_prompts_take_most_of_the_traffic() -> None:
    """The n-th prompt is used in proportion to 1 / n ** zipf."""
    settings = WorkloadSettings(seconds=500.0, rate=10.0, system_prompts=4, zipf=1.0, document_share=0.0)
    uses = Counter(one.opening[0].content for one in mixed(settings, seed=8)).most_common()
    shares = [count / sum(count for _, count in uses) for _, count in uses]
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.03)


def test_the_demo_offers_about_three_quarters_to_a_perfect_cache() -> None:
    """The demo's ideal cached share is what its docs say, and no prompt outgrows an engine."""
    talks = mixed(WorkloadSettings(), seed=1)
    assert 0.7 < ideal_cached_share(talks, DEMO_ENGINE.block_size) < 0.85
    assert 300 < requests(talks) < 900


def test_the_demo_engine_can_be_asked_for_on_the_command_line() -> None:
    """`warmpath sim` with these arguments runs the very engine that the workload is made for."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert settings_of(parser.parse_args(engine_arguments(DEMO_ENGINE))).engine == DEMO_ENGINE


def test_the_ideal_counts_what_an_engine_would_reuse() -> None:
    """Nothing is shared between unlike prompts; asked again, all but the last block is."""
    once = steady(1, 1, seed=1, prompt_tokens=320)
    assert ideal_cached_share(once, 16) == 0.0
    # Twice the same prompt: half of all tokens could be cached, less the part of the last block.
    assert 0.45 < ideal_cached_share([*once, *once], 16) < 0.5
    assert ideal_cached_share([], 16) == 0.0


def test_the_steady_workload_is_evenly_spaced() -> None:
    """One request every 1 / rate seconds, unlike prompts of the stated length, session ids in turn."""
    talks = steady(50, 2, seed=1, prompt_tokens=100, max_tokens=7, sessions=3, stream_share=1.0)
    assert [one.at_s for one in talks] == pytest.approx([n / 50 for n in range(100)])
    assert len({one.turns[0].question for one in talks}) == 100
    assert {len(one.turns[0].question) for one in talks} == {400}
    assert [one.session for one in talks[:4]] == ["1-0", "1-1", "1-2", "1-0"]
    assert all(one.turns[0].stream and one.turns[0].max_tokens == 7 for one in talks)
