"""What finished requests teach: the right endpoint, the right amount of work, and metrics of all of them."""

import asyncio

import pytest

from extproc.choose.fleet import Endpoint
from extproc.clock import ManualClock
from extproc.envoy.contract import QUEUED, VERSION, Served
from extproc.envoy.rate_limit import Asked
from extproc.gossip import Gossip
from extproc.learner import Learner, answered, engine_ttft_s, number, uncached_tokens
from extproc.quotas import Quotas
from extproc.router import Surroundings
from extproc.state import feed
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.quota_metrics import QuotaMetrics
from tests.unit.top.parts import config, surroundings

A, B = Endpoint("a", "10.0.0.1:80", 8000.0), Endpoint("b", "10.0.0.2:80", 8000.0)
METADATA: dict[str, str | float] = {
    "endpoint": "a",
    "uncached_tokens": 500.0,
    "backlog_tokens": 100.0,
    "prompt_bytes": 4000.0,
    "streamed": 1.0,
}


def served(**changes: object) -> Served:
    """A request that `a` answered at the first try, changed in some fields."""
    fields: dict[str, object] = {
        "charge_id": "c1",
        "pool": "main",
        "destination": A.destination,
        "status": 200,
        "ttft_s": 0.5,
        "prompt_tokens": 1000,
        "cached_tokens": 400,
        "metadata": METADATA,
    }
    return Served(**(fields | changes))  # type: ignore[arg-type]


def learner() -> tuple[Learner, Surroundings, Gossip, Metrics]:
    """A learner over endpoints a and b."""
    around = surroundings(A, B)
    gossip = Gossip(around.store, around.knowledge, "r1", 1000)
    metrics = Metrics()
    return Learner(around, gossip, metrics), around, gossip, metrics


def test_a_streamed_answer_teaches_work_and_time() -> None:
    """Work is what the engine prefilled, by its own count, and what stood in front of it."""
    taught = answered(served(), "a", 0.5)
    assert (taught.endpoint, taught.work_tokens, taught.ttft_s) == ("a", 700.0, 0.5)
    assert (taught.prompt_bytes, taught.prompt_tokens) == (4000.0, 1000.0)


def test_the_wait_for_room_is_not_the_engines() -> None:
    """A request that waited five seconds at the worker, and half a second for its first token."""
    waited = served(ttft_s=5.5, metadata=METADATA | {QUEUED: 5000.0})
    assert engine_ttft_s(waited) == 0.5
    assert (engine_ttft_s(served()), engine_ttft_s(served(ttft_s=-1.0))) == (0.5, -1.0)


def test_what_the_engine_counted_goes_along() -> None:
    """Cached and generated tokens, and the part of the work that stood in front of the request."""
    taught = answered(served(output_tokens=30), "a", 0.5)
    assert (taught.backlog_tokens, taught.cached_tokens, taught.output_tokens) == (100.0, 400.0, 30.0)


def test_of_several_answers_one_counts() -> None:
    """An engine reports the tokens of all answers of a request; what is expected of the next is one answer's."""
    taught = answered(served(output_tokens=30, metadata=METADATA | {"sequences": 3.0}), "a", 0.5)
    assert taught.output_tokens == 10.0


@pytest.mark.parametrize(
    ("changes", "cached", "output"),
    [
        ({"attempts": 2}, -1.0, 30.0),
        ({"metadata": METADATA | {"endpoint": "b"}}, -1.0, 30.0),
        ({"status": 503}, -1.0, -1.0),
        ({"prompt_tokens": -1, "cached_tokens": -1, "output_tokens": -1}, -1.0, -1.0),
    ],
)
def test_only_the_first_try_of_the_pick_is_compared_with_its_profile(
    changes: dict[str, object], cached: float, output: float
) -> None:
    """What a second try finds cached may come from the first; lengths of answers are learnt from any that succeeded."""
    taught = answered(served(**({"output_tokens": 30} | changes)), "a", 0.5)
    assert (taught.cached_tokens, taught.output_tokens) == (cached, output)


def test_without_usage_the_prediction_stands_in() -> None:
    """An engine that reports no usage leaves the decision's own estimate."""
    assert uncached_tokens(served(prompt_tokens=-1, cached_tokens=-1)) == 500.0


def test_work_is_never_negative() -> None:
    """An engine that claims more cached than prompt tokens did no work, not less than none."""
    assert uncached_tokens(served(prompt_tokens=10, cached_tokens=400)) == 0.0
    bare = {key: value for key, value in METADATA.items() if key != "backlog_tokens"}
    assert answered(served(metadata=bare), "a", 0.5).work_tokens == 600.0


