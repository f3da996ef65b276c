"""The feed of a `RedisStore`, and the snapshots that who joins begins with."""

import logging
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from extproc.state.keys import parse_feed_id
from extproc.state.redis_calls import RedisCalls, data, number, rows, text, text_or_none
from extproc.state.store import READ_LIMIT
from extproc.state.trouble import EXHAUSTED, AnsweredError, RefusedError
from extproc.state.values import FeedEntry, Snapshot

log = logging.getLogger(__name__)

# A reply to a blocking read may come this much after the wait asked for; nothing of a request waits for it.
_READ_SLACK_S: Final = 1.0
# How long a part may lie in Redis before its snapshot is complete: a writer that dies leaves nothing for ever.
_UNFINISHED_MS: Final = 600_000
# Longest wait for one part; nothing of a request waits for it.
_PART_S: Final = 1.0
# How often a reader begins again because the snapshot was replaced meanwhile.
_TRIES: Final = 3
_MOST_PARTS: Final = 4096
_HEAD: Final = re.compile("([0-9a-f]{16}) ([0-9]{1,4}) ([0-9]{1,20}-[0-9]{1,20})")
_READ: Final = "a read of the feed"


class _Head(msgspec.Struct, frozen=True):
    """Where a snapshot is: the name of its generation, its number of parts, and the feed entry that it ends with."""

    generation: str
    parts: int
    at: str


class RedisFeed(RedisCalls):
    """Feeds of all pools. Each read under way has a connection of its own."""

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """See `Store.append`.

        A feed that takes no more, because somebody put an entry of the last id into it, is begun anew: readers notice
        by the ids. Snapshots name entries of it and go with it.
        """
        key = self._keys.pool(pool).feed
        command = ("XADD", key, "MAXLEN", "~", cap, "*", "p", payload)
        try:
            return text(await self._write(key, command))
        except RefusedError as error:
            if error.code != EXHAUSTED:
                raise
        log.warning("a feed takes no more entries; beginning it anew", extra={"pool": pool})
        await self.drop_snapshots(pool, list(await self.snapshots(pool)))
        await self._ask(key, ("DEL", key))
        return text(await self._ask(key, command))

    async def read(self, pool: str, after: str, wait_ms: int) -> Sequence[FeedEntry]:
        """See `Store.read`. Each read under way has a connection of its own, since a waiting one blocks it."""
        seen, key = parse_feed_id(after), self._keys.pool(pool).feed
        entries = _entries(await self._wait(key, _read(key, after, wait_ms), wait_ms / 1000 + _READ_SLACK_S))
        if not entries and seen > (0, 0):
            last = await self._wait(key, ("XREVRANGE", key, "+", "-", "COUNT", 1), _READ_SLACK_S)
            if any(parse_feed_id(entry.id) < seen for entry in rows(last, _READ)):
                entries = _entries(await self._wait(key, _read(key, "0", 0), _READ_SLACK_S))
        return entries

    async def put_snapshot(self, pool: str, name: str, at: str, parts: Sequence[bytes]) -> None:
        """See `Store.put_snapshot`. Each part is a command of its own; readers see the new ones when all are there."""
        keys, generation = self._keys.pool(pool), secrets.token_hex(8)
        # Parts go over a connection of their own: a decision's call must not queue behind 64 KB.
        for place, part in enumerate(parts):
            command = ("SET", keys.part(generation, place), part, "PX", _UNFINISHED_MS)
            await self._wait(keys.snapshots, command, _PART_S)
        if not await self._show(pool, name, generation, len(parts), at):
            raise AnsweredError("Redis lost parts of a snapshot before it was complete")

    async def snapshots(self, pool: str) -> Mapping[str, str]:
        """See `Store.snapshots`."""
        fields = await self._fields(self._keys.pool(pool).snapshots)
        return {name: head.at for name, value in fields if (head := _head(value)) is not None}

    async def snapshot(self, pool: str, name: str) -> Snapshot | None:
        """See `Store.snapshot`."""
        keys = self._keys.pool(pool)
        for _ in range(_TRIES):
            head = _head(await self._ask(keys.snapshots, ("HGET", keys.snapshots, name)))
            if head is None:
                return None
            parts: list[bytes] = []
            for place in range(head.parts):
                part = await self._wait(keys.snapshots, ("GET", keys.part(head.generation, place)), _PART_S)
                if part is None:
                    break
                parts.append(data(part))
            else:
                return Snapshot(head.at, parts)
        return None

    async def drop_snapshots(self, pool: str, names: Collection[str]) -> None:
        """See `Store.drop_snapshots`."""
        for name in names:
            await self._show(pool, name, "", 0, "")

    async def _show(self, pool: str, name: str, generation: str, parts: int, at: str) -> bool:
        """Let readers see this generation of a snapshot, or none; False when parts of it are missing."""
        keys = self._keys.pool(pool)
        return number(await self._run("snapshot", [keys.snapshots], name, keys.part_prefix, generation, parts, at)) == 1


def _head(reply: Any) -> _Head | None:
    """The head behind a field of the heads; None when there is none, or somebody else put it there."""
    found = _HEAD.fullmatch(text_or_none(reply) or "")
    if found is None or int(found[2]) > _MOST_PARTS:
        return None
    return _Head(found[1], int(found[2]), found[3])


def _read(key: str, after: str, wait_ms: int) -> tuple[str | int, ...]:
    block = ("BLOCK", wait_ms) if wait_ms > 0 else ()
    return ("XREAD", "COUNT", READ_LIMIT, *block, "STREAMS", key, after)


def _entries(reply: Any) -> list[FeedEntry]:
    """Entries of an XREAD reply: nil, or [[stream, rows]]."""
    if reply is None:
        return []
    try:
        ((_, found),) = reply
    except (TypeError, ValueError):
        raise AnsweredError(f"Redis answered {_READ} with something else") from None
    return rows(found, _READ)
