"""What more workers give: requests a second through one Envoy with 1, 2 and 4 worker processes."""

import os
import time

import msgspec

from tests.bench.gateway import ENGINES, Gateway, gateways
from tests.bench.machine import cpu_s
from tests.bench.processes import run
from tests.bench.report import Findings, Row, Scale, middle
from tests.bench.traffic import Traffic

_WORKERS = (1, 2, 4)
_SIZE = 1024
_CONNECTIONS = 16


class _Round(msgspec.Struct, frozen=True):
    """Requests a second, and CPU a request in microseconds, of one round."""

    rate: float
    sidecars_us: float
    envoy_us: float


def bench(scale: Scale) -> Findings:
    """Rounds of the three gateways in turns, as fast as the connections go."""
    findings = Findings(f"{_CONNECTIONS} connections, bodies of 1 KB, {ENGINES} endpoints that answer at once")
    findings.rows = run(_measure(rounds=scale.pick(9, 3), requests=scale.pick(2000, 500)))
    one_core = 1e6 / float(findings.rows[0]["sidecars_us"])
    findings.notes.append("times: median over rounds of the rate against one worker in the same round")
    findings.notes.append(
        f"{os.cpu_count()} cores are shared by client, Envoy, workers, Valkey and engines: a core of its own for each "
        f"worker would serve {one_core:,.0f} requests a second each (1 / sidecars_us of one worker)"
    )
    return findings


async def _measure(rounds: int, requests: int) -> list[Row]:
    names = [f"warmpath {workers}" for workers in _WORKERS]
    taken: dict[str, list[_Round]] = {name: [] for name in names}
    async with gateways(names) as all_of_them:
        for at in range(rounds + 1):
            for gateway in [*all_of_them[at % 3 :], *all_of_them[: at % 3]]:
                took = await _round(gateway, requests)
                if at:  # the first round warms up
                    taken[gateway.name].append(took)
    single = taken[names[0]]
    return [
        {
            "workers": workers,
            "requests_a_s": middle([each.rate for each in taken[name]]),
            "times": middle([each.rate / one.rate for each, one in zip(taken[name], single, strict=True)]),
            "sidecars_us": middle([each.sidecars_us for each in taken[name]]),
            "envoy_us": middle([each.envoy_us for each in taken[name]]),
        }
        for workers, name in zip(_WORKERS, names, strict=True)
    ]


async def _round(gateway: Gateway, requests: int) -> _Round:
    traffic = Traffic(gateway.url, _CONNECTIONS, _SIZE)
    made = traffic.requests(requests)
    async with traffic:
        sidecars, envoy, began = gateway.sidecar_cpu_s, cpu_s(gateway.envoy.pid), time.monotonic()
        await traffic.closed(made)
        took = time.monotonic() - began
        sidecars, envoy = gateway.sidecar_cpu_s - sidecars, cpu_s(gateway.envoy.pid) - envoy
    return _Round(requests / took, 1e6 * sidecars / requests, 1e6 * envoy / requests)
