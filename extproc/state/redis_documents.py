"""Documents, parts and records in Redis: one script for what must be atomic."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

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
from extproc.state.redis_calls import RedisCalls, data, number, rows, text, text_or_none
from extproc.state.trouble import EXHAUSTED, AnsweredError, RefusedError
from extproc.state.values import FeedEntry

log = logging.getLogger(__name__)

# Longest wait for one reply; nothing of a request waits for it.
_REPLY_S: Final = 1.0
# As many parts, or records, of the greatest length are 1 MiB, which Redis answers within a millisecond.
_AT_ONCE: Final = 16
_MOST_SCANS: Final = 10 * MAX_PARTS // _AT_ONCE
# The script reads the same.
_KEPT: Final = re.compile(rb"([1-9][0-9]{0,14}) ")


class RedisDocuments(RedisCalls):
    """Documents of all groups.

    Calls have connections of their own: a decision's call must not queue behind a reply of many kilobytes. They are
    known by the key of a group's documents, whichever of its keys is asked for.
    """

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """See `DocumentStore.put_document`."""
        check_names(group, name)
        check_document(document)
        key = self._keys.group(group).documents
        value = b"%d %s" % (document.revision, document.payload)
        kept = number(await self._script(key, key, "put", name, value, document.revision, MAX_DOCUMENTS))
        if kept < 0:
            raise too_many(MAX_DOCUMENTS, "documents")
        return kept == 1

    async def documents(self, group: str) -> Documents:
        """See `DocumentStore.documents`."""
        check_names(group)
        key = self._keys.group(group).documents
        return parse_documents(await self._script(key, key, "all"))

    async def drop_document(self, group: str, name: str, revision: int = 0) -> None:
        """See `DocumentStore.drop_document`."""
        check_names(group, name)
        key = self._keys.group(group).documents
        if revision:
            await self._script(key, key, "drop", name, revision)
            return
        await self._wait(key, ("HDEL", key, name), _REPLY_S)

    async def put_part(self, group: str, name: str, part: str, payload: bytes, ttl_ms: int) -> None:
        """See `DocumentStore.put_part`."""
        check_names(group, name, part)
        check_payload(payload)
        check_ttl(ttl_ms)
        keys = self._keys.group(group)
        if number(await self._script(keys.documents, keys.parts(name), "part", part, payload, ttl_ms, MAX_PARTS)) < 0:
            raise too_many(MAX_PARTS, "parts")

    async def parts(self, group: str, name: str) -> Mapping[str, bytes]:
        """See `DocumentStore.parts`; they are read a few at a time, those put meanwhile as they are or as they were.

        A key of another type has none, as `documents` has it: who writes would mend it, but may read before.
        """
        check_names(group, name)
        keys = self._keys.group(group)
        key, cursor, found = keys.parts(name), 0, dict[str, bytes]()
        for _ in range(_MOST_SCANS):
            reply = await self._read(keys.documents, ("HSCAN", key, cursor, "COUNT", _AT_ONCE))
            cursor, some = (0, {}) if reply is None else parse_scan(reply)
            found.update(some)
            if cursor == 0:
                return found
        raise AnsweredError("Redis holds far more parts than were put: delete the key of these parts")

    async def record(self, group: str, name: str, payload: bytes, cap: int, keep_ms: int) -> str:
        """See `DocumentStore.record`.

        A stream that takes no more, because somebody put an entry of the last id into it, is begun anew.
        """
        check_names(group, name)
        check_payload(payload)
        check_record(cap, keep_ms)
        keys = self._keys.group(group)
        key = keys.records(name)
        try:
            return text(await self._script(keys.documents, key, "record", payload, cap, keep_ms))
        except RefusedError as error:
            if error.code != EXHAUSTED:
                raise
        log.warning("a stream of records takes no more; beginning it anew", extra={"group": group})
        await self._wait(keys.documents, ("DEL", key), _REPLY_S)
        return text(await self._script(keys.documents, key, "record", payload, cap, keep_ms))

    async def records(self, group: str, name: str, limit: int, before: str = "") -> Sequence[FeedEntry]:
        """See `DocumentStore.records`; a key of another type has none, as that of parts."""
        check_names(group, name)
        keys = self._keys.group(group)
        key, found = keys.records(name), list[FeedEntry]()
        end = "+"
        if before:
            millis, sequence = parse_feed_id(before)
            end = f"({millis}-{sequence}"
        while (left := limit - len(found)) > 0:
            most = min(left, _AT_ONCE)
            reply = await self._read(keys.documents, ("XREVRANGE", key, end, "-", "COUNT", most))
            some = [] if reply is None else rows(reply, "a question for records")
            found += some
            if len(some) < most:
                break
            end = f"({some[-1].id}"
        return found

    async def _read(self, near: str, command: tuple[str | int, ...]) -> Any:
        """The reply to a question for one key; None when it holds another type, which the next write puts right."""
        try:
            return await self._wait(near, command, _REPLY_S)
        except RefusedError as error:
            if error.code != "WRONGTYPE":
                raise
        return None

    async def _script(self, near: str, key: str, *args: str | int | bytes) -> Any:
        """Run the script on one key, which lies where the key `near` is."""
        script = self._scripts["document"]
        try:
            return await self._wait(near, ("EVALSHA", script.sha, 1, key, *args), _REPLY_S)
        except RefusedError as error:
            if error.code != "NOSCRIPT":
                raise
        return await self._wait(near, ("EVAL", script.text, 1, key, *args), _REPLY_S)


def parse_documents(reply: Any) -> Documents:
    """Documents of [[seconds, microseconds], [name, value, ...]]. Raises `AnsweredError` for another reply.

    A name that is no text, and a value that is no document, were put there by somebody else and are passed over.
    """
    try:
        (seconds, micros), flat = reply
        now = int(data(seconds)) + int(data(micros)) / 1e6
        pairs = list(zip(map(text_or_none, flat[::2]), flat[1::2], strict=True))
    except (TypeError, ValueError, OverflowError):
        raise AnsweredError("Redis answered a question for documents with something else") from None
    kept = ((name, document_or_none(value)) for name, value in pairs if name is not None)
    return Documents(now, {name: document for name, document in kept if document is not None})


def document_or_none(value: Any) -> Document | None:
    """The document behind a field; None when it is none."""
    found = _KEPT.match(value) if isinstance(value, bytes) else None
    return Document(int(found[1]), value[found.end() :]) if found else None


def parse_scan(reply: Any) -> tuple[int, Mapping[str, bytes]]:
    """Next cursor and parts of [cursor, [name, value, ...]]. Raises `AnsweredError` for another reply."""
    try:
        cursor, flat = reply
        pairs = list(zip(map(text_or_none, flat[::2]), map(data, flat[1::2]), strict=True))
        return int(data(cursor)), {name: value for name, value in pairs if name is not None}
    except (TypeError, ValueError):
        raise AnsweredError("Redis answered a question for parts with something else") from None
