"""What Warmpath adds to the time of a request, against the same Envoy without it.

An ext_proc server that only echoes stands beside: what it adds is the price of asking anybody over grpcio at all.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from extproc.sim.report import percentile
from tests.bench.gateway import ENGINES, gateways
from tests.bench.processes import run
from tests.bench.report import Check, Findings, Row, Scale, middle
from tests.bench.traffic import Traffic

_SIZE = 1024
_RATE = 200.0
_BUDGET_P50_MS = 1.5
_BUDGET_P99_MS = 5.0

_T = TypeVar("_T")
_Times = list[float]
_Send = Callable[[Traffic, Sequence[bytes], int], Awaitable[list[float]]]


def bench(scale: Scale) -> Findings:
    """Rounds of the three gateways in turns: one connection, then an open loop."""
    findings = Findings(f"ms a request of 1 KB, {ENGINES} endpoints that answer at once, against plain Envoy")
    run(_measure(findings, rounds=scale.pick(15, 5), requests=scale.pick(400, 150)))
    findings.notes.append("adds: minus plain of the same round; figures are medians of the rounds")
    findings.notes.append(
        "open loop: Poisson arrivals, timed from when a request was due; client and engines share the cores"
    )
    return findings


async def _measure(findings: Findings, rounds: int, requests: int) -> None:
    loads: list[tuple[str, int, _Send]] = [
        ("1 connection", 1, lambda traffic, made, _seed: traffic.closed(made)),
        (f"{_RATE:.0f} requests/s", 64, lambda traffic, made, seed: traffic.open(made, _RATE, seed)),
    ]
    async with gateways(["warmpath", "echo", "plain"]) as all_three:
        for load, connections, send in loads:
            times: dict[str, list[_Times]] = {gateway.name: [] for gateway in all_three}
            for at in range(rounds + 1):
                # Who goes first changes from round to round, so that none always meets the warmer machine.
                for gateway in [*all_three[at % 3 :], *all_three[: at % 3]]:
                    traffic = Traffic(gateway.url, connections, _SIZE)
                    made = traffic.requests(requests)
                    async with traffic:
                        took = await send(traffic, made, at)
                    if at:  # the first round warms up
                        times[gateway.name].append(sorted(1000 * each for each in took))
            _add(findings, load, times)


def _add(findings: Findings, load: str, times: dict[str, list[_Times]]) -> None:
    for name, rounds in times.items():
        findings.rows.append(_row(load, name, rounds, _at))
    plain = times["plain"]
    for name in ("warmpath", "echo"):
        pairs = list(zip(times[name], plain, strict=True))
        findings.rows.append(
            _row(load, f"{name} adds", pairs, lambda two, share: _at(two[0], share) - _at(two[1], share))
        )
    ours = next(row for row in findings.rows if row["load"] == load and row["gateway"] == "warmpath adds")
    findings.checks += [
        Check(f"added p50, {load}", float(ours["p50_ms"]), _BUDGET_P50_MS, "ms"),
        Check(f"added p99, {load}", float(ours["p99_ms"]), _BUDGET_P99_MS, "ms"),
    ]


def _row(load: str, name: str, rounds: Sequence[_T], of: Callable[[_T, float], float]) -> Row:
    """Medians over rounds of what `of` gives for each share."""
    shares = {f"p{share * 100:.0f}_ms": middle([of(each, share) for each in rounds]) for share in (0.5, 0.9, 0.99)}
    return {"load": load, "gateway": name} | shares


def _at(times: _Times, share: float) -> float:
    return percentile(times, share) or 0.0
