"""Documents, parts and records in one process."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from extproc.clock import Clock
from extproc.state.document_store import (
    MAX_DOCUMENTS,
    MAX_PARTS,
    Document,
    Documents,
    check_document,
    check_names,
    check_payload,
    check_record,
    check_ttl,
    too_many,
)
from extproc.state.keys import parse_feed_id
from extproc.state.values import FeedEntry


class _Records:
    """Records of one name, oldest first, each with its id as two numbers, and when all of them end."""

    def __init__(self) -> None:
        self.kept: deque[tuple[tuple[int, int], FeedEntry]] = deque()
        self.last_id = (0, 0)
        self.until = 0.0


class MemoryDocuments:
    """Documents of all groups; what has an age, and what it is told as, are times of `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._documents: defaultdict[str, dict[str, Document]] = defaultdict(dict)
        self._parts: dict[tuple[str, str], tuple[dict[str, bytes], float]] = {}
        self._records: defaultdict[tuple[str, str], _Records] = defaultdict(_Records)

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """See `DocumentStore.put_document`."""
        check_names(group, name)
        check_document(document)
        documents = self._documents[group]
        known = documents.get(name)
        if known is not None and known.revision != document.revision - 1:
            return known == document
        if known is None and len(documents) >= MAX_DOCUMENTS:
            raise too_many(MAX_DOCUMENTS, "documents")
        documents[name] = document
        return True

    async def documents(self, group: str) -> Documents:
        """See `DocumentStore.documents`."""
        check_names(group)
        return Documents(self._clock.wall(), dict(self._documents[group]))

    async def drop_document(self, group: str, name: str, revision: int = 0) -> None:
        """See `DocumentStore.drop_document`."""
        check_names(group, name)
        known = self._documents[group].get(name)
        if known is not None and revision in (0, known.revision):
            del self._documents[group][name]

    async def put_part(self, group: str, name: str, part: str, payload: bytes, ttl_ms: int) -> None:
        """See `DocumentStore.put_part`."""
        check_names(group, name, part)
        check_payload(payload)
        check_ttl(ttl_ms)
        now = self._clock.monotonic()
        self._parts = {key: each for key, each in self._parts.items() if now < each[1]}
        parts, _ = self._parts.get((group, name), ({}, 0.0))
        if part not in parts and len(parts) >= MAX_PARTS:
            raise too_many(MAX_PARTS, "parts")
        parts[part] = payload
        self._parts[group, name] = parts, now + ttl_ms / 1000

    async def parts(self, group: str, name: str) -> Mapping[str, bytes]:
        """See `DocumentStore.parts`."""
        check_names(group, name)
        parts, until = self._parts.get((group, name), ({}, 0.0))
        return dict(parts) if self._clock.monotonic() < until else {}

    async def record(self, group: str, name: str, payload: bytes, cap: int, keep_ms: int) -> str:
        """See `DocumentStore.record`. Ids have the form of a Redis stream's."""
        check_names(group, name)
        check_payload(payload)
        check_record(cap, keep_ms)
        records, now_ms = self._records[group, name], int(self._clock.wall() * 1000)
        if self._clock.monotonic() >= records.until:
            records.kept.clear()
        last_ms, last_seq = records.last_id
        records.last_id = key = (now_ms, 0) if now_ms > last_ms else (last_ms, last_seq + 1)
        entry = FeedEntry(f"{key[0]}-{key[1]}", payload)
        records.kept.append((key, entry))
        oldest_ms = now_ms - keep_ms if keep_ms else 0
        while len(records.kept) > cap or records.kept[0][0][0] < oldest_ms:
            records.kept.popleft()
        records.until = self._clock.monotonic() + keep_ms / 1000 if keep_ms else float("inf")
        return entry.id

    async def records(self, group: str, name: str, limit: int, before: str = "") -> Sequence[FeedEntry]:
        """See `DocumentStore.records`."""
        check_names(group, name)
        end = parse_feed_id(before) if before else None
        records = self._records.get((group, name))
        if records is None or self._clock.monotonic() >= records.until:
            return []
        older = [entry for key, entry in reversed(records.kept) if end is None or key < end]
        return older[: max(0, limit)]
