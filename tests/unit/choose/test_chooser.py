"""The choice as a function of values: filters, costs, tie order, candidates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.choose import chooser, filters, scorers
from extproc.choose.fleet import Endpoint, Pool
from extproc.choose.policies import POLICIES, Ask, Weights

WEIGHTS = Weights()


def endpoint(name: str, **fields: object) -> Endpoint:
    """An endpoint at 10,000 tokens a second, healthy unless said otherwise."""
    return Endpoint(id=name, destination=f"{name}:1", **{"rate": 10_000.0, **fields})  # type: ignore[arg-type]


def pool(*endpoints: Endpoint, policy: str = "predicted_ttft") -> Pool:
    """A pool of these endpoints."""
    return Pool("main", policy, endpoints)


def fleet_of(size: int) -> Pool:
    """A pool of `size` equal endpoints."""
    return pool(*(endpoint(f"e{index}") for index in range(size)))


class TestFilters:
    """Who may serve at all."""

    def test_soft_reasons_drop_only_while_somebody_is_left(self) -> None:
        """An unreachable endpoint is passed over, but a pool of nothing else is still offered whole."""
        up, down = endpoint("up"), endpoint("down", reachable=False)
        assert filters.usable([up, down]) == [up]
        assert filters.usable([down]) == [down]

    def test_a_sleeping_endpoint_is_never_offered(self) -> None:
        """A sleeping engine takes requests and lets them hang, so it is dropped even when it is the last."""
        assert filters.usable([endpoint("a", asleep=True)]) == []

    def test_the_subset_hint_is_binding(self) -> None:
        """Only destinations of the gateway's subset may serve; an empty subset leaves nobody."""
        a, b = endpoint("a"), endpoint("b")
        assert filters.usable([a, b], frozenset({"b:1"})) == [b]
        assert filters.usable([a, b], frozenset()) == []

    def test_a_draining_endpoint_is_passed_over(self) -> None:
        """A draining endpoint gets nothing new while another one can serve."""
        a, b = endpoint("a", draining=True), endpoint("b")
        assert filters.usable([a, b]) == [b]


class TestScorers:
    """Formulas, on known values."""

    @pytest.mark.parametrize(("prompt", "cached"), [(32, 0), (33, 32), (64, 32), (65, 64), (128, 96), (129, 128)])
    def test_a_repeated_prompt_reuses_whole_blocks_but_never_its_last_token(self, prompt: int, cached: int) -> None:
        """Cached = floor((n - 1) / 32) * 32, as measured on vLLM 0.32 with blocks of 32 tokens."""
        assert scorers.cached_tokens(prompt, prompt, 32) == cached

    @given(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from([1, 16, 32, 128]))
    def test_cached_tokens_never_exceed_what_matched_or_the_prompt(
        self, matched: float, prompt: float, block: int
    ) -> None:
        """Reuse lies between 0 and min(matched, prompt)."""
        assert 0 <= scorers.cached_tokens(matched, prompt, block) <= min(matched, prompt)

    def test_kv_pressure_starts_at_the_watermark(self) -> None:
        """Nothing below the watermark, half of the penalty half-way, all of it at full usage."""
        usage = [scorers.kv_pressure_ms(endpoint("a", kv_usage=u), 0.9, 500.0) for u in (0.9, 0.95, 1.0)]
        assert usage == pytest.approx([0.0, 250.0, 500.0])

    @pytest.mark.parametrize(("waiting", "penalties"), [(0, 1), (1, 2), (3, 4), (20, 4)])
    def test_kv_pressure_grows_with_who_waits_up_to_three(self, waiting: int, penalties: int) -> None:
        """Each request in the queue of a full engine adds as much again; below the watermark none does."""
        full, roomy = (endpoint("a", kv_usage=usage, waiting=waiting) for usage in (0.95, 0.5))
        assert scorers.kv_pressure_ms(full, 0.9, 500.0) == pytest.approx(penalties * 250.0)
        assert scorers.kv_pressure_ms(roomy, 0.9, 500.0) == 0.0


