"""The verbs of a store that concern documents: what operators decide, what is measured of it, and what happened.

A group is a kind of documents, such as `rollouts`; all of its keys lie on one shard, and none belongs to a pool.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from extproc.state.values import FeedEntry


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


class DocumentStore(Protocol):
    """A part of `store.Store`; see there for errors. Without the shared store all of them raise `StoreError`."""

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """Put the next revision of a document.

        True when it is kept now: its predecessor was there, or nothing at all (new, or lost by a flush), or this very
        document already. False when somebody else was first: read it again.
        """
        ...

    async def documents(self, group: str) -> Documents:
        """All documents of a group."""
        ...

    async def drop_document(self, group: str, name: str) -> None:
        """Forget a document."""
        ...

    async def put_part(self, group: str, name: str, part: str, payload: bytes, ttl_ms: int) -> None:
        """Replace one part of something that many write together; all of its parts end `ttl_ms` after the last."""
        ...

    async def parts(self, group: str, name: str) -> Mapping[str, bytes]:
        """All parts of something, by who wrote them."""
        ...

    async def record(self, group: str, name: str, payload: bytes, cap: int, keep_ms: int) -> str:
        """Add a record, keep about the newest `cap` of those not older than `keep_ms`; returns its id."""
        ...

    async def records(self, group: str, name: str, limit: int, before: str = "") -> Sequence[FeedEntry]:
        """The newest records, newest first, `limit` at most; with `before` only those older than that id."""
        ...
