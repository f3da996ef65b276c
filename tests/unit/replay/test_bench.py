"""`warmpath bench` sets up the stack that it was asked for, and says of a run only what is known."""

import argparse
import json
from pathlib import Path

import pytest

from extproc import reload
from extproc.cli import main
from extproc.config import Routing, SessionSettings
from extproc.replay import arguments, asked, printed
from extproc.replay.bench import Benched, doubts, stack_of, summarize, table
from extproc.replay.compare import Compared
from extproc.replay.rows import Row, Trace
from extproc.replay.sending import Sent
from extproc.replay.summary import Replayed
from extproc.replay.told import Told
from extproc.sim import report
from extproc.sim.client import Failure
from extproc.sim.load import Outcome, Run


def outcome(end_s: float, failure: Failure | None = None) -> Outcome:
    """A stream that was sent at second 10 and, unless it failed, began half a second later."""
    answered = failure is None
    return Outcome(
        kind="t",
        session="",
        turn=0,
        stream=True,
        sent_s=10.0,
        first_byte_s=10.5,
        first_s=10.5 if answered else None,
        end_s=end_s,
        status=200 if answered else 503,
        failure=failure,
        prompt_tokens=1000 if answered else 0,
        cached_tokens=400 if answered else 0,
        output_tokens=11 if answered else 0,
    )


def benched(lag_s: float = 0.0, told: Told = Told(5, 900.0, 0.01, 0.2)) -> Benched:  # noqa: B008 - a frozen value
    """Two answered rows and a failed one within ten seconds."""
    run = Run(10.0, 20.0, (outcome(11.5), outcome(20.0), outcome(12.0, Failure.STATUS)))
    return summarize(Sent(run, [lag_s] * 3), report.summarize(run, {"a": 300.0, "b": 100.0}), told)


def test_a_summary_holds_what_clients_engines_and_sidecar_say() -> None:
    """Shares are of answered rows; the rate of output is by the duration of the whole run."""
    result = benched()
    assert (result.requests, result.errors, result.failures) == (3, 1, {"status": 1})
    assert result.cached_share == pytest.approx(0.4)
    assert result.predicted_cached_share == pytest.approx(0.45)
    assert result.ttft_ms.mean == pytest.approx(500.0)
    assert result.tpot_ms.p50 == pytest.approx((100.0 + 950.0) / 2)
    assert result.whole_ms == pytest.approx((1500.0 + 10_000.0) / 2)
    assert result.busy_imbalance == pytest.approx(1.5)
    assert result.output_tokens_per_s == pytest.approx(2.2)
    assert (result.moved_sessions, result.cached_error, result.ttft_error) == (5, 0.01, 0.2)


def test_a_run_in_which_nothing_was_answered_has_no_times() -> None:
    """Means of nothing are absent, not 0."""
    run = Run(10.0, 10.0, (outcome(12.0, Failure.STATUS),))
    result = summarize(Sent(run, []), report.summarize(run, {"a": 0.0}), Told(0, None))
    assert (result.whole_ms, result.ttft_ms.mean, result.predicted_cached_share) == (None, None, None)
    assert (result.cached_share, result.output_tokens_per_s) == (0.0, 0.0)
    assert "-" in table({"round_robin": result})


def test_every_figure_of_a_replay_has_its_place() -> None:
    """Scripts read both commands alike; what only a replay can know is null."""
    trace = Trace("t", 64, [Row(0.0, -1, 70, 5, (1,))])
    shown = json.loads(printed.to_json(trace, 2.0, {"round_robin": benched()}))
    policy = shown["policies"]["round_robin"]
    assert set(Replayed.__struct_fields__) - {"wall_s"} <= set(policy)
    assert {name for name, value in policy.items() if value is None} == {"busy_share", "precise_share", "regret_ms"}
    assert shown["trace"]["speed"] == 2.0


def test_figures_of_a_late_sender_are_called_into_doubt() -> None:
    """The policy and the lateness are named, and what to do; punctual runs are not mentioned."""
    (line,) = doubts({"round_robin": benched(0.001), "least_tokens": benched(0.2)})
    assert line.startswith("least_tokens: the sender was late")
    assert "200 ms" in line
    assert "--speed" in line


def test_the_stack_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    """Policy, weights, number of engines and their cache reach the configuration and the engines' arguments."""
    routing = Routing(prefill_weight=2.0, session=SessionSettings(break_out_ms=7.0))
    wanted = Compared(policies=["least_tokens"], engines=3, kv_tokens=4096, routing=routing)
    settings = stack_of(tmp_path, "least_tokens", wanted)
    config = reload.read(settings.path, list(settings.settings))
    assert config.policy_of("engines") == "least_tokens"
    assert config.routing.prefill_weight == 2.0
    assert config.routing.session.break_out_ms == 7.0
    assert settings.engines == 3
    # One block of the simulated engine is reserved.
    assert settings.engine_arguments == ("--blocks", str(4096 // 16 + 1))


def test_only_a_replay_has_an_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    """Asking for it is a wrong use that names what there is, and nothing is started."""
    assert main(["bench", "shared_prefixes", "--policies", "oracle"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("warmpath: --policies")
    assert "predicted_ttft" in message
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "oracle" not in capsys.readouterr().out


def test_a_cache_too_small_for_a_block_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """The line that a replay writes."""
    told = []
    for command in ("bench", "replay"):
        assert main([command, "shared_prefixes", "--kv-tokens", "1", "--json"]) == 2
        told.append(capsys.readouterr())
    assert told[0] == told[1]
    assert told[0].err.startswith("warmpath: --kv-tokens 1: such a cache holds no block")


def asked_for(*words: str) -> argparse.Namespace:
    """The arguments of the command, as it reads them."""
    parser = argparse.ArgumentParser()
    arguments.add_bench_arguments(parser)
    return parser.parse_args(words)


def test_the_command_defaults_to_what_a_small_machine_carries() -> None:
    """Fewer engines and rows than a replay, and the three policies worth the time."""
    told = asked_for("shared_prefixes")
    assert (told.engines, told.limit) == (4, 400)
    assert told.policies.split(",") == ["round_robin", "least_tokens", "predicted_ttft"]


@pytest.mark.parametrize(("words", "expected"), [((), 0.25), (("--speed", "3"), 3.0)])
def test_a_workload_arrives_as_fast_as_the_engines_are_many(words: tuple[str, ...], expected: float) -> None:
    """Two of the eight engines that it is meant for get a quarter of the arrivals, unless a speed is asked for."""
    told = asked_for("shared_prefixes", "--engines", "2", "--limit", "5", *words)
    wanted = asked.compared(told, ["round_robin", "least_tokens", "predicted_ttft"])
    trace, factor = asked.trace_at_pace(told, wanted, wanted.engines / arguments.WORKLOAD_ENGINES)
    own, _ = asked.trace_at_pace(asked_for("shared_prefixes", "--limit", "5", "--speed", "1"), wanted)
    assert factor == expected
    assert [row.at_s * factor for row in trace.rows] == pytest.approx([row.at_s for row in own.rows])