class TestPlan:
    """Candidates and their order."""

    def test_the_warm_endpoint_is_cheapest_by_its_cached_tokens(self) -> None:
        """1,008 of 2,000 tokens cached at 10,000 tokens/s and weight 2: 198.4 ms warm, 400 ms cold."""
        ask = Ask(prompt_tokens=2000, matched_tokens={"a": 1008.0})
        plan = chooser.plan(ask, pool(endpoint("a"), endpoint("b")), Weights(prefill_weight=2.0))
        assert {c.endpoint.id: c.static_ms for c in plan.candidates} == pytest.approx({"a": 198.4, "b": 400.0})

    def test_the_best_overlap_on_offer_is_of_those_that_may_serve(self) -> None:
        """What an endpoint that may not serve has cached is not on offer; whole blocks count, candidates or not."""
        ask = Ask(2000, {"asleep": 2000.0, "busy": 1500.0, "warm": 500.0, "gone": 2000.0})
        members = endpoint("asleep", asleep=True), endpoint("busy", kv_usage=1.0), endpoint("warm"), endpoint("cold")
        plan = chooser.plan(ask, pool(*members), Weights(candidates=1, kv_penalty_ms=1e6))
        assert [each.endpoint.id for each in plan.candidates] == ["warm"]
        assert plan.best_cached == 1500 - 1500 % 16
        assert chooser.plan(Ask(2000), pool(*members), WEIGHTS).best_cached == 0.0

    def test_prompts_that_begin_alike_rank_endpoints_alike(self) -> None:
        """A cold shared prefix gathers: the tie order depends on the first block alone."""
        first = chooser.plan(Ask(1000, first_block=7, turn=1), fleet_of(8), WEIGHTS)
        again = chooser.plan(Ask(9000, first_block=7, turn=2), fleet_of(8), WEIGHTS)
        assert [c.endpoint.id for c in first.candidates] == [c.endpoint.id for c in again.candidates]

    def test_different_beginnings_spread_over_the_pool(self) -> None:
        """800 different first blocks put no endpoint of 8 first more than twice its share."""
        firsts = [
            chooser.plan(Ask(10, first_block=b), fleet_of(8), WEIGHTS).candidates[0].endpoint.id for b in range(800)
        ]
        assert len(set(firsts)) == 8
        assert max(firsts.count(name) for name in set(firsts)) < 200

    def test_one_endpoint_more_moves_only_its_own_share(self) -> None:
        """Rendezvous order: a ninth endpoint takes first places only for itself, and about one in nine."""
        before = [
            chooser.plan(Ask(10, first_block=b), fleet_of(8), WEIGHTS).candidates[0].endpoint.id for b in range(900)
        ]
        after = [
            chooser.plan(Ask(10, first_block=b), fleet_of(9), WEIGHTS).candidates[0].endpoint.id for b in range(900)
        ]
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {"e8"}
        assert 50 < len(moved) < 150

    def test_round_robin_rotates_without_ties_pins_or_load(self) -> None:
        """Each turn starts one endpoint further, and the shared load plays no part."""
        plans = [
            chooser.plan(Ask(10, turn=t), pool(*fleet_of(3).endpoints, policy="round_robin"), WEIGHTS) for t in range(4)
        ]
        assert [min(p.candidates, key=lambda c: c.static_ms).endpoint.id for p in plans] == ["e0", "e1", "e2", "e0"]
        assert all(not p.sticky and not p.backlog_weight and not p.running_ms and not p.tie_ms for p in plans)

    def test_no_endpoint_that_may_serve_gives_no_candidates(self) -> None:
        """An empty plan, not an error: the router turns it into 503."""
        for policy in POLICIES:
            assert not chooser.plan(Ask(10), pool(policy=policy), WEIGHTS).candidates

    def test_saturated_holders_of_a_prefix_do_not_hide_idle_endpoints(self) -> None:
        """With 16 warm but busy endpoints and a few idle cold ones, idle ones are among the candidates."""
        busy = [endpoint(f"warm{i}", running=50, waiting=50) for i in range(16)]
        idle = [endpoint(f"idle{i}") for i in range(4)]
        matched = {e.id: 4000.0 for e in busy}
        plan = chooser.plan(Ask(4096, matched), pool(*busy, *idle), WEIGHTS)
        assert len(plan.candidates) == 16
        assert sum(c.endpoint.id.startswith("idle") for c in plan.candidates) == 4

    @given(st.integers(0, 60), st.integers(1, 32))
    def test_candidates_are_bounded_unique_and_in_tie_order(self, size: int, limit: int) -> None:
        """At most `limit` different candidates, a subsequence of the full tie order."""
        full = [
            c.endpoint.id
            for c in chooser.plan(Ask(10, first_block=3), fleet_of(size), Weights(candidates=100)).candidates
        ]
        kept = [
            c.endpoint.id
            for c in chooser.plan(Ask(10, first_block=3), fleet_of(size), Weights(candidates=limit)).candidates
        ]
        assert len(kept) == min(size, limit) == len(set(kept))
        assert kept == [name for name in full if name in set(kept)]
