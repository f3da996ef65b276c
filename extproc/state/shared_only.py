"""The verbs that only a shared store can serve."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from extproc.errors import StoreError
from extproc.state.document_store import Document, Documents
from extproc.state.keys import shard
from extproc.state.sharing import Sharing
from extproc.state.telling import Tools
from extproc.state.values import FeedEntry, Snapshot

P = ParamSpec("P")
T = TypeVar("T")


class SharedOnly:
    """Feed, snapshots, shared work and documents, which have no local stand-in.

    Entries of this worker alone would tell nobody, and their ids, by this host's clock, would hide others' later ones;
    work that nobody else can see taken would be done twice; a document that others cannot see decides nothing. The
    verbs raise `StoreError` while the shared store is gone. A missed deadline of theirs opens no circuit: they move
    much data. A lost connection of a group of documents opens the group's own, which no decision asks.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._primary = tools.primary
        self._sharings: dict[str, Sharing] = {}

    def _sharing(self, pool: str) -> Sharing:
        sharing = self._sharings.get(pool)
        if sharing is None:
            sharing = self._sharings[pool] = Sharing(pool, self._tools)
        return sharing

    async def hold(self, pool: str, group: str, holder: str, names: Collection[str], lease_ms: int) -> Collection[str]:
        """See `Store.hold`. Raises `StoreError` without the shared store: keep what is held, and take nothing."""
        return await self._shared(self._primary.hold, pool, group, holder, names, lease_ms)

    async def put_snapshot(self, pool: str, name: str, at: str, parts: Sequence[bytes]) -> None:
        """See `Store.put_snapshot`."""
        await self._shared(self._primary.put_snapshot, pool, name, at, parts)

    async def snapshots(self, pool: str) -> Mapping[str, str]:
        """See `Store.snapshots`."""
        return await self._shared(self._primary.snapshots, pool)

    async def snapshot(self, pool: str, name: str) -> Snapshot | None:
        """See `Store.snapshot`."""
        return await self._shared(self._primary.snapshot, pool, name)

    async def drop_snapshots(self, pool: str, names: Collection[str]) -> None:
        """See `Store.drop_snapshots`."""
        await self._shared(self._primary.drop_snapshots, pool, names)

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """See `Store.append`."""
        return await self._shared(self._primary.append, pool, payload, cap)

    async def read(self, pool: str, after: str, wait_ms: int) -> Sequence[FeedEntry]:
        """See `Store.read`. A failing read opens no circuit: it has a connection of its own."""
        sharing = self._sharing(pool)
        sharing.require()
        try:
            return await self._primary.read(pool, after, wait_ms)
        except StoreError as error:
            sharing.count(error)
            raise

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """See `DocumentStore.put_document`."""
        return await self._of_group(self._primary.put_document, group, name, document)

    async def documents(self, group: str) -> Documents:
        """See `DocumentStore.documents`."""
        return await self._of_group(self._primary.documents, group)

    async def drop_document(self, group: str, name: str, revision: int = 0) -> None:
        """See `DocumentStore.drop_document`."""
        await self._of_group(self._primary.drop_document, group, name, revision)

    async def put_part(self, group: str, name: str, part: str, payload: bytes, ttl_ms: int) -> None:
        """See `DocumentStore.put_part`."""
        await self._of_group(self._primary.put_part, group, name, part, payload, ttl_ms)

    async def parts(self, group: str, name: str) -> Mapping[str, bytes]:
        """See `DocumentStore.parts`."""
        return await self._of_group(self._primary.parts, group, name)

    async def record(self, group: str, name: str, payload: bytes, cap: int, keep_ms: int) -> str:
        """See `DocumentStore.record`."""
        return await self._of_group(self._primary.record, group, name, payload, cap, keep_ms)

    async def records(self, group: str, name: str, limit: int, before: str = "") -> Sequence[FeedEntry]:
        """See `DocumentStore.records`."""
        return await self._of_group(self._primary.records, group, name, limit, before)

    async def _of_group(
        self, shared: Callable[Concatenate[str, P], Awaitable[T]], group: str, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Ask for something of a group of documents, or raise `StoreError`."""
        sharing = self._sharing(shard(group))
        sharing.require()
        return await sharing.ask(shared(group, *args, **kwargs), bulk=True)

    async def _shared(
        self, shared: Callable[Concatenate[str, P], Awaitable[T]], pool: str, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Move data to or from the shared store, or raise `StoreError`."""
        sharing = self._sharing(pool)
        sharing.require()
        return await sharing.ask(shared(pool, *args, **kwargs), bulk=True)
