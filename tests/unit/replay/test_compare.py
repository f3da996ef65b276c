"""Policies side by side: the same rows on the same engines, at a pace that keeps them as busy as was asked for."""

import msgspec
import pytest

from extproc.config import Routing
from extproc.errors import ConfigError
from extproc.replay import compare as comparing
from extproc.replay.arguments import ORACLE, POLICIES
from extproc.replay.compare import Compared, at_load, compare, config_of, engine_of, replay
from extproc.replay.generate import generated
from extproc.replay.routed import POOL
from extproc.replay.rows import Row, Trace

FEW = Compared(policies=(), engines=3, regret=False)


def prompts(count: int, gap_s: float, *, think_s: float = 0.0) -> Trace:
    """Prompts of 2,000 tokens that share nothing; with a think time, each waits for the answer before."""
    rows = [
        Row(
            think_s if think_s and n else n * gap_s,
            n - 1 if think_s else -1,
            2000,
            20,
            [n << 32 | block for block in range(2000 // 64)],
        )
        for n in range(count)
    ]
    return Trace("prompts", 64, rows)


def test_policies_are_compared_in_the_order_given_on_the_same_rows() -> None:
    """Every policy, the oracle among them, answers the whole trace; the watcher hears each before it runs."""
    watched: list[str] = []
    trace = generated("shared_prefixes", 1, seconds=3.0)
    results = compare(trace, msgspec.structs.replace(FEW, policies=POLICIES[::-1], regret=True), watched.append)
    assert watched == list(results) == list(POLICIES[::-1])
    assert {result.requests for result in results.values()} == {trace.requests}
    assert 0.0 <= (results[ORACLE].regret_ms or 0.0) <= 0.5
    assert results["round_robin"].regret_ms is not None
    assert results["round_robin"].regret_ms > 0.0
    assert len({result.ttft_ms for result in results.values()}) > 3


def test_engines_have_the_blocks_of_the_trace_and_the_cache_that_was_asked_for() -> None:
    """One block is reserved, as in vLLM; a cache that is smaller than a block is refused with the remedy."""
    trace = prompts(1, 1.0)
    engine = engine_of(trace, 98_304)
    assert (engine.block_size, engine.capacity_tokens) == (64, 98_304)
    with pytest.raises(ConfigError, match=r"--kv-tokens 63: .* write 64 or more"):
        engine_of(trace, 63)


def test_the_policy_replaces_that_of_the_weights() -> None:
    """Everything else of the routing stays; endpoints are as many as the engines."""
    routing = Routing(policy="round_robin", hit_weight=7.0)
    config = config_of("weighted", msgspec.structs.replace(FEW, routing=routing))
    assert (config.policy_of(POOL), config.routing.hit_weight) == ("weighted", 7.0)
    assert len(config.pools[POOL].endpoints) == 3
    with pytest.raises(ConfigError, match="policy `fastest` does not exist"):
        config_of("fastest", FEW)


@pytest.mark.parametrize("busy", [0.3, 0.8])
@pytest.mark.parametrize("gap_s", [0.0004, 0.04, 4.0])
def test_arrivals_are_sped_up_or_down_until_engines_are_as_busy_as_asked(gap_s: float, busy: float) -> None:
    """Whatever the pace was: at the one found, round robin's engines are busy for that share, to a hundredth or two."""
    trace, factor = at_load(prompts(300, gap_s), busy, FEW)
    assert replay(trace, "round_robin", FEW).busy_share == pytest.approx(busy, abs=0.011)
    assert trace.rows[100].at_s == pytest.approx(100 * gap_s / factor)


def test_clients_think_as_long_at_any_load() -> None:
    """Only arrivals change: a person does not read faster because more of them come."""
    talks = generated("multi_turn", 1, seconds=10.0)
    trace, factor = at_load(talks, 0.6, FEW)
    assert factor != 1.0
    assert replay(trace, "round_robin", FEW).busy_share == pytest.approx(0.6, abs=0.011)
    for before, after in zip(talks.rows, trace.rows, strict=True):
        assert after.at_s == (before.at_s if before.after >= 0 else pytest.approx(before.at_s / factor))


def test_a_load_that_no_pace_reaches_is_refused_with_the_remedy() -> None:
    """One client that waits for each answer keeps one engine of three busy at best."""
    with pytest.raises(ConfigError, match=r"--busy 0\.9: at no speed .* the nearest; write that share, or .* --speed"):
        at_load(prompts(30, 0.1, think_s=0.5), 0.9, FEW)


def test_a_long_trace_is_calibrated_on_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of replays would go by otherwise; the factor holds for the whole trace."""
    monkeypatch.setattr(comparing, "_CALIBRATED_ROWS", 100)
    long, short = at_load(prompts(400, 0.04), 0.5, FEW), at_load(prompts(100, 0.04), 0.5, FEW)
    assert long[1] == short[1]
    assert long[0].requests == 400
