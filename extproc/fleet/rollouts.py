"""Moves rollouts on: one keeper of all looks after each model's, step by step, by what the workers measured.

Rules:
- Who holds a model's lease reads, judges and writes; a document is written only over the revision that was read. So a
  step is taken once, whoever takes it, and a keeper that was frozen while another took over changes nothing.
- A document carries the event that made it so. It is in the audit log before the document is written over, so a keeper
  that dies between the two loses no line; the one that takes over writes it. A line may stand there twice.
- Every keeper remembers the documents, and puts back what a flush or a failover took. Workers go on meanwhile by what
  they know.
- A rollout that is to be forgotten is a document as well, so that nobody puts back what it replaces. It is dropped once
  all replicas have seen it; who remembers it puts it back only over what is older.
- Times are the store's.
"""

import asyncio
import logging
import math
import random
from collections.abc import Mapping
from typing import Final

import msgspec

from extproc.clock import Clock
from extproc.config import Config, Model
from extproc.config_rollouts import Rollouts
from extproc.errors import StoreError
from extproc.fleet.holding import Holding
from extproc.fleet.rollout_documents import Known, Remembered, write_down
from extproc.rollout.advance import CONTROLLER, advance, elapsed_s
from extproc.rollout.evidence import merge
from extproc.rollout.gates import Judgement, judge
from extproc.rollout.state import ACTIVE, GROUP, Event, Rollout, encode, evidence_name
from extproc.state.document_store import Document, Documents, DocumentStore
from extproc.state.keys import shard
from extproc.telemetry.rollout_metrics import GateView, RolloutMetrics, RolloutView

WORK: Final = "rollouts"
"""Name of this work in the store."""
SHARD: Final = shard(GROUP)
"""Where leases on it lie: with the documents."""
EVERY_S: Final = 0.5
_JITTER: Final = 0.1
JUDGEMENTS: Final = "judgements"
"""Name of the parts in which the acting keeper publishes how it judges, by model."""
_JUDGED_MS: Final = 60_000
_GRACE_S: Final = 2.0
"""How long the author of an event has to write it down himself."""
_MOST_PUT_BACK: Final = 100
"""Revisions that are put back at once, where the store has an older one."""
_HEAR_S: Final = 2.0
"""After a document was put back, nothing is decided for so long: another keeper may know a newer one."""
FORGET_S: Final = 300.0
"""How long a rollout that is to be forgotten is kept: replicas look four times a second, but may be cut off."""
_ALARMING: Final = frozenset({"rolled_back", "paused", "gate_failed"})

