"""A decision taken apart: the terms are those it was made of, and nobody of the pool is missing."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.choose import chooser
from extproc.choose.explain import BEYOND, CandidateCost, Case, costs
from extproc.choose.fleet import Endpoint, Pool
from extproc.choose.policies import POLICIES, Ask, Weights


class Load(msgspec.Struct, frozen=True):
    """A shared load."""

    backlog_tokens: float = 0.0
    running: int = 0
    output_tokens: float = 0.0


IDLE = Load()
NAMES = [f"e{number}" for number in range(24)]
ENDPOINTS = st.builds(
    Endpoint,
    id=st.just(""),
    destination=st.just(""),
    rate=st.floats(100.0, 1e5),
    kv_usage=st.floats(0.0, 1.0),
    reachable=st.booleans(),
    asleep=st.booleans(),
    draining=st.booleans(),
)
LOADS = st.builds(Load, st.floats(0.0, 1e5), st.integers(0, 100), st.floats(0.0, 1e4))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any pool under any policy, with any prefix held anywhere."""
    drawn = draw(st.lists(ENDPOINTS, min_size=1, max_size=len(NAMES)))
    endpoints = tuple(
        msgspec.structs.replace(each, id=name, destination=f"10.0.0.{at}:80")
        for at, (name, each) in enumerate(zip(NAMES, drawn, strict=False))
    )
    prompt = draw(st.floats(1.0, 1e5))
    matched = draw(st.dictionaries(st.sampled_from(NAMES), st.floats(1.0, 1e5), max_size=8))
    ask = Ask(
        prompt, matched, draw(st.integers(0, 2**64 - 1)), turn=draw(st.integers(0, 100)), n=draw(st.integers(1, 4))
    )
    subset = draw(st.none() | st.frozensets(st.sampled_from([each.destination for each in endpoints])))
    pool = Pool("main", draw(st.sampled_from(sorted(POLICIES))), endpoints)
    weights = Weights(candidates=draw(st.integers(1, 32)), load_weight=draw(st.floats(0.1, 4.0)))
    return Case(ask, pool, weights, subset)


def taken_apart(case: Case, pinned: str = "", loads: Mapping[str, Load] | None = None) -> list[CandidateCost]:
    """The costs under these loads, idle where none is given; the prediction is a text-book one."""
    known = loads or {}
    return costs(
        case,
        pinned,
        lambda each: known.get(each, IDLE),
        lambda each, uncached, backlog: (backlog + uncached) / each.rate,
    )


