"""The demo as a newcomer runs it, held to what it is there to show."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def shown() -> dict[str, dict[str, object]]:
    """What `warmpath demo --json` prints: one object and nothing else, with exit code 0."""
    command = [sys.executable, "-m", "extproc", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    policies: dict[str, dict[str, object]] = json.loads(done.stdout)["policies"]
    return policies


def number(value: object) -> float:
    """A JSON number."""
    assert isinstance(value, int | float)
    return float(value)


def test_both_policies_answered_the_same_requests_without_an_error(shown: dict[str, dict[str, object]]) -> None:
    """Every request of the workload is answered under either policy."""
    assert set(shown) == {"round_robin", "predicted_ttft"}
    assert [policy["errors"] for policy in shown.values()] == [0, 0]
    assert len({number(policy["requests"]) for policy in shown.values()}) == 1


def test_the_default_policy_finds_twice_as_much_in_the_caches(shown: dict[str, dict[str, object]]) -> None:
    """Cached share by the engines' own report: at least twice round robin's."""
    share = {name: number(policy["cached_share"]) for name, policy in shown.items()}
    assert share["predicted_ttft"] >= 2 * share["round_robin"] > 0


def test_the_default_policy_halves_the_time_to_the_first_token(shown: dict[str, dict[str, object]]) -> None:
    """The 90th percentile of both runs, one after the other on the same machine: at most half."""
    p90 = {}
    for name, policy in shown.items():
        ttft = policy["ttft_ms"]
        assert isinstance(ttft, dict)
        p90[name] = number(ttft["p90"])
    assert 0 < p90["predicted_ttft"] <= p90["round_robin"] / 2


def test_every_figure_that_was_promised_is_there(shown: dict[str, dict[str, object]]) -> None:
    """The shape that scripts may rely on."""
    for policy in shown.values():
        assert {"requests", "errors", "cached_share", "ttft_ms", "tpot_ms", "busy_imbalance", "seconds"} <= set(policy)
        assert isinstance(policy["ttft_ms"], dict)
        assert isinstance(policy["tpot_ms"], dict)
        assert {"p50", "p90", "p99", "mean"} <= set(policy["ttft_ms"])
        assert {"p50", "p99"} <= set(policy["tpot_ms"])
