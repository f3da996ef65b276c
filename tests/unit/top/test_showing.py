"""A worker's metrics page."""

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import ManualClock
from extproc.deciding import Outcome
from extproc.envoy.access_log import LogCounts
from extproc.envoy.processor import Counts
from extproc.errors import StoreError
from extproc.request.model import RouteKind
from extproc.showing import Showing
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.telemetry.metrics import Metrics
from extproc.worker import compose
from tests.unit.top.parts import config, surroundings

A, B = Endpoint("a", "10.0.0.1:80", 8000.0), Endpoint("b", "10.0.0.2:80", 8000.0)


class Gone(MemoryStore):
    """A shared store that does not answer."""

    async def ping(self, pool: str = "") -> None:  # noqa: ARG002 -- it is gone for every pool
        """Fail."""
        raise StoreError("gone")


def showing(primary: MemoryStore | None = None) -> tuple[Showing, ResilientStore]:
    """A page over endpoints a and b."""
    store = ResilientStore(primary or MemoryStore(ManualClock()), MemoryStore(ManualClock()))
    around = surroundings(A, B)
    return Showing(Metrics(), around, store), store


def outcome(**changes: object) -> Outcome:
    """A decision without a session."""
    fields: dict[str, object] = {
        "pool": "main",
        "policy": "predicted_ttft",
        "kind": RouteKind.CHAT,
        "prompt_tokens": 10.0,
        "cached_tokens": 4.0,
        "best_cached_tokens": 6.0,
        "predicted_ttft_ms": 12.0,
        "session": False,
        "pinned": False,
        "moved": False,
        "flaw": "",
        "local_s": 0.001,
        "store_s": 0.002,
    }
    return Outcome(**(fields | changes))  # type: ignore[arg-type]


def test_decisions_are_counted_by_what_became_of_the_session() -> None:
    """No session, a new one, a pinned one and one that moved are told apart."""
    shows, _ = showing()
    for changes in ({}, {"session": True}, {"session": True, "pinned": True}, {"session": True, "moved": True}):
        shows.decided(outcome(**changes))
    shows.settled("main")
    page = shows.page().decode()
    for name in ("none", "new", "pinned", "moved"):
        assert f'warmpath_sessions_total{{outcome="{name}",pool="main"}} 1.0' in page
    assert 'warmpath_in_flight{pool="main"} 3.0' in page
    assert 'warmpath_decision_stage_seconds_count{stage="store"} 4.0' in page


def test_the_overlap_on_offer_is_counted_beside_the_one_that_was_taken() -> None:
    """Three counters of tokens: the best on offer, the one taken, and what the pick computes again."""
    shows, _ = showing()
    for taken in (6.0, 4.0, 0.0):
        shows.decided(outcome(cached_tokens=taken))
    shows.decided(outcome(cached_tokens=0.0, best_cached_tokens=0.0))
    page = shows.page().decode()
    assert 'warmpath_best_cached_tokens_total{pool="main"} 18.0' in page
    assert 'warmpath_predicted_cached_tokens_total{pool="main"} 10.0' in page
    assert 'warmpath_forgone_cached_tokens_total{pool="main"} 8.0' in page


async def test_lower_rungs_of_the_ladder_are_counted() -> None:
    """A body that could not be read, and a store that is gone, show in the fallbacks."""
    shows, store = showing(Gone(ManualClock()))
    shows.decided(outcome(flaw="not JSON"))
    try:
        await store.ping("main")
    except StoreError:
        shows.decided(outcome())
    page = shows.page().decode()
    assert 'warmpath_fallbacks_total{pool="main",rung="load_only"} 1.0' in page
    assert 'warmpath_unread_requests_total{pool="main",reason="not JSON"} 1.0' in page
    assert 'warmpath_fallbacks_total{pool="main",rung="local_ledger"} 1.0' in page
    assert 'warmpath_store_degraded{pool="main"} 1.0' in page
    assert 'warmpath_store_trouble{kind="gone",pool="main"} 1.0' in page
    assert 'warmpath_store_failures_total{kind="gone"} 1.0' in page
    assert "warmpath_store_circuit_openings_total 1.0" in page
    await store.close()


