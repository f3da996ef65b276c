"""Rollouts: false alarms on versions that are alike, and what faults cost before they are found.

Versions that are alike answer on the real stack; what they answered is replayed on a virtual clock, in its order, with
versions drawn anew for each run.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from extproc.config import Rollouts
from extproc.rollout.evidence import Sample
from extproc.rollout.state import Plan
from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL
from tests.acceptance.rollouts.people import Got, Habits, People
from tests.acceptance.rollouts.stand import NEXT, Fleet, stand
from tests.bench.report import Check, Findings, Row, Scale, middle
from tests.bench.rollout_replay import Went, replayed, same, sessions_of

_DEFAULTS = Rollouts()
PLAN = Plan(
    steps=tuple(step / 100 for step in _DEFAULTS.steps),
    **{name: getattr(_DEFAULTS, name) for name in Plan.__struct_fields__ if name != "steps"},
)
RATE = 40.0


def slower(sample: Sample, _rng: random.Random) -> Sample:
    """First tokens come 30 % later."""
    return msgspec.structs.replace(sample, ttft_s=1.3 * sample.ttft_s) if sample.ttft_s > 0 else sample


def failing(sample: Sample, rng: random.Random) -> Sample:
    """2 % of the requests fail."""
    return msgspec.structs.replace(sample, answered=False, failed=True) if rng.random() < 0.02 else sample


def cutting(sample: Sample, rng: random.Random) -> Sample:
    """2 % of the answers are cut."""
    return msgspec.structs.replace(sample, broken=True) if rng.random() < 0.02 else sample


def longer(sample: Sample, _rng: random.Random) -> Sample:
    """Answers are 1.5 times as long."""
    return msgspec.structs.replace(sample, output_tokens=1.5 * sample.output_tokens)


def leaving(sample: Sample, rng: random.Random) -> Sample:
    """5 % of the clients leave."""
    return msgspec.structs.replace(sample, abandoned=True) if rng.random() < 0.05 else sample


FAULTS: dict[str, tuple[Callable[[Sample, random.Random], Sample], str]] = {
    "TTFT +30 %": (slower, "ttft"),
    "2 % errors": (failing, "errors"),
    "2 % cut": (cutting, "broken"),
    "answers x 1.5": (longer, "length_longer"),
    "5 % leave": (leaving, "abandons"),
}


def bench(scale: Scale) -> Findings:
    """Fifty rollouts to a version that is alike, and ten to each that is worse."""
    return asyncio.run(_measured(scale))


async def _measured(scale: Scale) -> Findings:
    findings = Findings(f"rollouts by the defaults at {RATE:g} requests/s, replayed with versions drawn anew")
    got = await _recorded(scale.pick(40, 8))
    sessions, length_s = sessions_of(got)
    equal = [replayed(sessions, length_s, PLAN, same, seed) for seed in range(scale.pick(50, 2))]
    findings.rows.append(_row("alike", equal, ""))
    for name, (change, gate) in FAULTS.items():
        findings.rows.append(
            _row(
                name,
                [replayed(sessions, length_s, PLAN, change, 100 + seed) for seed in range(scale.pick(10, 1))],
                gate,
            )
        )
    alarms = sum(one.phase == "rolled_back" for one in equal)
    findings.checks.append(Check(f"false alarms of {len(equal)} rollouts", alarms, 1, ""))
    wrong = sum(int(row["runs"]) - int(row["by_its_gate"]) for row in findings.rows[1:])
    findings.checks.append(Check("rollouts to worse versions that another gate ended, or none", wrong, 0, ""))
    findings.notes.append(
        f"{len(got)} answers of {len(sessions)} sessions in {length_s:.0f} s were recorded; columns are medians"
    )
    return findings


async def _recorded(seconds: float) -> list[Got]:
    """What people were answered by two versions that are alike, half by each."""
    with TemporaryDirectory(prefix="bench-") as folder:
        model = {"versions": {"v1": {"pool": POOL, "weight": 1}, "v2": {"pool": NEXT, "weight": 1}}}
        async with (
            stand(Journal(), Path(folder), Fleet(replicas=1, model=model)) as here,
            People([here.url], Habits(rate=RATE)) as people,
        ):
            await people.more(round(2 * RATE))
            warm = len(people.got)
            await asyncio.sleep(seconds)
        return [one for one in people.got[warm:] if not one.failure]


def _row(name: str, went: Sequence[Went], gate: str) -> Row:
    ends = Counter(one.phase for one in went)
    right = sum(bool(gate) and one.gate.startswith(gate) for one in went)
    return {
        "version": name,
        "runs": len(went),
        "promoted": ends["promoted"],
        "rolled_back": ends["rolled_back"],
        "by_its_gate": right if gate else ends["promoted"],
        "seconds": round(middle([one.took_s for one in went])),
        "longest": round(max(one.took_s for one in went)),
        "requests": round(middle([one.requests for one in went])),
        "users_percent": round(100 * middle([one.touched for one in went]), 2),
    }
