"""Each policy: what an endpoint costs by local knowledge, what the store adds to it, and whom that favours."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.choose import chooser, policies
from extproc.choose.chooser import Plan
from extproc.choose.fleet import Endpoint, Pool
from extproc.choose.policies import PLACE_MS, POLICIES, Ask, Weights
from extproc.choose.scorers import HIT_MS

ENDPOINTS = tuple(Endpoint(f"10.0.0.{at}:80", f"10.0.0.{at}:80", 10_000.0) for at in range(9))
EIGHT = ENDPOINTS[:8]
SESSIONS = range(1, 10_001)
WEIGHTS = Weights()


def pool(policy: str, endpoints: Sequence[Endpoint] = EIGHT) -> Pool:
    """A pool of these endpoints under a policy."""
    return Pool("main", policy, tuple(endpoints))


def terms(policy: str, ask: Ask, endpoint: Endpoint, weights: Weights = WEIGHTS, position: int = 0) -> dict[str, float]:
    """The named costs of one endpoint."""
    return dict(policies.terms(POLICIES[policy], ask, endpoint, ask.uncached(endpoint), weights, position))


def best(plan: Plan, backlog: Mapping[str, float] | None = None, outputs: Mapping[str, float] | None = None) -> str:
    """The endpoint of least cost when the store knows these backlogs and expected outputs, in tokens."""
    waiting, expected = backlog or {}, outputs or {}

    def cost(at: int) -> float:
        each = plan.candidates[at]
        drained_ms = waiting.get(each.endpoint.id, 0.0) / each.endpoint.rate * 1000 * plan.backlog_weight
        return each.static_ms + drained_ms + expected.get(each.endpoint.id, 0.0) * plan.output_ms

    return plan.candidates[min(range(len(plan.candidates)), key=cost)].endpoint.id


def homes(endpoints: Sequence[Endpoint]) -> list[str]:
    """Where `session_hash` sends each of ten thousand sessions."""
    members = pool("session_hash", endpoints)
    return [best(chooser.plan(Ask(10, home=session), members, Weights())) for session in SESSIONS]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("predicted_ttft", (1.0, 3 * 2.0, 0.1, 3.0, True)),
        ("weighted", (0.5, 0.5 * 3 * 2.0, 0.5 * 0.1, 3.0, True)),
        ("least_tokens", (1.0, 0.0, 0.0, 0.0, False)),
        ("session_hash", (0.0, 0.0, 0.0, 0.0, False)),
        ("round_robin", (0.0, 0.0, 0.0, 0.0, False)),
    ],
)
def test_what_the_store_adds(policy: str, expected: tuple[float, float, float, float, bool]) -> None:
    """Backlog, sequences (as often as answers are asked for), outputs, ties and pins: each as its policy says."""
    weights = Weights(running_ms=2.0, output_ms=0.1, load_weight=0.5, tie_ms=3.0)
    plan = chooser.plan(Ask(100, n=3), pool(policy), weights)
    told = (plan.backlog_weight, plan.running_ms, plan.output_ms, plan.tie_ms, plan.sticky)
    assert told == pytest.approx(expected)


def test_predicted_ttft_prices_the_uncached_prefill_and_the_pressure_on_the_cache() -> None:
    """1,000 tokens of which 512 are cached, at 10,000 tokens/s and weight 1.5; KV usage half-way past the watermark."""
    endpoint = Endpoint("a", "a:1", 10_000.0, kv_usage=0.95)
    weights = Weights(prefill_weight=1.5, kv_watermark=0.9, kv_penalty_ms=500.0)
    priced = terms("predicted_ttft", Ask(1000, {"a": 520.0}), endpoint, weights)
    expected = {"prefill": 1.5 * 488 / 10_000 * 1000, "kv_pressure": 250.0, "silence": 0.0, "busy": 0.0}
    assert priced == pytest.approx(expected)


def test_weighted_prices_the_share_that_is_missing() -> None:
    """A quarter of the prompt missing costs a quarter of `hit_weight` seconds, whatever prompt and speed are."""
    for prompt, rate in ((1024.0, 10_000.0), (65_536.0, 500.0)):
        endpoint = Endpoint("a", "a:1", rate)
        priced = terms("weighted", Ask(prompt, {"a": prompt * 0.75}), endpoint, Weights(hit_weight=0.4))
        assert priced == pytest.approx({"miss": 0.4 * HIT_MS * 0.25, "kv_pressure": 0.0, "silence": 0.0, "busy": 0.0})


@pytest.mark.parametrize("policy", ["predicted_ttft", "weighted", "least_tokens"])
def test_policies_that_go_by_load_pass_over_a_silent_endpoint(policy: str) -> None:
    """Its backlog drained while it stood still: without that term it would look idle, and the others loaded."""
    silent, works = Endpoint("silent", "s:1", 10_000.0, silent_ms=4000.0), Endpoint("works", "w:1", 10_000.0)
    assert terms(policy, Ask(1000.0), silent, Weights())["silence"] == 4000.0
    for turn in range(8):
        plan = chooser.plan(Ask(1000.0, first_block=turn, turn=turn), pool(policy, (silent, works)), Weights())
        assert best(plan, backlog={"works": 2000.0}) == "works"


def test_weighted_costs_nothing_for_an_empty_prompt() -> None:
    """A request without a prompt misses nothing."""
    assert terms("weighted", Ask(0.0), EIGHT[0])["miss"] == 0.0


@pytest.mark.parametrize(
    ("hit_weight", "load_weight", "goes"),
    [(1.0, 1.0, "warm"), (1.0, 4.0, "idle"), (0.2, 1.0, "idle"), (0.2, 0.1, "warm"), (1.0, 0.0, "warm")],
)
def test_weighted_trades_hits_against_load(hit_weight: float, load_weight: float, goes: str) -> None:
    """A warm endpoint half a second behind is taken as long as the hit weighs more than that load does."""
    warm, idle = Endpoint("warm", "w:1", 10_000.0), Endpoint("idle", "i:1", 10_000.0)
    ask = Ask(2049, {"warm": 2049.0})
    plan = chooser.plan(
        ask, pool("weighted", (warm, idle)), Weights(hit_weight=hit_weight, load_weight=load_weight, output_ms=0.0)
    )
    assert best(plan, backlog={"warm": 5000.0}) == goes


def test_predicted_ttft_leaves_a_warm_endpoint_whose_answers_are_long() -> None:
    """Output tokens in flight cost `output_ms` each: 200 ms of prefill saved do not outweigh 300 ms of decoding."""
    warm, idle = Endpoint("warm", "w:1", 10_000.0), Endpoint("idle", "i:1", 10_000.0)
    ask = Ask(2001, {"warm": 2001.0})
    plan = chooser.plan(ask, pool("predicted_ttft", (warm, idle)), Weights(prefill_weight=1.0, output_ms=0.1))
    assert best(plan, outputs={"warm": 1500.0}) == "warm"
    assert best(plan, outputs={"warm": 3000.0}) == "idle"


def test_least_tokens_goes_by_backlog_alone() -> None:
    """Neither caches nor KV pressure count: the endpoint with the shortest backlog wins, by time to drain it."""
    ask = Ask(4000, {EIGHT[0].id: 4000.0})
    fast = Endpoint("fast", "f:1", 40_000.0, kv_usage=1.0)
    plan = chooser.plan(ask, pool("least_tokens", (*EIGHT, fast)), Weights())
    assert {each.static_ms for each in plan.candidates} == {0.0}
    assert best(plan, {each.id: 2000.0 for each in EIGHT} | {"fast": 4000.0}) == "fast"
    assert best(plan, {each.id: 2000.0 for each in EIGHT[1:]} | {"fast": 9000.0, EIGHT[0].id: 1999.0}) == EIGHT[0].id


def test_least_tokens_rotates_while_all_are_equal() -> None:
    """On an idle pool successive requests start at successive endpoints."""
    first = [best(chooser.plan(Ask(10, turn=turn), pool("least_tokens"), Weights())) for turn in range(16)]
    assert first == [each.id for each in (*EIGHT, *EIGHT)]


def test_round_robin_rotates_exactly() -> None:
    """Over whole rounds every endpoint has exactly as many requests as any other, in one fixed order."""
    picks = [best(chooser.plan(Ask(10, turn=turn), pool("round_robin"), Weights())) for turn in range(80)]
    assert picks == [each.id for each in EIGHT] * 10


def test_round_robin_passes_over_who_may_not_serve() -> None:
    """The rotation is over those that may serve: nobody gets the turns of the one that sleeps."""
    members = (*EIGHT[:3], Endpoint("asleep", "s:1", 10_000.0, asleep=True))
    picks = Counter(
        best(chooser.plan(Ask(10, turn=turn), pool("round_robin", members), Weights())) for turn in range(30)
    )
    assert picks == {each.id: 10 for each in EIGHT[:3]}


def test_round_robin_ranks_by_place_and_nothing_else() -> None:
    """A place costs more than any load: caches and backlogs never change the order."""
    assert terms("round_robin", Ask(10, {EIGHT[0].id: 10.0}), EIGHT[0], position=3) == {"place": 3 * PLACE_MS}


def test_a_session_keeps_its_home_and_sessions_are_even() -> None:
    """Equal homes go to one endpoint, and ten thousand put none of eight endpoints more than a tenth off its share."""
    first = homes(EIGHT)
    assert first == homes(EIGHT)
    counts = Counter(first)
    assert len(counts) == 8
    assert all(abs(count - 1250) <= 125 for count in counts.values())


def test_an_endpoint_that_joins_moves_its_own_share_of_sessions_and_no_other() -> None:
    """Nobody moves between old endpoints, and one in nine sessions (2 % more at the most) goes to the ninth."""
    moved = [(old, new) for old, new in zip(homes(EIGHT), homes(ENDPOINTS), strict=True) if old != new]
    assert {new for _, new in moved} == {ENDPOINTS[8].id}
    assert len(moved) / len(SESSIONS) <= 1 / 9 + 0.02


def test_an_endpoint_that_leaves_moves_its_own_sessions_and_no_other() -> None:
    """The sessions of the one that left go to all others; everybody else's stay."""
    gone = ENDPOINTS[4].id
    left = [each for each in ENDPOINTS if each.id != gone]
    moved = [(old, new) for old, new in zip(homes(ENDPOINTS), homes(left), strict=True) if old != new]
    assert {old for old, _ in moved} == {gone}
    assert {new for _, new in moved} == {each.id for each in left}