def test_totals_of_other_parts_are_not_added_twice() -> None:
    """Counts of the ext_proc service are totals; two pages must not count them twice."""
    shows, _ = showing()
    counts = Counts(failed_open=2, refused={"no_endpoint": 3})
    shows.watch(counts)
    shows.page()
    counts.failed_open = 5
    page = shows.page().decode()
    assert 'warmpath_exchange_anomalies_total{kind="failed_open"} 5.0' in page
    assert 'warmpath_refusals_total{reason="no_endpoint"} 3.0' in page


def test_entries_of_the_access_log_that_could_not_be_read_are_shown() -> None:
    """Those that were lost, and those that lack their usage, are two kinds of anomalies, counted once."""
    shows, _ = showing()
    counts = LogCounts(entries=9, malformed=2, usage_unreadable=3)
    shows.watch_log(counts)
    shows.page()
    counts.malformed += 4
    page = shows.page().decode()
    assert 'warmpath_exchange_anomalies_total{kind="log_unreadable"} 6.0' in page
    assert 'warmpath_exchange_anomalies_total{kind="usage_unreadable"} 3.0' in page


def test_a_worker_shows_what_its_access_log_could_not_read() -> None:
    """The page is that of the very service that takes the entries."""
    parts = compose(config(redis={"url": "redis://127.0.0.1:1"}))
    parts.access_log.take(b"\xff\xff")
    assert 'warmpath_exchange_anomalies_total{kind="log_unreadable"} 1.0' in parts.showing.page().decode()


def test_an_endpoint_that_left_is_not_shown_for_ever() -> None:
    """Series of removed endpoints go, or a fleet that changes daily fills the page with the dead."""
    around = surroundings(A, B)
    shows = Showing(Metrics(), around, ResilientStore(MemoryStore(ManualClock()), MemoryStore(ManualClock())))
    assert 'warmpath_prefill_tokens_per_second{endpoint="b",pool="main"}' in shows.page().decode()
    around.fleet = Fleet({"main": Pool("main", "predicted_ttft", (A,))}, {"m": "main"}, "main")
    page = shows.page().decode()
    assert 'endpoint="a"' in page
    assert 'endpoint="b"' not in page


def test_changed_bodies_are_counted_by_reason() -> None:
    """As the router counts them, once each however often the page is asked for."""
    store = ResilientStore(MemoryStore(ManualClock()), MemoryStore(ManualClock()))
    around = surroundings(A, B)
    shows = Showing(Metrics(), around, store)
    for change, times in (("model", 2), ("usage", 1)):
        around.changes["main", change] += times
    shows.page()
    around.changes["main", "model"] += 3
    page = shows.page().decode()
    assert 'warmpath_fitted_requests_total{change="model",pool="main"} 5.0' in page
    assert 'warmpath_fitted_requests_total{change="usage",pool="main"} 1.0' in page


def test_the_rungs_of_decisions_are_counted_and_exact_profiles_shown() -> None:
    """How prompts were matched, and what the endpoints hold by their own word, as long as they have one."""
    store = ResilientStore(MemoryStore(ManualClock()), MemoryStore(ManualClock()))
    around = surroundings(A, B)
    shows, exact = Showing(Metrics(), around, store), around.knowledge["main"].caches.exact.index
    shows.decided(outcome(rung="precise", tokens_s=0.003))
    shows.decided(outcome(rung="load"))
    exact.begin("a", 0, 16)
    exact.stored("a", 0, 0, [1, 2, 3])
    page = shows.page().decode()
    assert 'warmpath_matched_total{pool="main",rung="precise"} 1.0' in page
    assert 'warmpath_matched_total{pool="main",rung="load"} 1.0' in page
    assert 'warmpath_exact_profile_blocks{endpoint="a",pool="main"} 3.0' in page
    assert 'warmpath_decision_stage_seconds_count{stage="tokens"} 1.0' in page
    assert 'warmpath_exact_profile_blocks{endpoint="b"' not in page
    exact.end("a", 0)
    assert "warmpath_exact_profile_blocks{" not in shows.page().decode()
