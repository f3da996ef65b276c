"""CPU a request of the whole sidecar and of Envoy, against an ext_proc server of the same library that only echoes."""

import time
from collections.abc import Sequence

import msgspec

from tests.bench.gateway import ENGINES, Gateway, gateways
from tests.bench.machine import cpu_s
from tests.bench.processes import run
from tests.bench.report import Check, Findings, Row, Scale, middle, spread
from tests.bench.traffic import Traffic

_BUDGET = 1.4


class Shape(msgspec.Struct, frozen=True):
    """One kind of request.

    Attributes:
        name: what the table calls it.
        size: bytes of a body.
        chunks: events of the streamed answer; 0 for answers in one piece.
        connections: requests under way at once.
        requests: requests in a round.
    """

    name: str
    size: int
    chunks: int
    connections: int
    requests: int


class Cost(msgspec.Struct, frozen=True):
    """What one round cost, microseconds of CPU a request, and requests a second."""

    sidecar_us: float
    envoy_us: float
    rate: float


def bench(scale: Scale) -> Findings:
    """Rounds of the two gateways in turns, for each kind of request."""
    shapes = [
        Shape("1 KB", 1024, 0, 8, scale.pick(1200, 300)),
        Shape("1 KB, one at a time", 1024, 0, 1, scale.pick(600, 150)),
        Shape("64 KB", 65536, 0, 8, scale.pick(600, 150)),
        Shape("200-chunk stream", 1024, 200, 8, scale.pick(64, 32)),
    ]
    findings = Findings(f"µs of CPU a request, {ENGINES} endpoints: Warmpath's worker against an echo server")
    run(_measure(findings, shapes, rounds=scale.pick(9, 3)))
    findings.notes.append("ratio: median over rounds of warmpath / echo in the same round; both run all the time")
    findings.notes.append("the worker with all it does, access log, gossip, snapshots; echo reads the log and drops it")
    return findings


async def _measure(findings: Findings, shapes: Sequence[Shape], rounds: int) -> None:
    async with gateways(["warmpath", "echo"]) as (warmpath, echo):
        for shape in shapes:
            ours, theirs = [], []
            for at in range(rounds + 1):
                # Who goes first alternates, so that neither always meets the warmer machine.
                first, second = (warmpath, echo) if at % 2 else (echo, warmpath)
                costs = {first.name: await _round(first, shape), second.name: await _round(second, shape)}
                if at:  # the first round warms up
                    ours.append(costs["warmpath"])
                    theirs.append(costs["echo"])
            _add(findings, shape, ours, theirs)


def _add(findings: Findings, shape: Shape, ours: Sequence[Cost], theirs: Sequence[Cost]) -> None:
    ratios = [mine.sidecar_us / other.sidecar_us for mine, other in zip(ours, theirs, strict=True)]
    for name, costs, ratio in (("warmpath", ours, middle(ratios)), ("echo", theirs, 1.0)):
        findings.rows.append(_row(shape, name, costs, ratio, spread(ratios) if name == "warmpath" else ""))
    findings.checks.append(Check(f"sidecar CPU against echo, {shape.name}", middle(ratios), _BUDGET, "x"))


def _row(shape: Shape, name: str, costs: Sequence[Cost], ratio: float, ratios: str) -> Row:
    return {
        "request": shape.name,
        "sidecar": name,
        "sidecar_us": middle([cost.sidecar_us for cost in costs]),
        "envoy_us": middle([cost.envoy_us for cost in costs]),
        "both_us": middle([cost.sidecar_us + cost.envoy_us for cost in costs]),
        "requests_a_s": middle([cost.rate for cost in costs]),
        "ratio": ratio,
        "ratios": ratios,
    }


async def _round(gateway: Gateway, shape: Shape) -> Cost:
    traffic = Traffic(gateway.url, shape.connections, shape.size, shape.chunks)
    requests = traffic.requests(shape.requests)
    async with traffic:
        sidecar, envoy, began = gateway.sidecar_cpu_s, cpu_s(gateway.envoy.pid), time.monotonic()
        await traffic.closed(requests)
        took = time.monotonic() - began
        sidecar, envoy = gateway.sidecar_cpu_s - sidecar, cpu_s(gateway.envoy.pid) - envoy
    return Cost(1e6 * sidecar / len(requests), 1e6 * envoy / len(requests), len(requests) / took)
