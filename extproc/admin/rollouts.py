"""The calls of operators on rollouts: the one implementation behind the command, HTTP and gRPC."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from typing import Final

from msgspec.structs import replace

from extproc.admin import forgetting, starting
from extproc.admin.changing import Blank, Step, expecting
from extproc.admin.planning import plan_of
from extproc.admin.starting import Pools, States, model_of
from extproc.admin.status import status_of
from extproc.admin.values import (
    Change,
    Changed,
    Forget,
    History,
    Line,
    Promote,
    Start,
    Started,
    Status,
    Statuses,
    Verdict,
)
from extproc.config import Config, Model
from extproc.errors import BadQuestionError, RolloutError, StoreError, UnknownModelError
from extproc.fleet import rollout_documents
from extproc.fleet.rollout_documents import Known
from extproc.fleet.rollouts import Status as Judged
from extproc.fleet.rollouts import statuses as judgements
from extproc.rollout import advance
from extproc.rollout.gates import Judgement
from extproc.rollout.state import GROUP, Event, Rollout, decode_event, encode
from extproc.state.document_store import Document, Documents, NotTakenError
from extproc.state.endpoint import EndpointState
from extproc.state.endpoint import decode as decode_state
from extproc.state.store import Store

MOST_HISTORY: Final = 1000
_TRIES: Final = 8
"""The controller, and other operators, may write in between."""
_AGAIN_S: Final = 0.1
"""All tries together take longer than a round of the controller."""
_LINE_ID: Final = re.compile(r"\d{1,20}-\d{1,20}")

log = logging.getLogger(__name__)


class RolloutCalls:
    """The calls. Each takes the name of a model, or an alias, and raises errors of the tree.

    `StoreError` says that the shared store is away. Where a change may have been made all the same, its text says so.
    """

    def __init__(
        self,
        store: Store,
        config: Callable[[], Config],
        pools: Callable[[], Pools],
        remembered: Callable[[], Mapping[str, Known]],
        new_id: Callable[[], str],
    ) -> None:
        """Calls on what these know.

        Args:
            store: the shared store.
            config: the configuration of now.
            pools: the endpoints of now.
            remembered: rollouts that the keeper knows, by model, whether the store still has them or not.
            new_id: a name for a rollout that no other one has.
        """
        self._store = store
        self._config = config
        self._pools = pools
        self._remembered = remembered
        self._new_id = new_id

    async def start(self, model: str, ask: Start, by: str) -> Started:
        """Begin a rollout, or say what would happen.

        Raises:
            UnknownModelError: there is no such model.
            UnknownCanaryError: the model has no such version.
            BadQuestionError: an override is wrong.
            RolloutError: another rollout is in the way, or the version cannot take the traffic.
            StoreError: the shared store is away.
        """
        config = self._config()
        name, settings = model_of(config, model)
        starting.expect_version(name, settings, ask.to)
        plan, base, pools = plan_of(config.rollouts, ask.overrides), starting.base_of(settings), self._pools()
        states = await self._states(settings)
        new_id = self._new_id()

        def begin(last: Rollout | None, now: float) -> tuple[Rollout, Event]:
            starting.expect_no_other(name, base, last)
            if told := starting.hindrances(config, name, ask.to, pools, states):
                raise RolloutError("; ".join(told))
            return advance.begin(new_id, name, ask.to, base, plan, (now, by))

        if ask.dry_run:
            documents = await self._store.documents(GROUP)
            last = self._last(documents, name)
            rollout, _ = begin(last.rollout if last else None, documents.now)
        else:
            rollout = (await self._change(name, begin)).rollout
        warnings = starting.warnings(config, name, ask.to, plan, pools, states)
        return Started(rollout=rollout, preview=starting.preview(rollout), warnings=warnings, dry_run=ask.dry_run)

    async def status(self, model: str = "") -> Statuses:
        """One model, or all that have versions or ever had a rollout. Raises UnknownModelError, StoreError."""
        config = self._config()
        documents = await self._store.documents(GROUP)
        if model:
            names = [model_of(config, model)[0]]
        else:
            names = [name for name, each in config.models.items() if each.versions or name in documents.found]
        judged = await judgements(self._store)
        return Statuses([self._status(name, config.models[name], documents, judged) for name in names])

    async def promote(self, model: str, ask: Promote, by: str) -> Changed:
        """Go on at once from the step that stands now, or that was seen, and from no other one.

        Raises UnknownModelError, UnknownRolloutError, RolloutError, StoreError.
        """
        meant: list[tuple[str, str]] = []
        judged = await self._judged(model)

        def further(last: Rollout, now: float) -> tuple[Rollout, Event]:
            meant.append((last.epoch, last.phase))
            if ask.step not in (None, last.step) or ask.phase not in ("", last.phase):
                stands = f"step {last.step + 1} and {last.phase.replace('_', ' ')}"
                raise RolloutError(f"the rollout of model `{last.model}` is at {stands} by now: look at its status")
            if meant[-1] != meant[0]:
                raise RolloutError(f"the rollout of model `{last.model}` went on meanwhile: look at its status")
            # What the baseline did so far is all that the last step can be compared with.
            return advance.promote(last, now, by, _plain(ask.text), full=ask.full, judgement=judged)

        return await self._changed(model, ask, further)

    async def _judged(self, model: str) -> Judgement | None:
        """How a keeper judges the present step; None when nobody told. Raises UnknownModelError, StoreError."""
        name, _ = model_of(self._config(), model)
        return status.judgement if (status := (await judgements(self._store)).get(name)) else None

    async def pause(self, model: str, ask: Change, by: str) -> Changed:
        """Stop where it is. Raises as `promote`."""
        return await self._changed(model, ask, lambda last, now: advance.pause(last, now, by, _plain(ask.text)))

    async def resume(self, model: str, ask: Change, by: str) -> Changed:
        """Go on after a pause, past the gates that failed by now. Raises as `promote`."""
        judged = await self._judged(model)

        def further(last: Rollout, now: float) -> tuple[Rollout, Event]:
            return advance.resume(last, now, by, _plain(ask.text), judgement=judged)

        return await self._changed(model, ask, further)

    async def abort(self, model: str, ask: Change, by: str) -> Changed:
        """Take everything from the canary. Raises as `promote`."""
        return await self._changed(model, ask, lambda last, now: advance.abort(last, now, by, _plain(ask.text)))

    async def forget(self, model: str, ask: Forget, by: str) -> Changed:
        """Drop what is kept of a rollout that is over: the file's weights hold. What it did stays in the audit log.

        A model that the configuration has no more is known by its own name. Raises as `promote`.
        """
        config, new_id = self._config(), self._new_id()
        settings: Model | None = None
        try:
            name, settings = model_of(config, model)
        except UnknownModelError:
            name, kept = model, (await self._store.documents(GROUP)).found
            if name not in kept:
                raise forgetting.unknown(config, name, kept) from None

        def over(last: Rollout, now: float) -> tuple[Rollout, Event]:
            forgetting.expect_over(name, settings, last, force=ask.force)
            return advance.forget(last, now, by, _plain(ask.text))

        def blank(now: float) -> Rollout:
            return forgetting.blank(new_id, name, config.rollouts, now)

        return await self._change(name, expecting(name, ask, over), blank if ask.force else None)

    async def verdict(self, model: str, ask: Verdict, by: str) -> Changed:
        """Note a verdict from outside. Raises as `promote`."""

        def judged(last: Rollout, now: float) -> tuple[Rollout, Event]:
            if ask.step is not None and ask.step != last.step:
                raise RolloutError(
                    f"step {ask.step + 1} was judged, but the rollout is at step {last.step + 1}: judge that one"
                )
            return advance.verdict(last, now, by, _plain(ask.text), passed=ask.verdict == "pass")

        return await self._changed(model, ask, judged)

    async def history(self, model: str, limit: int = 100, before: str = "") -> History:
        """The newest lines of the audit log.

        Args:
            model: name or alias of the model.
            limit: most lines, 1 to `MOST_HISTORY`.
            before: only lines older than the one of this id; empty for all.

        Raises:
            UnknownModelError: there is no such model.
            BadQuestionError: there can be no such limit or line.
            StoreError: the shared store is away.
        """
        name, _ = model_of(self._config(), model)
        if not 1 <= limit <= MOST_HISTORY:
            raise BadQuestionError(f"limit: {limit}: write 1 to {MOST_HISTORY}")
        if before and not (_LINE_ID.fullmatch(before) and max(map(int, before.split("-"))) < 1 << 64):
            raise BadQuestionError("before: is no id of a line: take it from the last line of an earlier answer")
        lines, told = [], b""
        for each in await self._store.records(GROUP, name, limit, before):
            if each.payload == told:
                continue  # Several who wrote the same line down at once.
            told = each.payload
            try:
                lines.append(Line(each.id, decode_event(each.payload)))
            except StoreError as error:
                log.warning("a line of the audit log cannot be read", extra={"model": name, "error": str(error)})
        return History(lines)

    async def _changed(
        self, model: str, ask: Change | Verdict, step: Callable[[Rollout, float], tuple[Rollout, Event]]
    ) -> Changed:
        name, _ = model_of(self._config(), model)
        return await self._change(name, expecting(name, ask, step))

    async def _change(self, name: str, step: Step, blank: Blank | None = None) -> Changed:
        """Make a change, on what stands when it is made."""
        for _ in range(_TRIES):
            documents = await self._store.documents(GROUP)
            last = self._last(documents, name, blank)
            rollout, event = step(last.rollout if last else None, documents.now)
            if last and last.rollout.event:
                # A document carries the event that made it so, until that is in the audit log.
                await self._write(last.rollout.event)
            rollout = replace(rollout, event=event)
            document = Document(last.revision + 1 if last else 1, encode(rollout))
            if await self._put(name, document):
                await self._note(event)
                return Changed(rollout=rollout, event=event)
            # Somebody else was first, or the store fell back to an older document, which a keeper puts right.
            await asyncio.sleep(_AGAIN_S)
        raise RolloutError(
            f"others change the rollout of model `{name}` all the time: look at its status, and try again"
        )

    async def _put(self, name: str, document: Document) -> bool:
        """Put a document. Raises StoreError, which says where nobody knows whether it is kept."""
        try:
            return await self._store.put_document(GROUP, name, document)
        except NotTakenError:
            raise
        except StoreError as error:
            told = f"{error}; it may have been made all the same: look at the status first"
            raise StoreError(f"the change was not confirmed: {told}") from error

    async def _note(self, event: Event) -> None:
        """Write down what was done, here and in the store. Where that is away, a keeper does it once it is back."""
        told = {
            "model": event.model,
            "rollout": event.rollout,
            "what": event.what,
            "by": event.by,
            "share": event.share,
        }
        log.info("an operator changed a rollout", extra=told)
        try:
            await self._write(event)
        except StoreError as error:
            log.warning("the audit log in the store lacks a line as yet", extra={**told, "error": str(error)})

    async def _write(self, event: Event) -> None:
        """See that an event is in the audit log. Raises StoreError."""
        await rollout_documents.write_down(self._store, event, self._config().rollouts.history)

    def _status(self, name: str, model: Model, documents: Documents, judged: Mapping[str, Judged]) -> Status:
        last = self._last(documents, name)
        told = judged.get(name)
        rollout = last.rollout if last and last.rollout.phase != "forgotten" else None
        return status_of(name, model, rollout, told.judgement if told else None, documents.now)

    def _last(self, documents: Documents, name: str, blank: Blank | None = None) -> Known | None:
        """The model's last rollout: the store's or, where that lost it or fell back, as it is remembered.

        Raises StoreError when the store's cannot be read, unless `blank` makes one that stands for it.
        """
        kept, known = documents.found.get(name), self._remembered().get(name)
        if kept is None:
            return known
        try:
            found = rollout_documents.read(name, kept.revision, kept.payload)
        except StoreError as error:
            if blank is None:
                remedy = f"did a newer release write it? If not, `warmpath rollout forget {name} --force`"
                raise StoreError(f"{error}: {remedy}") from error
            if known is not None and known.revision >= kept.revision:
                return known
            return Known(kept.revision, kept.payload, known.rollout if known else blank(documents.now))
        return found if known is None or rollout_documents.newer(found, known) else known

    async def _states(self, model: Model) -> States:
        """What was published of all endpoints of a model's pools."""
        pools = {each.pool for each in model.by_version.values()}
        return {pool: _decoded(await self._store.states(pool)) for pool in sorted(pools)}


def _decoded(states: Mapping[str, bytes]) -> dict[str, EndpointState]:
    """States by endpoint; what cannot be read counts as absent."""
    found = {}
    for name, payload in states.items():
        try:
            found[name] = decode_state(payload)
        except StoreError as error:
            log.warning("a published state cannot be read", extra={"endpoint": name, "error": str(error)})
    return found


def _plain(text: str) -> str:
    """A text for the audit log: on one line, and without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
