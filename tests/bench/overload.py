"""Overload: goodput at twice the capacity for each action, what the answered ones waited, and what is left afterwards.

The real stack: two simulated engines that run six requests each, one of a smaller model, Valkey, a worker, Envoy.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from tests.acceptance.governance.crowd import Crowd, Tally, ask, asking
from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Local, configuration, running, simulated, write
from tests.bench.report import Check, Findings, Row, Scale
from tests.waiting import until, until_async

BATCH = 6
LOAD = 2.0
WAIT_S = 5.0
WARM_S = 2.0
CLIENTS = 2 * BATCH + 4
"""Enough to keep both engines full, and few enough that hardly anything waits there."""
ACTIONS: Mapping[str, Mapping[str, Any]] = {
    "pass": {},
    "queue": {"queue": {"max_wait_s": WAIT_S}},
    "fallback": {"fallback": "small"},
    "reject": {},
}
_ENGINES = ("--max-num-seqs", str(BATCH), "--step-ms", "25", "--per-seq-ms", "0")


class Stand(msgspec.Struct, frozen=True):
    """A running stack and the document that its configuration was written from."""

    local: Local
    path: Path
    document: dict[str, Any]

    async def use(self, action: str) -> None:
        """Take another action while it runs."""
        before = self._taken()
        document = copy.deepcopy(self.document)
        document["overload"] = {"action": action, **ACTIONS[action]}
        await asyncio.to_thread(write, self.path, document)
        await until(lambda: action == "pass" or self._taken() > before)

    def _taken(self) -> int:
        lines = self.local.journal.containing("the changed configuration is in use")
        return sum('"process": "worker-0"' in line for line in lines)

    async def per_s(self, crowd: Crowd, seconds: float) -> tuple[float, Tally]:
        """Answers a second with 200 that a crowd gets, once it has been asking for a while; and all answers."""
        loop = asyncio.get_running_loop()
        async with asking(self.local.url, [crowd]) as tally:
            await asyncio.sleep(WARM_S)
            began = loop.time()
            await asyncio.sleep(seconds)
            ended = loop.time()
        await until_async(self._calm, 300.0)
        return tally.per_s(began, ended), tally

    async def _calm(self) -> bool:
        left = [await engine.live() for engine in self.local.engines]
        return not any(left) and not await self.local.in_flight()

    async def answers(self) -> bool:
        """Whether a request is answered."""
        return (await ask(self.local.http, self.local.url, Crowd(), Tally())).status == 200


def bench(scale: Scale) -> Findings:
    """Twice the capacity for three minutes, or for twelve seconds, with each action."""
    return asyncio.run(_measured(scale))


async def _measured(scale: Scale) -> Findings:
    seconds = float(scale.pick(180, 12))
    findings = Findings(f"answers/s with 200 at {LOAD:g} times the capacity for {seconds:g} s, by overload.action")
    async with _stand() as stand:
        capacity, _ = await stand.per_s(Crowd(clients=CLIENTS), min(seconds, 20.0))
        for action in ACTIONS:
            await stand.use(action)
            during, tally = await stand.per_s(Crowd(per_s=LOAD * capacity), seconds)
            after, _ = await stand.per_s(Crowd(clients=CLIENTS), min(seconds, 10.0))
            findings.rows.append(_row(action, capacity, during, after, tally))
            if action != "pass":
                budget = 0.9 * capacity
                findings.checks += [
                    Check(f"{action}, goodput at {LOAD:g} times the load", during, budget, "/s", at_least=True),
                    Check(f"{action}, goodput afterwards", after, budget, "/s", at_least=True),
                ]
    queued = next(row for row in findings.rows if row["action"] == "queue")
    findings.checks.append(
        # The answer itself takes 0.6 s at an engine that is full, and some wait there.
        Check("queue, p99 of answers with 200", float(queued["p99_s"]), WAIT_S + 2.0, "s")
    )
    findings.notes.append("times are whole answers', of 24 tokens; `pass` leaves all to the engines' own queues")
    return findings


def _row(action: str, capacity: float, during: float, after: float, tally: Tally) -> Row:
    outcomes = tally.outcomes()
    return {
        "action": action,
        "capacity_per_s": round(capacity, 1),
        "goodput_per_s": round(during, 1),
        "share": round(during / capacity, 2),
        "p50_s": round(tally.took(0.5), 2),
        "p99_s": round(tally.took(0.99), 2),
        "ok": outcomes["200"],
        "refused": sum(outcomes.values()) - outcomes["200"],
        "after_per_s": round(after, 1),
    }


@contextlib.asynccontextmanager
async def _stand() -> AsyncIterator[Stand]:
    journal = Journal()
    async with contextlib.AsyncExitStack() as cleanup:
        folder = Path(cleanup.enter_context(TemporaryDirectory(prefix="bench-")))
        engines = await cleanup.enter_async_context(simulated(journal, each=2, arguments=_ENGINES))
        arguments = ("--model", "small", "--step-ms", "5")
        small = await cleanup.enter_async_context(simulated(journal, each=1, arguments=arguments))
        pools = {POOL: [one.address for one in engines], "small": [one.address for one in small]}
        document = configuration(pools, gateway={"message_timeout_ms": 5000})
        path = folder / "warmpath.yaml"
        local = await cleanup.enter_async_context(running(journal, path, document, [*engines, *small]))
        stand = Stand(local, path, document)
        await until_async(stand.answers)
        yield stand
