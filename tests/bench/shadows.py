"""A shadow beside none: what clients see of requests that are mirrored or compared, on one stack, in turns."""

import asyncio
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from extproc.sim import load
from extproc.sim.load import LoadSettings
from extproc.sim.report import percentile
from extproc.sim.workload import steady
from tests.acceptance.journal import Journal
from tests.acceptance.local import Local, configuration, running, simulated
from tests.acceptance.rollouts.stand import MODEL, SPEED
from tests.bench.report import Check, Findings, Row, Scale, middle

NAMES = ("none", "mirror", "compare")
"""Models of one pool, by the mode of their shadow."""
SHARE = 0.05
RATE = 40.0
_ENGINES = 8

_Times = dict[str, list[float]]


def bench(scale: Scale) -> Findings:
    """Twelve rounds of the three, five seconds each."""
    return asyncio.run(_measured(scale))


async def _measured(scale: Scale) -> Findings:
    findings = Findings(f"ms of streamed requests at {RATE:g}/s, a shadow of {SHARE:.0%} against none, in turns")
    journal, arguments = Journal(), ("--model", MODEL, *SPEED)
    with TemporaryDirectory(prefix="bench-") as folder:
        async with (
            simulated(journal, each=_ENGINES, arguments=arguments) as main,
            simulated(journal, each=_ENGINES, arguments=arguments) as other,
            running(
                journal,
                Path(folder) / "warmpath.yaml",
                _document([one.address for one in main], [one.address for one in other]),
                [*main, *other],
            ) as local,
        ):
            rounds = await _rounds(local, scale.pick(12, 2), float(scale.pick(5, 2)))
            drawn = {
                name: await local.metric("warmpath_shadow_requests_total", model=name)
                for name in NAMES
                if name != "none"
            }
    findings.rows += [_row(name, rounds) for name in NAMES]
    for row in findings.rows[1:]:
        # Noise of one round against another is what is left when nothing differs.
        for column in ("ttft_p50", "ttft_p99", "answer_p50", "answer_p99"):
            noise = _noise(rounds, column)
            findings.checks.append(
                Check(f"{row['shadow']}: {column} over none", float(row[f"{column}_adds"]), noise, "ms")
            )
    told = ", ".join(f"{count:.0f} of {name}" for name, count in drawn.items())
    findings.notes += [
        f"medians of rounds; drawn for a shadow: {told}",
        "adds: minus none of the same round; the budget is the median distance of two rounds of none",
    ]
    return findings


def _document(main: list[str], other: list[str]) -> dict[str, Any]:
    pools = {"main": main, **dict.fromkeys(NAMES[1:], other)}
    document = configuration(pools, gateway={"message_timeout_ms": 5000}, redis={"timeout_ms": 500})
    document["models"] = {"none": {"pool": "main", "served_as": MODEL}}
    for mode in NAMES[1:]:
        versions = {
            "v1": {"pool": "main", "weight": 1, "served_as": MODEL},
            "v2": {"pool": mode, "weight": 0, "served_as": MODEL},
        }
        document["models"][mode] = {"versions": versions, "shadow": {"version": "v2", "mode": mode, "share": SHARE}}
    return document


async def _rounds(local: Local, count: int, seconds: float) -> dict[str, list[_Times]]:
    times: dict[str, list[_Times]] = {name: [] for name in NAMES}
    for at in range(count + 1):
        # Who goes first changes from round to round, so that none always meets the warmer machine.
        for name in [*NAMES[at % 3 :], *NAMES[: at % 3]]:
            work = steady(RATE, seconds, seed=3 * at + NAMES.index(name), stream_share=1.0, prompt_tokens=200)
            run = await load.run(local.url, work, LoadSettings(model=name))
            if run.failed:
                raise RuntimeError(f"{len(run.failed)} requests of the bench failed: {run.failed[0].failure}")
            if at:  # the first round warms up
                first = sorted(1000 * one.ttft_s for one in run.outcomes if one.ttft_s is not None)
                whole = sorted(1000 * (one.end_s - one.sent_s) for one in run.outcomes)
                times[name].append({"ttft": first, "answer": whole})
    return times


def _row(name: str, rounds: dict[str, list[_Times]]) -> Row:
    row: dict[str, str | float] = {"shadow": name, "rounds": len(rounds[name])}
    for column in ("ttft_p50", "ttft_p99", "answer_p50", "answer_p99"):
        mine, none = _figures(rounds[name], column), _figures(rounds["none"], column)
        row[column] = middle(mine)
        row[f"{column}_adds"] = middle([one - other for one, other in zip(mine, none, strict=True)])
    return row


def _noise(rounds: dict[str, list[_Times]], column: str) -> float:
    """Median distance of two neighbouring rounds without a shadow."""
    none = _figures(rounds["none"], column)
    return middle([abs(one - other) for one, other in itertools.pairwise(none)])


def _figures(rounds: list[_Times], column: str) -> list[float]:
    what, _, share = column.partition("_p")
    return [percentile(one[what], int(share) / 100) or 0.0 for one in rounds]
