"""The rule that turns scrapes into a state, where numbers lag, are kept back, change pages or are missing."""

from itertools import accumulate

import msgspec
import pytest

from extproc.engines.adapter import About, Reading
from extproc.engines.kv_values import EventSource
from extproc.fleet.health import Failure, Health, Outcome, after, described, first, resumed
from extproc.state.endpoint import STALE_AFTER, EndpointState, Source, decode, encode

NEW = first("10.0.0.1:8000", 0.0)
BAD, LOST, SILENT = Failure.UNREADABLE, Failure.UNREACHABLE, Failure.SILENT
KEPT = Reading(kept=True, kind="tensorrt_llm", page="/metrics")


def gauges(running: int, tokens: float = 100.0, kv_usage: float = 0.5) -> Reading:
    """Numbers that move only when a request completes."""
    return Reading(running=running, kv_usage=kv_usage, tokens=tokens, lags=True)


def record(running: int) -> Reading:
    """A step's record."""
    return Reading(running=running, waiting=1, kind="tensorrt_llm", page="/metrics")


def run(*outcomes: Outcome, start: Health = NEW) -> list[EndpointState]:
    """States after each outcome, one second apart."""
    times = iter(range(len(outcomes)))

    def step(health: Health, outcome: Outcome) -> Health:
        passed = next(times)
        return after(health, outcome, 100.0 + passed, float(passed))

    return [health.state for health in accumulate(outcomes, step, initial=start)][1:]


def test_gauges_that_stand_still_are_no_standstill() -> None:
    """A long generation moves nothing: after two seconds the numbers are frozen, and no stall is told."""
    states = run(*[gauges(3)] * 6)
    assert [state.stalled_s for state in states] == [0.0] * 6
    assert [state.frozen for state in states] == [False, False, False, True, True, True]


@pytest.mark.parametrize("moved", [gauges(2), gauges(3, tokens=101.0), gauges(3, kv_usage=0.4)])
def test_gauges_that_moved_are_believed_for_two_seconds(moved: Reading) -> None:
    """A request completed just now, and they are of that moment."""
    states = run(*[gauges(3)] * 5, *[moved] * 4)
    assert [state.frozen for state in states[4:]] == [True, False, False, False, True]


def test_an_engine_that_does_not_answer_stands_still_whatever_its_gauges_are() -> None:
    """No page in time is a sign of its own."""
    states = run(gauges(3), SILENT, SILENT, SILENT, SILENT)
    assert [state.stalled_s for state in states] == [0.0, 0.0, 0.0, 3.0, 4.0]


def test_other_engines_numbers_are_never_frozen() -> None:
    """Gauges that follow every step may stand still because nothing happens."""
    assert not any(state.frozen for state in run(*[Reading(running=0)] * 6))


def test_a_page_without_news_keeps_the_numbers_until_the_engine_is_idle() -> None:
    """For the length of a step they may still hold, as a hint; an engine that made no step for longer has no work."""
    states = run(record(5), KEPT, KEPT, KEPT, record(2))
    assert [(state.running, state.waiting) for state in states] == [(5, 1), (5, 1), (5, 1), (0, 0), (2, 1)]
    assert [state.frozen for state in states] == [False, True, True, True, False]
    assert [state.scraped_at for state in states] == [100.0, 101.0, 102.0, 103.0, 104.0]
    assert not any(state.stalled_s for state in states)


def test_a_frozen_engine_stays_frozen_over_a_takeover() -> None:
    """The keeper that goes on does not take old numbers for new ones; those that were not frozen count from then on."""
    frozen = run(*[gauges(3)] * 6)[-1]
    assert after(resumed(frozen, 7000.0), gauges(3), 500.0, 7000.5).state.frozen
    fresh = run(gauges(3))[-1]
    assert not after(resumed(fresh, 7000.0), gauges(3), 500.0, 7000.5).state.frozen
    assert after(resumed(fresh, 7000.0), gauges(3), 500.0, 7002.5).state.frozen


@pytest.mark.parametrize("failure", [BAD, LOST, SILENT])
def test_three_failures_in_a_row_make_numbers_stale_and_nothing_else(failure: Failure) -> None:
    """One or two change nothing; the next page ends it."""
    states = run(Reading(running=3), failure, failure, failure, Reading(running=3), failure)
    assert [state.stale for state in states] == [False, False, False, True, False, False]
    assert [state.unread for state in states] == [0, 1, 2, STALE_AFTER, 0, 1]
    assert all(state.running == 3 for state in states)


def page(path: str, tokens: float, queries: float = 0.0) -> Reading:
    """Counters of one page."""
    return Reading(tokens=tokens, prefix_queries=queries, kind="sglang", page=path)


