"""Documents of rollouts as replicas remember them, which of two is the newer one, and the line that each stands for."""

import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from extproc.errors import StoreError
from extproc.rollout.state import GROUP, Event, Rollout, decode, encode_event
from extproc.state.document_store import Documents, DocumentStore

_LOOK_BACK: Final = 100
"""Lines of the audit log that are searched for an event: more are not written while one waits."""

log = logging.getLogger(__name__)


class Known(msgspec.Struct, frozen=True):
    """A document that was read.

    Attributes:
        revision: its revision.
        payload: its bytes.
        rollout: what they say.
    """

    revision: int
    payload: bytes
    rollout: Rollout


class Remembered:
    """The newest document of each model that was ever seen: one that is missing, damaged or older does not replace it.

    Attributes:
        known: document by model.
        unread: by model, revision of a document that is there and cannot be read.
    """

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self.unread: dict[str, int] = {}

    def take(self, documents: Documents) -> list[str]:
        """Take what changed; returns the models whose document is another one now."""
        changed, unread = [], dict[str, int]()
        for name, document in documents.found.items():
            before = self.known.get(name)
            if before is not None and (before.revision, before.payload) == (document.revision, document.payload):
                continue
            try:
                found = read(name, document.revision, document.payload)
            except StoreError as error:
                unread[name] = document.revision
                if self.unread.get(name) != document.revision:
                    log.error("a rollout is left as it was", extra={"model": name, "error": str(error)})
                continue
            if before is None or newer(found, before):
                self.known[name] = found
                changed.append(name)
        self.unread = unread
        return changed

    def rollouts(self) -> Mapping[str, Rollout]:
        """Rollout by model."""
        return {name: known.rollout for name, known in self.known.items()}


def read(model: str, revision: int, payload: bytes) -> Known:
    """The document of a model. Raises StoreError for one that cannot be read, or is another model's."""
    rollout = decode(payload)
    if rollout.model != model:
        raise StoreError("the document in the store is another model's rollout")
    shares = (rollout.share, *rollout.earlier, *rollout.plan.steps)
    if not (0 <= rollout.step < len(rollout.plan.steps) and all(0.0 <= share <= 1.0 for share in shares)):
        raise StoreError("a rollout in the store has no such step, or shares that are not of 0 to 1")
    return Known(revision, payload, rollout)


def newer(found: Known, known: Known) -> bool:
    """Whether what was found replaces what was known.

    A smaller revision is an older one, which a store that failed over may tell again; of one revision the store's is
    the one that goes on. Another rollout begins at the first revision where a flush took the document, so its start
    counts as well.
    """
    if found.revision >= known.revision:
        return True
    return found.rollout.id != known.rollout.id and found.rollout.started > known.rollout.started


async def write_down(store: DocumentStore, event: Event, history: int) -> None:
    """See that an event is in the audit log, of which so many lines are kept. Raises StoreError."""
    payload = encode_event(event)
    written = await store.records(GROUP, event.model, _LOOK_BACK)
    if all(line.payload != payload for line in written):
        await store.record(GROUP, event.model, payload, history, 0)
