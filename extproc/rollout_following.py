"""A worker's part in rollouts: it follows the documents, and tells what it measured of the present steps.

All workers look at the documents four times a second, so a step or a rollback holds everywhere within half a second.
What was known stays known while the store is gone, empty or damaged: traffic moves only because somebody said so.
A document that stays away is put back: keepers do it at once, and workers where no keeper is left that knew it, since
traffic would go on by a rollout that nobody can see, judge or abort.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from extproc import rollout_learning as learning
from extproc.clock import Clock
from extproc.envoy.contract import VERSION, Served
from extproc.errors import StoreError
from extproc.fleet.rollout_documents import Remembered
from extproc.rollout.evidence import Recorder
from extproc.rollout.split import Split
from extproc.rollout.state import ACTIVE, GROUP, Rollout, evidence_name
from extproc.splits import with_splits
from extproc.state.document_store import Document, Documents
from extproc.surroundings import Surroundings
from extproc.telemetry.rollout_metrics import VersionMetrics

LOOK_S: Final = 0.25
TELL_S: Final = 0.5
_QUIET_S: Final = 2.0
"""How long the store may be silent before that is said."""
PUT_BACK_S: Final = 5.0
"""How long keepers, who know the newest document, are left to put back what the store lost."""
_JITTER: Final = 0.1
"""Looks are spread by this share, so that workers do not beat in step."""
AGAIN_S: Final = 10.0
"""What was measured is told again after so long even when nothing was added: a flush may have lost it."""
KEEP_MS: Final = 24 * 3600 * 1000
"""How long it is kept after the last was told: long enough for a night without any traffic."""

log = logging.getLogger(__name__)


class _Measured(msgspec.Struct):
    """What this worker measured of one step.

    Attributes:
        rollout: the rollout, as it was when the step began.
        recorder: statistics.
        fresh: something was added since it was told.
        told_at: when it was told last, on the monotonic clock; None while it has nothing to tell.
    """

    rollout: Rollout
    recorder: Recorder
    fresh: bool = False
    told_at: float | None = None


class Following:
    """Implements `learner.Versions`. Nothing of it is waited for by a decision.

    Args:
        around: its rollouts and the splits of its fleet are kept current.
        metrics: who counts.
        clock: this worker's time; what is measured is dated by the store's.
        chance: spreads the looks.
    """

    def __init__(
        self, around: Surroundings, metrics: VersionMetrics, clock: Clock, chance: random.Random | None = None
    ) -> None:
        self._around = around
        self._metrics = metrics
        self._clock = clock
        self._chance = chance or random.Random()  # noqa: S311 -- it only spreads load
        self._remembered = Remembered()
        self._missing: dict[str, float] = {}
        self._lost_at = math.inf
        self._said = False
        self._offset_s = 0.0
        self._measured: dict[str, _Measured] = {}
        self._looked = asyncio.Event()
        self._shown: Mapping[str, Split] | None = None

    async def run(self) -> None:
        """Look and tell until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._forever(self.look, LOOK_S))
            tasks.create_task(self._forever(self.tell, TELL_S))

    async def caught_up(self, within_s: float) -> bool:
        """Wait for the first documents; False when the store has not told them within `within_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._looked.wait()
        return self._looked.is_set()

    async def look(self) -> None:
        """Take what changed of the documents. Never raises."""
        if any(model.versions for model in self._around.config.models.values()):
            await self._read()
        else:
            self._looked.set()
        self._show()

    async def _read(self) -> None:
        begun = self._clock.monotonic()
        try:
            documents = await self._around.store.documents(GROUP)
        except StoreError as error:
            # A call that comes late now and then is nothing to talk of.
            self._lost_at = min(self._lost_at, begun)
            if not self._said and self._clock.monotonic() - self._lost_at >= _QUIET_S:
                self._said = True
                log.warning("rollouts cannot be read, what was known stays", extra={"error": str(error)})
            return
        self._lost_at, self._said = math.inf, False
        self._offset_s = documents.now - (begun + self._clock.monotonic()) / 2
        # From here on nothing is awaited: who replaces the fleet besides does it in one step too.
        if changed := self._remembered.take(documents):
            around = self._around
            around.rollouts = self._remembered.rollouts()
            around.fleet = with_splits(around.fleet, around.config, around.rollouts)
            for name in changed:
                self._begin(around.rollouts[name])
        self._looked.set()
        await self._put_back(documents)

    async def _put_back(self, documents: Documents) -> None:
        """See that what the store has lost for long comes back to it."""
        now, known = self._clock.monotonic(), self._remembered.known
        gone = [name for name in known if name not in documents.found and self._serves(known[name].rollout)]
        self._missing = {name: self._missing.get(name, now) for name in gone}
        for name, since in self._missing.items():
            if now - since < PUT_BACK_S:
                continue
            document = Document(known[name].revision, known[name].payload)
            try:
                if await self._around.store.put_document(GROUP, name, document):
                    log.warning("a rollout that the store and all keepers had lost is put back", extra={"model": name})
            except StoreError as error:
                log.debug("a rollout is put back later", extra={"model": name, "error": str(error)})

    def _serves(self, rollout: Rollout) -> bool:
        """Whether the configuration has what a rollout is about, and nobody asked to forget it."""
        model = self._around.config.models.get(rollout.model)
        return rollout.phase != "forgotten" and model is not None and rollout.canary in model.versions

    def _begin(self, rollout: Rollout) -> None:
        """Take note of a rollout that changed: measure anew when a step begins."""
        told = {"model": rollout.model, "rollout": rollout.id, "phase": rollout.phase}
        log.info("a rollout is followed", extra={**told, "step": rollout.step, "share": rollout.share})
        before = self._measured.get(rollout.model)
        if rollout.phase not in ACTIVE:
            self._measured.pop(rollout.model, None)
        elif before is None or before.recorder.epoch != rollout.epoch:
            self._measured[rollout.model] = _Measured(rollout, Recorder(rollout))

    def _show(self) -> None:
        splits = self._around.fleet.splits
        if splits is not self._shown:
            self._shown = splits
            self._metrics.shares({name: shares_of(split) for name, split in splits.items()})

    def observe(self, served: Served, endpoint: str, counted: float) -> None:
        """See `learner.Versions.observe`."""
        found = learning.model_of(self._around.config, served)
        if found is None:
            return
        name, model = found
        due = learning.usage_due(self._around.config, model, served)
        outcome = learning.outcome_of(served, due=due)
        self._metrics.ended(name, str(served.metadata[VERSION]), outcome)
        measured = self._measured.get(name)
        if measured is None or learning.epoch_of(served.metadata) != measured.recorder.epoch:
            return
        sample = learning.sample_of(served, endpoint, outcome, counted)
        if sample is not None:
            measured.recorder.add(sample, self._clock.monotonic() + self._offset_s)
            measured.fresh = True

    async def tell(self) -> None:
        """Publish what was measured, where something was added. Never raises."""
        for measured in tuple(self._measured.values()):
            now = self._clock.monotonic()
            again = measured.told_at is not None and now - measured.told_at >= AGAIN_S
            if not measured.fresh and not again:
                continue
            measured.fresh, told = False, measured.recorder.encode()
            name = evidence_name(measured.rollout)
            try:
                await self._around.store.put_part(GROUP, name, self._around.replica, told, KEEP_MS)
                measured.told_at = now
            except StoreError as error:
                measured.fresh = True
                log.debug("what was measured is told later", extra={"rollout": name, "error": str(error)})

    async def close(self) -> None:
        """Tell what is left. Never raises."""
        await self.tell()

    async def _forever(self, step: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            await step()
            await asyncio.sleep(every_s * self._chance.uniform(1 - _JITTER, 1 + _JITTER))


def shares_of(split: Split) -> dict[str, float]:
    """Share of the traffic by version."""
    weights = {version: split.weights.get(version, 0.0) for version in split.pools}
    total = sum(weights.values())
    return {version: weight / total if total > 0.0 else 0.0 for version, weight in weights.items()}