@pytest.mark.parametrize(
    ("changes", "ttft_s"),
    [
        ({"attempts": 2}, 0.5),
        ({"status": 503}, 0.5),
        ({"metadata": METADATA | {"endpoint": "b"}}, 0.5),
        ({}, -1.0),
    ],
)
def test_other_answers_teach_no_speed(changes: dict[str, object], ttft_s: float) -> None:
    """After a retry, an error, another endpoint's answer or a whole answer, the first byte says nothing of prefill."""
    assert answered(served(**changes), "a", ttft_s).work_tokens == -1.0


@pytest.mark.parametrize(
    ("status", "flags", "prefilled"),
    [
        (200, (), True),
        (400, (), False),
        (404, (), False),
        (429, (), False),
        (500, (), False),
        (503, ("UF",), False),
        (0, (), False),
        (0, ("DC",), True),
        (0, ("DPE",), True),
        (0, ("DR",), True),
        (503, ("DC",), True),
    ],
)
def test_only_a_prefilled_prompt_is_taken_for_cached(status: int, flags: tuple[str, ...], prefilled: bool) -> None:
    """A refused prompt is in no cache; one whose client left was prefilled, since the engine was at it."""
    assert answered(served(status=status, flags=flags), "a", -1.0).endpoint == ("a" if prefilled else "")


@pytest.mark.parametrize(
    ("stage", "status", "prefilled"),
    [
        ("headers", 504, False),
        ("first_token", 200, False),
        ("first_token", 504, False),
        ("stall", 200, True),
        ("request", 200, True),
    ],
)
def test_without_a_first_token_nothing_is_taken_for_cached(stage: str, status: int, prefilled: bool) -> None:
    """A limit that ended the request before says that the engine may have done nothing; later ones do not."""
    taught = answered(served(stage=stage, status=status), "a", -1.0, 55.0)
    assert taught.endpoint == ("a" if prefilled else "")


def test_an_answer_that_was_broken_off_teaches_no_length() -> None:
    """Its bytes are not those of a whole answer."""
    cut = {"output_tokens": -1, "prompt_tokens": -1, "cached_tokens": -1}
    assert answered(served(stage="stall", **cut), "a", 0.5, 55.0).output_tokens == -1.0
    assert answered(served(**cut), "a", 0.5, 55.0).output_tokens == 55.0


def test_a_refused_prompt_leaves_the_profile() -> None:
    """After a 400 the endpoint is no longer believed to hold the prompt's blocks."""
    learns, around, _, _ = learner()
    known = around.knowledge["main"]
    known.decided("c1", "a", [1, 2, 3])
    learns.observe(served(status=400, prompt_tokens=-1, cached_tokens=-1))
    assert known.held("a") == 0


async def test_what_is_learnt_is_told_to_the_others() -> None:
    """One observation of this worker reaches the pool's feed."""
    learns, around, gossip, _ = learner()
    learns.observe(served())
    await gossip.flush()
    entries = await around.store.read("main", "0", 0)
    assert feed.decode(entries[0].payload).deltas == [answered(served(), "a", 0.5)]


async def test_undecided_and_foreign_requests_are_counted_only() -> None:
    """No charge, nothing learnt; a cluster that is no pool is not even a request of ours."""
    learns, around, gossip, metrics = learner()
    learns.observe(served(charge_id=""))
    learns.observe(served(pool="someone_elses"))
    await gossip.flush()
    assert await around.store.read("main", "0", 0) == []
    page = metrics.page().decode()
    assert 'warmpath_access_log_entries_total{outcome="undecided"} 1.0' in page
    assert 'warmpath_access_log_entries_total{outcome="foreign"} 1.0' in page
    assert "someone_elses" not in page


async def test_a_request_that_never_had_a_pool_gives_back_what_it_took_before_its_body() -> None:
    """The refusal of its decision is known by the access log alone, as one of no pool."""
    around = surroundings(A, settings=config(rate_limits={"rules": [{"requests_per_day": 5}], "before_body": True}))
    metrics = Metrics()
    quotas = Quotas(around, QuotaMetrics(metrics.families), ManualClock())
    learns = Learner(around, Gossip(around.store, around.knowledge, "r1", 1000), metrics, quotas=quotas)
    told = await quotas.ahead([Asked("acme", None, 1.0)])
    learns.observe(Served(status=429, metadata=told.metadata))
    await quotas.close()
    assert "warmpath_quota_given_back_total 1.0" in metrics.page().decode()
    again = await quotas.ahead([Asked("acme", None, 0.0)])
    assert again.headers["x-ratelimit-remaining-requests"] == "5"


def test_every_finished_request_is_counted_under_its_endpoint() -> None:
    """Tokens go to the endpoint that answered; TTFT only counts streamed answers."""
    learns, _, _, metrics = learner()
    learns.observe(served())
    learns.observe(served(destination=B.destination, metadata=METADATA | {"streamed": 0.0}))
    page = metrics.page().decode()
    for endpoint in "ab":
        assert f'warmpath_cached_tokens_total{{endpoint="{endpoint}",pool="main"}} 400.0' in page
    assert 'warmpath_ttft_seconds_count{pool="main"} 1.0' in page