log = logging.getLogger(__name__)


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How a rollout is judged, as its keeper publishes it.

    Attributes:
        keeper: id of that keeper.
        at: when, in seconds of the store's clock.
        judgement: the judgement.
    """

    keeper: str
    at: float
    judgement: Judgement


_pack = msgspec.json.Encoder().encode
_read_status = msgspec.json.Decoder(Status).decode


async def statuses(store: DocumentStore) -> dict[str, Status]:
    """How rollouts are judged now, by model, whichever keeper does; unreadable ones are absent. Raises StoreError."""
    found = {}
    for model, payload in (await store.parts(GROUP, JUDGEMENTS)).items():
        try:
            found[model] = _read_status(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            log.debug("a judgement cannot be read", extra={"model": model})
    return found


class Controller:
    """The rollouts as one keeper sees and moves them.

    Args:
        store: where documents, evidence and the audit log are.
        holding: which models' rollouts are this keeper's.
        metrics: who shows them.
        clock: paces the rounds.
        chance: spreads them.
    """

    def __init__(
        self, store: DocumentStore, holding: Holding, metrics: RolloutMetrics, clock: Clock, chance: random.Random
    ) -> None:
        self._store = store
        self._holding = holding
        self._metrics = metrics
        self._clock = clock
        self._chance = chance
        self._models: Mapping[str, Model] = {}
        self._history = Rollouts().history
        self._remembered = Remembered()
        self._written: dict[str, Event] = {}
        self._judged: dict[str, Judgement] = {}
        self._complaints: dict[str, str] = {}
        self._put_back_at: dict[str, float] = {}

    def apply(self, config: Config) -> None:
        """Take a changed configuration."""
        self._models = {name: model for name, model in config.models.items() if model.versions}
        self._history = config.rollouts.history
        self._holding.apply(config)
        self._metrics.may_happen(self._models)

    def known(self) -> Mapping[str, Known]:
        """The newest document of each model that this keeper has seen, whether the store still has it or not."""
        return dict(self._remembered.known)

    async def run(self) -> None:
        """Make rounds until cancelled; no lease outlives it."""
        try:
            while True:
                pause = EVERY_S * self._chance.uniform(1 - _JITTER, 1 + _JITTER)
                begun = self._clock.monotonic()
                await self.round()
                await asyncio.sleep(max(0.0, pause - (self._clock.monotonic() - begun)))
        finally:
            await self._holding.leave()

    async def round(self) -> None:
        """Look at all rollouts once, and move those on that are this keeper's. Never raises."""
        if not self._models:
            return
        try:
            documents = await self._store.documents(GROUP)
        except StoreError as error:
            self._complain("", f"rollouts cannot be read: {error}")
            return
        self._complain("", "")
        before = dict(self._remembered.known)
        changed = self._remembered.take(documents)
        ours = [model for model in self._remembered.known if self._can_care(model)]
        work = {SHARD: ours}
        if self._holding.due(work):
            await self._holding.renew(work)
        for model in self._holding.held(SHARD).intersection(changed):
            self._noticed(before.get(model), self._remembered.known[model].rollout)
        for model in ours:
            try:
                await self._put_back(model, documents)
                if model in self._holding.held(SHARD):
                    await self._care(model, documents.now)
                self._complain(model, "")
            except StoreError as error:
                self._complain(model, str(error))
        await self._forget(documents)
        self._show(documents.now)

    def _can_care(self, model: str) -> bool:
        """Whether this keeper may look after a model; a newer document that it cannot read is for a newer keeper."""
        known = self._remembered.known[model]
        return self._remembered.unread.get(model, 0) <= known.revision and self._serves(known.rollout)

    def _serves(self, rollout: Rollout) -> bool:
        """Whether the configuration has what a rollout is about; one that it has not is left alone."""
        if rollout.phase == "forgotten":
            return False
        model = self._models.get(rollout.model)
        if model is not None and rollout.canary in model.versions:
            self._complain(f"{rollout.model} {rollout.id}", "")
            return True
        missing = "model" if model is None else f"version `{rollout.canary}` of the model"
        self._complain(f"{rollout.model} {rollout.id}", f"the configuration has no such {missing}: left alone")
        return False

    async def _forget(self, documents: Documents) -> None:
        """Drop what everybody has seen that it is to be forgotten, of whatever model; needs no lease."""
        for model, known in tuple(self._remembered.known.items()):
            found = documents.found.get(model)
            if known.rollout.phase != "forgotten" or found is None:
                continue
            try:
                await self._put_back(model, documents)
                if found.revision == known.revision and documents.now - known.rollout.since >= FORGET_S:
                    if known.rollout.event is not None:
                        await self._write(known.rollout.event)
                    await self._store.drop_document(GROUP, model, known.revision)
                    self._written.pop(model, None)
            except StoreError as error:
                log.debug("a rollout is forgotten later", extra={"model": model, "error": str(error)})

    async def _put_back(self, model: str, documents: Documents) -> None:
        """See that the store has the newest document that is known of a model. Raises StoreError."""
        found, known = documents.found.get(model), self._remembered.known[model]
        if found is None:
            self._written.pop(model, None)  # The audit log is lost as well.
            self._put_back_at[model] = self._clock.monotonic()
            if await self._store.put_document(GROUP, model, Document(known.revision, known.payload)):
                log.warning("a rollout that the store had lost is put back", extra={"model": model})
            return
        damaged = self._remembered.unread.get(model) == found.revision
        # A greater revision that cannot be read may be a newer release's: it is not written over.
        if found.revision > known.revision or (found.revision == known.revision and not damaged):
            return
        last = known.revision + damaged
        if last - found.revision > _MOST_PUT_BACK:
            raise StoreError("the store has a rollout that is far older than the one that is known")
        for revision in range(found.revision + 1, last + 1):
            if not await self._store.put_document(GROUP, model, Document(revision, known.payload)):
                return
        self._remembered.known[model] = msgspec.structs.replace(known, revision=last)
        self._put_back_at[model] = self._clock.monotonic()
        log.warning("a rollout that the store had in an older state is put back", extra={"model": model})

    async def _care(self, model: str, now: float) -> None:
        """Judge one rollout and move it on. Raises StoreError."""
        known = self._remembered.known[model]
        rollout = known.rollout
        told = rollout.event
        if told is not None and (told.by == CONTROLLER or now - told.at >= _GRACE_S):
            await self._write(told)
        if rollout.phase not in ACTIVE:
            self._judged.pop(model, None)
            return
        judgement = judge(merge((await self._store.parts(GROUP, evidence_name(rollout))).values()), rollout)
        self._judged[model] = judgement
        status = Status(keeper=self._holding.holder, at=now, judgement=judgement)
        await self._store.put_part(GROUP, JUDGEMENTS, model, _pack(status), _JUDGED_MS)
        further = advance(rollout, judgement, now)
        if further is None or self._clock.monotonic() < self._put_back_at.get(model, -math.inf) + _HEAR_S:
            return
        if told is not None:
            await self._write(told)
        after, event = further
        event = msgspec.structs.replace(event, told={name: x for name, x in event.told.items() if math.isfinite(x)})
        after = msgspec.structs.replace(after, event=event)
        if model not in self._holding.held(SHARD):
            return  # Its lease ended meanwhile.
        payload = encode(after)
        if not await self._store.put_document(GROUP, model, Document(known.revision + 1, payload)):
            log.info("somebody else changed a rollout first", extra={"model": model})
            return
        self._remembered.known[model] = Known(known.revision + 1, payload, after)
        self._tell(event)
        await self._write(event)

    async def _write(self, event: Event) -> None:
        """See that an event is in the audit log. Raises StoreError."""
        if self._written.get(event.model) == event:
            return
        await write_down(self._store, event, self._history)
        self._written[event.model] = event

    def _noticed(self, before: Known | None, rollout: Rollout) -> None:
        """Tell of what somebody else did to a rollout."""
        seen = before.rollout.event if before else None
        if rollout.event is not None and rollout.event != seen and (before or rollout.event.what == "started"):
            self._tell(rollout.event)

    def _tell(self, event: Event) -> None:
        """Log and count what happened."""
        self._metrics.happened(event.model, event.what)
        level = logging.WARNING if event.what in _ALARMING else logging.INFO
        told = {"model": event.model, "rollout": event.rollout, "what": event.what, "by": event.by}
        log.log(level, "a rollout has changed", extra={**told, "share": event.share, "gate": event.gate})

    def _show(self, now: float) -> None:
        """Tell the metrics where every rollout is, and how those are judged that are this keeper's."""
        held, views = self._holding.held(SHARD), {}
        for model, known in self._remembered.known.items():
            rollout = known.rollout
            if not self._serves(rollout):
                continue
            over_s = elapsed_s(rollout, now) - rollout.plan.hold_s if rollout.phase == "running" else 0.0
            views[model] = RolloutView(rollout.phase, rollout.step, rollout.share, model in held, max(0.0, over_s))
        self._metrics.rollouts(views)
        for model in tuple(self._judged):
            if model not in held:
                del self._judged[model]
        for model in views:
            judged = self._judged.get(model)
            if judged is None:
                self._metrics.judged(model, {}, {})
                continue
            samples = {"canary": float(judged.canary), "baseline": float(judged.baseline)}
            gates = {gate.name: GateView(gate.evidence, gate.failed) for gate in judged.gates}
            self._metrics.judged(model, samples, gates)

    def _complain(self, about: str, text: str) -> None:
        """Say what is wrong once, for as long as it stays the same; an empty text is the end of it."""
        if text and self._complaints.get(about) != text:
            log.warning("a rollout cannot be looked after", extra={"model": about, "error": text})
        if text:
            self._complaints[about] = text
        else:
            self._complaints.pop(about, None)
