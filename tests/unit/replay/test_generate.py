"""Generated workloads: reproducible, sound, and with the sharing and the pace they are made for."""

from collections import Counter

import msgspec
import pytest

from extproc.errors import TraceError
from extproc.replay.arguments import GENERATED
from extproc.replay.arrivals import expected
from extproc.replay.generate import WORKLOADS, Bursts, LongAnswers, MultiTurn, SharedPrefixes, generated
from tests.unit.replay.sound import assert_sound

NAMES = sorted(WORKLOADS)
IDEAL = {
    "shared_prefixes": (0.74, 0.77),
    "multi_turn": (0.80, 0.83),
    "agents": (0.85, 0.88),
    "hot_prefix": (0.73, 0.77),
    "mixed_lengths": (0.0, 0.0),
    "bursts": (0.73, 0.77),
    "long_answers": (0.86, 0.93),
}
"""Band of the ideal cached share of each workload at its defaults."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_workload_is_sound_and_shares_what_it_is_made_for(name: str, seed: int) -> None:
    """Rows keep their promises, and the ideal cached share lies in the band stated for the workload."""
    trace = generated(name, seed)
    assert_sound(trace)
    least, most = IDEAL[name]
    assert least <= trace.ideal_cached_share <= most
    assert trace.name == name


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_give_equal_workloads_and_others_differ(name: str) -> None:
    """A workload is a function of its settings and its seed."""
    assert generated(name, 5, seconds=4.0) == generated(name, 5, seconds=4.0)
    assert generated(name, 5, seconds=4.0) != generated(name, 6, seconds=4.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_conversation_has_turns_of_its_own(name: str) -> None:
    """No two requests have the same identity; a first turn follows nothing, a later one the turn it waits for."""
    trace = generated(name, 1, seconds=5.0)
    assert len({row.turn for row in trace.rows}) == trace.requests
    for row in trace.rows:
        assert row.follows == (trace.rows[row.after].turn if row.after >= 0 else b"")


@pytest.mark.parametrize("name", NAMES)
def test_answers_stay_within_the_limit_that_clients_set(name: str) -> None:
    """What an engine generates never passes the request's own limit."""
    least, most = WORKLOADS[name].settings.answer_tokens
    for row in generated(name, 1, seconds=5.0).rows:
        assert row.max_tokens == most
        assert least <= row.output_tokens <= most


def test_one_prefix_takes_about_half_of_the_hot_traffic() -> None:
    """The hottest prefix stands before 45 to 60 % of the requests."""
    trace = generated("hot_prefix", 1)
    (_, hottest), *_ = Counter(row.blocks[0] for row in trace.rows).most_common(1)
    assert 0.45 < hottest / trace.requests < 0.60


def test_shared_prefixes_are_used_alike_unless_zipf_says_otherwise() -> None:
    """Every group occurs, and Zipf's law puts the first one far above its even share."""
    settings = SharedPrefixes(groups=10, prefix_tokens=64, question_tokens=(1, 9), seconds=60.0)
    for zipf, least, most in ((0.0, 0.05, 0.15), (1.0, 0.25, 0.45)):
        trace = WORKLOADS["shared_prefixes"].generate(msgspec.structs.replace(settings, zipf=zipf), 1)
        counts = Counter(row.blocks[0] for row in trace.rows)
        assert len(counts) == 10
        assert least < max(counts.values()) / trace.requests < most


def test_a_conversation_contains_its_answers() -> None:
    """A turn's prompt begins with the blocks of the prompt before and of the answer to it."""
    trace = generated("multi_turn", 1, seconds=5.0)
    later = [row for row in trace.rows if row.after >= 0]
    assert later
    for row in later:
        before = trace.rows[row.after]
        begin = [*before.blocks, *before.answer_blocks]
        assert list(row.blocks[: len(begin)]) == begin
        assert row.prompt_tokens > before.prompt_tokens + before.output_tokens
        assert row.session == before.session
    sent = expected(trace.rows)
    assert sent == sorted(sent)


def test_a_part_of_the_conversations_names_its_session() -> None:
    """About the stated share sends a session id, one of its own; the others send none."""
    settings = WORKLOADS["multi_turn"].settings
    assert isinstance(settings, MultiTurn)
    first = [row.session for row in generated("multi_turn", 1).rows if row.after < 0]
    named = [session for session in first if session]
    assert len(set(named)) == len(named)
    assert abs(len(named) / len(first) - settings.named_share) < 0.12


def test_prompts_of_mixed_lengths_share_nothing_and_have_a_heavy_tail() -> None:
    """Every block is unique, and the longest hundredth holds more than a tenth of all tokens."""
    trace = generated("mixed_lengths", 1)
    blocks = [block for row in trace.rows for block in row.blocks]
    assert len(set(blocks)) == len(blocks)
    lengths = sorted((row.prompt_tokens for row in trace.rows), reverse=True)
    assert sum(lengths[: len(lengths) // 100]) > 0.1 * sum(lengths)


def test_bursts_and_phases_stand_out() -> None:
    """Each period holds one burst of 100 in 200 ms, and busy phases are busier than calm ones by the rates."""
    settings = Bursts(seconds=60.0)
    times = [row.at_s for row in WORKLOADS["bursts"].generate(settings, 1).rows]
    peaks = [n for n in range(300) if sum(n * 0.2 <= at < (n + 2) * 0.2 for at in times) >= 100]
    assert len({int(n * 0.2 / settings.burst_every_s) for n in peaks}) == 4
    calm = [row.at_s for row in WORKLOADS["bursts"].generate(Bursts(seconds=400.0, burst=0), 1).rows]
    busy = sum(at % 8 < 4 for at in calm)
    assert 2.5 < busy / (len(calm) - busy) < 3.5


def test_most_long_answers_stand_behind_one_prefix() -> None:
    """The hot prefix takes its share; the other prompts are alone."""
    settings = WORKLOADS["long_answers"].settings
    assert isinstance(settings, LongAnswers)
    counts = Counter(row.blocks[0] for row in generated("long_answers", 1).rows)
    (_, hottest), *others = counts.most_common()
    assert abs(hottest / counts.total() - settings.hot_share) < 0.04
    assert {count for _, count in others} == {1}


def test_an_unknown_workload_or_setting_is_refused_with_the_nearest_name() -> None:
    """A misspelt name gets the one it was meant to be."""
    with pytest.raises(TraceError, match="did you mean hot_prefix"):
        generated("hot_prefixes", 1)
    with pytest.raises(TraceError, match="did you mean rate"):
        generated("hot_prefix", 1, rates=3.0)
    with pytest.raises(TraceError, match="choose one of agents, "):
        generated("xyzzy", 1)


def test_the_help_names_every_workload() -> None:
    """The names are written once more where importing the workloads would slow every command down."""
    assert set(GENERATED) == set(WORKLOADS)