def test_an_unknown_destination_has_no_endpoint() -> None:
    """An endpoint that left meanwhile is no error."""
    learns, around, _, _ = learner()
    assert around.fleet.pools["main"].id_at("10.9.9.9:1") == ""
    learns.observe(served(destination="10.9.9.9:1"))


@pytest.mark.parametrize(("value", "read"), [(3, 3.0), (2.5, 2.5), ("7", -1.0)])
def test_only_numbers_are_numbers(value: str | float, read: float) -> None:
    """Metadata that came back changed is taken for absent."""
    assert number({"x": value}, "x") == read
    assert number({}, "x") == -1.0


async def test_speed_is_learnt_in_the_end() -> None:
    """Twenty answers at 1,000 tokens a second teach that speed, far from the prior of 8,000, and of the whole pool."""
    learns, around, _, _ = learner()
    for work in range(300, 2300, 100):
        learns.observe(
            served(prompt_tokens=work, cached_tokens=0, ttft_s=work / 1000, metadata=METADATA | {"backlog_tokens": 0.0})
        )
        await asyncio.sleep(0)
    assert around.knowledge["main"].rate("a") == pytest.approx(1000.0, rel=0.01)
    assert around.knowledge["main"].rate("b") == around.knowledge["main"].rate("a")


def test_reports_of_an_emptied_cache_reach_the_profile() -> None:
    """The second answer in a row without a cached token takes out what the endpoint evicted; the prompts stay."""
    learns, around, _, _ = learner()
    known = around.knowledge["main"]
    usage = {"prompt_tokens": 640, "metadata": METADATA | {"prompt_bytes": 2560.0}}
    for charge_id, first, cached in (("c1", 1, 64), ("c2", 101, 0), ("c3", 1, 0), ("c4", 101, 0)):
        blocks = range(first, first + 10)
        matched = known.matched_tokens(blocks).get("a", 0.0)
        known.decided(charge_id, "a", blocks, matched_tokens=matched)
        learns.observe(served(charge_id=charge_id, cached_tokens=cached, **usage))
        known.decided(f"{charge_id}-old", "a", range(9001, 9003)) if charge_id == "c1" else None
    assert known.matched_tokens([9001, 9002]) == {}
    assert known.matched_tokens(range(101, 111)) == {"a": 640.0}


async def test_an_engine_that_never_tells_what_it_cached_is_not_taken_for_fast() -> None:
    """A report without cached tokens counts as 0: what the profile expected to be prefilled is then what counts."""
    learns, around, _, _ = learner()
    for at in range(40):
        uncached = 400.0 + at
        more = METADATA | {"backlog_tokens": 0.0, "uncached_tokens": uncached}
        learns.observe(served(prompt_tokens=8000, cached_tokens=0, ttft_s=uncached / 8000, metadata=more))
        await asyncio.sleep(0)
    assert around.knowledge["main"].rate("a") == pytest.approx(8000.0, rel=0.01)


def test_further_attempts_are_told_once_each() -> None:
    """Envoy tells of a running request again and again; who has it is passed on when that changes, and only then."""
    learn, around, _, _ = learner()
    told: list[tuple[str, str]] = []
    around.knowledge["main"].hear(lambda charge, endpoint: told.append((charge, endpoint)))
    for destination in (A, B, B, A, A):
        learn.tried_again(served(destination=destination.destination, attempts=2))
    learn.tried_again(served(destination="10.9.9.9:80", attempts=2))
    learn.tried_again(served(destination=B.destination, pool="foreign", attempts=2))
    assert told == [("c1", "b"), ("c1", "a")]


class Compared:
    """Who compares versions, and what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, float]] = []

    def observe(self, served: Served, endpoint: str, counted: float) -> None:
        """See `Versions.observe`."""
        self.seen.append((served.charge_id, endpoint, counted))


def test_only_decided_requests_of_models_with_versions_are_compared() -> None:
    """With who answered, empty where nobody did; others cost nothing."""
    around, versions = surroundings(A, B), Compared()
    gossip = Gossip(around.store, around.knowledge, "r1", 1000)
    learns = Learner(around, gossip, Metrics(), versions=versions)
    told = METADATA | {VERSION: "two"}
    for each in (
        served(),
        served(charge_id="", metadata=told),
        served(charge_id="c2", metadata=told),
        served(charge_id="c3", metadata=told, destination="", status=503),
        served(charge_id="c4", metadata=told, pool="unknown"),
    ):
        learns.observe(each)
    assert versions.seen == [("c2", "a", -1.0), ("c3", "", -1.0)]
