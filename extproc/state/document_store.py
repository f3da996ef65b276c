"""The verbs of a store that concern documents: what operators decide, what is measured of it, and what happened.

A group is a kind of documents, such as `rollouts`; all of its keys lie on one shard, and none belongs to a pool.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from extproc.state.trouble import AnsweredError
from extproc.state.values import FeedEntry

MAX_PAYLOAD: Final = 65_536
"""Longest document, part or record, in bytes: one reply must not hold Redis up, nor one group fill it."""
MAX_DOCUMENTS: Final = 256
"""Most documents of a group, which are read as a whole: 100 of 1,500 bytes hold Redis up for 0.16 ms."""
MAX_PARTS: Final = 1000
"""Most parts of one thing."""
MAX_REVISION: Final = 10**15 - 1
"""Revisions are whole numbers that a double holds exactly, as Lua's are."""
_MAX_NAME: Final = 1024


class Document(msgspec.Struct, frozen=True):
    """A document as it is kept.

    Attributes:
        revision: grows by one with each change; the first is 1.
        payload: opaque bytes.
    """

    revision: int
    payload: bytes


class Documents(msgspec.Struct, frozen=True):
    """All documents of a group.

    Attributes:
        now: present time of the store's clock, in seconds since the epoch.
        found: document by name.
    """

    now: float
    found: Mapping[str, Document]


class NotTakenError(AnsweredError):
    """What no store keeps: too long, one too many, or without a proper name. The store itself is well."""


def check_names(*names: str) -> None:
    """Raise `NotTakenError` for a group or name that cannot be one."""
    for name in names:
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise NotTakenError("a name in the store: use a text that can be written as UTF-8") from None
        if not 0 < size <= _MAX_NAME:
            raise NotTakenError(f"a name in the store has {size} bytes: use 1 to {_MAX_NAME}")


def check_payload(payload: bytes) -> None:
    """Raise `NotTakenError` for one that is too long."""
    if len(payload) > MAX_PAYLOAD:
        raise NotTakenError(f"{len(payload)} bytes are too many for one value in the store: keep it to {MAX_PAYLOAD}")


def check_document(document: Document) -> None:
    """Raise `NotTakenError` for one that cannot be put."""
    check_payload(document.payload)
    if not 1 <= document.revision <= MAX_REVISION:
        raise NotTakenError(f"revision {document.revision} of a document: use 1 to {MAX_REVISION}")


def check_ttl(ttl_ms: int) -> None:
    """Raise ValueError for a life of parts that is none."""
    if ttl_ms < 1:
        raise ValueError(f"parts that end after {ttl_ms} ms: use 1 or more")


def check_record(cap: int, keep_ms: int) -> None:
    """Raise ValueError for a number or an age that keeps no record."""
    if cap < 1 or keep_ms < 0:
        raise ValueError(f"{cap} records of {keep_ms} ms: keep 1 or more, and 0 ms or more")


def too_many(most: int, what: str) -> NotTakenError:
    """The error of one document, or part, too many."""
    how = " (rollouts: `warmpath rollout forget MODEL`)" if what == "documents" else ""
    return NotTakenError(f"there are {most} {what} of this kind already: drop those that nobody needs{how}")


class DocumentStore(Protocol):
    """A part of `store.Store`; see there for errors.

    Without the shared store all of them raise `StoreError`. For what is too long (`MAX_PAYLOAD`), one too many
    (`MAX_DOCUMENTS`, `MAX_PARTS`) or has no proper name that is a `NotTakenError`. A document that cannot be read,
    because somebody else put it there, counts as absent.
    """

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """Put the next revision of a document.

        True when it is kept now: its predecessor was there, or nothing at all (new, or lost by a flush), or this very
        document already. False when somebody else was first: read it again.
        """
        ...

    async def documents(self, group: str) -> Documents:
        """All documents of a group."""
        ...

    async def drop_document(self, group: str, name: str, revision: int = 0) -> None:
        """Forget a document: of this revision alone, or with 0 of any."""
        ...

    async def put_part(self, group: str, name: str, part: str, payload: bytes, ttl_ms: int) -> None:
        """Replace one part of something that many write together; all of its parts end `ttl_ms` after the last.

        Raises ValueError for a `ttl_ms` below 1.
        """
        ...

    async def parts(self, group: str, name: str) -> Mapping[str, bytes]:
        """All parts of something, by who wrote them."""
        ...

    async def record(self, group: str, name: str, payload: bytes, cap: int, keep_ms: int) -> str:
        """Add a record, keep about the newest `cap` of those not older than `keep_ms`; returns its id.

        All of them end `keep_ms` after the last one. With 0 they are kept whatever their age, and Redis, when it is
        full, evicts none of them. Raises ValueError for a `cap` below 1 or a `keep_ms` below 0.
        """
        ...

    async def records(self, group: str, name: str, limit: int, before: str = "") -> Sequence[FeedEntry]:
        """The newest records, newest first, `limit` at most; with `before` only those older than that id.

        Raises ValueError for a `before` that is no id.
        """
        ...