@given(case=cases(), load=LOADS)
def test_terms_add_up_to_what_the_choice_went_by(case: Case, load: Load) -> None:
    """Every candidate of the plan stands there in its order, with the plan's price and its share of the load."""
    plan = case.plan()
    weighed = [each for each in taken_apart(case, loads=dict.fromkeys(NAMES, load)) if not each.dropped]
    assert [each.endpoint for each in weighed] == [each.endpoint.id for each in plan.candidates]
    for each, priced in zip(weighed, plan.candidates, strict=True):
        shared = (
            load.backlog_tokens / priced.endpoint.rate * 1000 * plan.backlog_weight
            + load.running * plan.running_ms
            + load.output_tokens * plan.output_ms
        )
        assert each.cost_ms is not None
        assert math.isclose(each.cost_ms, priced.static_ms + shared, rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(each.cost_ms, sum(each.terms.values()), rel_tol=1e-9, abs_tol=1e-9)
        assert each.uncached_tokens == priced.uncached
        assert each.predicted_ttft_ms == (load.backlog_tokens + priced.uncached) / priced.endpoint.rate


@given(case=cases())
def test_every_endpoint_of_the_pool_is_told_once(case: Case) -> None:
    """Who was not weighed has a reason: a filter's, or that others were cheaper."""
    told = taken_apart(case)
    assert sorted(each.endpoint for each in told) == sorted(each.id for each in case.pool.endpoints)
    eligible = {each.id for each in case.plan().eligible}
    for each in told:
        assert each.dropped in {"", BEYOND} if each.endpoint in eligible else each.dropped not in {"", BEYOND}
        assert bool(each.dropped) == (each.cost_ms is None) == (each.predicted_ttft_ms is None)
        assert 0.0 <= each.matched_tokens <= case.ask.prompt_tokens


def pool(*endpoints: Endpoint, policy: str = "predicted_ttft") -> Pool:
    """A pool of these."""
    return Pool("main", policy, endpoints)


def endpoint(name: str, **more: Any) -> Endpoint:
    """An endpoint at 1,000 tokens a second."""
    return Endpoint(name, f"{name}:80", 1000.0, **more)


def test_filters_say_why() -> None:
    """The reason is the filter's own word, hard rules before soft ones."""
    members = pool(
        endpoint("fine"),
        endpoint("asleep", asleep=True, draining=True),
        endpoint("gone", reachable=False),
        endpoint("leaving", draining=True),
        endpoint("elsewhere"),
    )
    subset = frozenset({"fine:80", "asleep:80", "gone:80", "leaving:80"})
    told = {each.endpoint: each.dropped for each in taken_apart(Case(Ask(10.0), members, Weights(), subset))}
    assert told == {
        "fine": "",
        "asleep": "asleep",
        "gone": "unreachable",
        "leaving": "draining",
        "elsewhere": "outside_subset",
    }


def test_terms_have_names() -> None:
    """The default policy's cost is told by its parts, each in milliseconds."""
    weights = Weights(prefill_weight=2.0, running_ms=2.0, output_ms=0.5)
    case = Case(Ask(1000.0, {"a": 512.0}), pool(endpoint("a"), endpoint("b")), weights, None)
    told = {each.endpoint: each for each in taken_apart(case, loads={"b": Load(500.0, 3, 8.0)})}
    none = {"kv_pressure": 0.0, "silence": 0.0, "busy": 0.0}
    assert told["a"].terms == {"prefill": 976.0, **none, "backlog": 0.0, "running": 0.0, "outputs": 0.0}
    assert told["b"].terms == {"prefill": 2000.0, **none, "backlog": 500.0, "running": 6.0, "outputs": 4.0}
    assert (told["a"].matched_tokens, told["a"].uncached_tokens) == (512.0, 488.0)


def test_what_a_policy_does_not_count_is_no_term() -> None:
    """A rotation knows its order and nothing of load."""
    case = Case(Ask(10.0, turn=1), pool(endpoint("a"), endpoint("b"), policy="round_robin"), Weights(), None)
    told = taken_apart(case, loads=dict.fromkeys("ab", Load(500.0, 3, 8.0)))
    assert [(each.endpoint, set(each.terms)) for each in told] == [("b", {"place"}), ("a", {"place"})]
    assert told[0].cost_ms == 0.0


def test_load_that_is_not_known_is_not_made_up() -> None:
    """Without the load there are the terms of local knowledge, and no sum."""
    case = Case(Ask(1000.0), pool(endpoint("a")), Weights(prefill_weight=2.0), None)
    (told,) = costs(case, "", lambda _: None, lambda *_: 1.0)
    assert told.terms == {"prefill": 2000.0, "kv_pressure": 0.0, "silence": 0.0, "busy": 0.0}
    assert told.cost_ms is told.predicted_ttft_ms is None


@pytest.mark.parametrize("pinned", ["", "d"])
def test_the_pinned_endpoint_is_weighed_whatever_it_costs(pinned: str) -> None:
    """Past the number of candidates it comes first among them, as the second reservation has it."""
    members = pool(*map(endpoint, "abcd"))
    case = Case(Ask(1000.0, {"a": 900.0, "b": 900.0}), members, Weights(candidates=2), None)
    weighed = [each.endpoint for each in taken_apart(case, pinned) if not each.dropped]
    assert weighed == [*pinned, *(each.endpoint.id for each in case.plan().candidates)]
    assert set(weighed) == {"a", "b", *pinned}


def test_a_pin_to_an_endpoint_that_may_not_serve_adds_nobody() -> None:
    """Its row gives the filter's reason."""
    case = Case(Ask(10.0), pool(endpoint("a"), endpoint("b", asleep=True)), Weights(), None)
    assert {each.endpoint: each.dropped for each in taken_apart(case, "b")} == {"a": "", "b": "asleep"}
    assert case.with_pinned(case.plan(), "b") == chooser.plan(case.ask, case.pool, case.weights).candidates