MEMBERS = st.lists(
    st.builds(
        Endpoint,
        id=st.integers(0, 60).map(lambda at: f"e{at}:80"),
        destination=st.integers(0, 60).map(lambda at: f"10.0.0.{at}:80"),
        rate=st.sampled_from([4000.0, 8000.0, 20_000.0]),
        running=st.integers(0, 3),
        kv_usage=st.sampled_from([0.0, 0.95, 1.0]),
        reachable=st.booleans(),
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda endpoint: endpoint.id,
)


@given(MEMBERS, st.data())
def test_the_order_in_which_endpoints_are_listed_changes_nothing(members: list[Endpoint], data: st.DataObject) -> None:
    """Candidates, their order and their costs are the same for any listing; a rotation starts elsewhere at most."""
    matched = data.draw(st.dictionaries(st.sampled_from([each.id for each in members]), st.floats(0.0, 4000.0)))
    ask = Ask(
        4000.0, matched, first_block=data.draw(st.integers(0, 2**64 - 1)), home=data.draw(st.integers(0, 2**64 - 1))
    )
    shuffled = data.draw(st.permutations(members))
    for name, policy in POLICIES.items():
        one = chooser.plan(ask, pool(name, members), Weights(candidates=8))
        other = chooser.plan(ask, pool(name, shuffled), Weights(candidates=8))
        assert one.best_cached == other.best_cached
        if policy.order != "turn":
            assert one.candidates == other.candidates


@given(MEMBERS, st.sampled_from(sorted(POLICIES)), st.integers(0, 100))
def test_the_price_is_the_sum_of_its_terms(members: list[Endpoint], name: str, turn: int) -> None:
    """What the store decides among is what `terms` takes apart, endpoint by endpoint, and never negative."""
    ask = Ask(4000.0, {members[0].id: 1500.0}, turn=turn)
    plan = chooser.plan(ask, pool(name, members), Weights(candidates=100))
    for position, each in enumerate(plan.candidates):
        assert each.static_ms == sum(terms(name, ask, each.endpoint, position=position).values())
        assert each.static_ms >= 0.0


def test_a_rare_prefix_stays_where_a_hot_one_spreads() -> None:
    """One endpoint holds 2,000 of 2,400 tokens; the 100 ms of prefill that the other lacks are weighed 1 to 3."""
    holder, other = Endpoint("a", "a:1", 20_000.0), Endpoint("b", "b:1", 20_000.0)
    gaps = {}
    for rarity in (0.0, 0.5, 1.0):
        ask = Ask(2400.0, {"a": 2000.0}, rarity=rarity)
        priced = {
            each.endpoint.id: each.static_ms
            for each in chooser.plan(ask, pool("predicted_ttft", [holder, other]), Weights()).candidates
        }
        gaps[rarity] = priced["b"] - priced["a"]
    assert gaps == pytest.approx({0.0: 100.0, 0.5: 200.0, 1.0: 300.0}, rel=0.01)


def test_requests_that_wait_at_a_full_cache_raise_its_price() -> None:
    """At 95 % of the cache the penalty is half; each of up to three waiting requests adds as much again."""
    for waiting, factor in ((0, 1), (1, 2), (3, 4), (20, 4)):
        full = Endpoint("a", "a:1", 20_000.0, kv_usage=0.95, waiting=waiting)
        assert terms("predicted_ttft", Ask(0.0), full)["kv_pressure"] == pytest.approx(250.0 * factor)