@pytest.mark.parametrize(
    ("outcomes", "starts"),
    [
        ([page("/v1/loads", 50.0), page("/v1/loads", 60.0)], [0, 0]),
        ([page("/v1/loads", 50.0), page("/v1/loads", 10.0)], [0, 101]),
        ([page("/metrics", 5000.0, 900.0), page("/v1/loads", 10.0)], [0, 0]),
        ([page("/v1/loads", 50.0), page("/metrics", 40.0), page("/metrics", 30.0)], [0, 0, 102]),
        ([page("/v1/loads", 50.0), LOST, LOST, LOST, page("/v1/loads", 60.0)], [0, 0, 0, 0, 0]),
        ([page("/get_load", 0.0), LOST, LOST, LOST, page("/get_load", 0.0)], [0, 0, 0, 0, 104]),
        ([page("/get_load", 0.0), LOST, LOST, page("/get_load", 0.0)], [0, 0, 0, 0]),
        ([record(1), LOST, LOST, LOST, KEPT, KEPT], [0, 0, 0, 0, 104, 104]),
        ([record(1), KEPT, KEPT], [0, 0, 0]),
    ],
)
def test_a_restart_shows_in_counters_of_one_page_or_in_a_lost_process(
    outcomes: list[Outcome], starts: list[float]
) -> None:
    """Counters of two pages are not compared; an engine that counts nothing was restarted when its process was gone."""
    assert [state.started_at for state in run(*outcomes)] == starts


def test_another_engine_at_the_address_has_nothing_of_the_first() -> None:
    """Its cache is another one, and so are its adapters; what an operator set stays."""
    health = described(after(NEW, Reading(running=3, kind="vllm", page="/metrics", block_tokens=16), 100.0, 0.0), ABOUT)
    drained = msgspec.structs.replace(health, state=msgspec.structs.replace(health.state, draining=True))
    state = after(drained, Reading(running=1, kind="sglang", page="/v1/loads", tokens=9.0), 101.0, 1.0).state
    assert state == EndpointState(
        "10.0.0.1:8000",
        scraped_at=101.0,
        draining=True,
        running=1,
        started_at=101.0,
        tokens=9.0,
        kind="sglang",
        page="/v1/loads",
    )
    without_news = after(drained, KEPT, 101.0, 1.0).state
    assert without_news == EndpointState(
        "10.0.0.1:8000", 101.0, draining=True, started_at=101.0, frozen=True, kind="tensorrt_llm", page="/metrics"
    )


ABOUT = About(
    models=("m",),
    adapters=("sql",),
    version="0.5.23",
    sources=(EventSource(1, "zmq", "tcp://*:5558", "tcp://*:6558", "kv"), EventSource(way="drain", endpoint="/e")),
    block_tokens=32,
    kv_tokens=6400,
    ranks=2,
    max_adapters=4,
    hash_algo="sha256",
    prefix_caching=False,
)


def test_what_slow_pages_tell_is_published() -> None:
    """All of it; pages that tell nothing change nothing, and an empty list is told."""
    health = described(NEW, ABOUT)
    assert health.state == EndpointState(
        "10.0.0.1:8000",
        models=("m",),
        adapters=("sql",),
        version="0.5.23",
        sources=(Source(1, "zmq", "tcp://*:5558", "tcp://*:6558", "kv"), Source(way="drain", endpoint="/e")),
        block_tokens=32,
        kv_blocks=200,
        ranks=2,
        max_adapters=4,
        hash_algo="sha256",
        prefix_caching=False,
    )
    assert described(health, About()) == health
    emptied = described(health, About(models=(), adapters=(), sources=()))
    assert (emptied.state.models, emptied.state.adapters, emptied.state.sources) == ((), (), ())


def test_a_reading_does_not_undo_what_slow_pages_told() -> None:
    """SGLang's block size and capacity are on different pages."""
    told = Reading(kv_tokens=12800, kind="sglang", page="/v1/loads")
    state = after(described(NEW, ABOUT), told, 100.0, 0.0).state
    assert (state.block_tokens, state.kv_blocks, state.prefix_caching) == (32, 400, False)
    assert (state.version, state.adapters, state.max_adapters, state.ranks) == ("0.5.23", ("sql",), 4, 2)
    assert after(NEW, told, 100.0, 0.0).state.kv_blocks == 0


def test_sources_come_back_as_they_were_told() -> None:
    """Through the store, with those of a way that only a newer keeper knows: it may be the next to read them."""
    told = tuple(Source(one.rank, one.way, one.endpoint, one.replay, one.topic) for one in ABOUT.sources or ())
    published = decode(encode(described(NEW, ABOUT).state))
    assert published.sources == told
    newer = msgspec.structs.replace(published, sources=(Source(way="grpc", endpoint="x"), *told))
    assert decode(encode(newer)).sources == (Source(way="grpc", endpoint="x"), *told)
