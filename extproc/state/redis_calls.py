"""How the verbs of `redis.RedisStore` reach Redis: its nodes, its keys, scripts by their digest, replies as values."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from extproc.state.hello import Command
from extproc.state.keys import Keys
from extproc.state.nodes import nodes_of
from extproc.state.readers import Readers
from extproc.state.report import Report, parse_info
from extproc.state.scripts import NAMES, Script, load
from extproc.state.trouble import AnsweredError, RefusedError
from extproc.state.values import FeedEntry
from extproc.state.where import parse

T = TypeVar("T")

# Nothing of a request waits for a report, and a server that is busy makes one all the same.
_REPORT_S: Final = 1.0


class RedisCalls:
    """Commands and scripts with one deadline.

    Every call fails with `StoreError` within it, at once without a connection. Connections mend themselves in the
    background; `ping` is the one call that waits for one (up to a second or two).

    Args:
        url: a store URL, see `where.parse`.
        deadline_ms: longest wait for one reply.
        prefix: first part of every key.

    Raises:
        ConfigError: the URL cannot be read.
    """

    def __init__(self, url: str, deadline_ms: float = 20.0, prefix: str = "warmpath") -> None:
        self._deadline_s = deadline_ms / 1000
        self._keys = Keys(prefix)
        self._scripts = {name: load(name) for name in NAMES}
        self._nodes = nodes_of(parse(url))
        self._readers = Readers(self._nodes, "warmpath-feed")

    async def ping(self, pool: str = "") -> None:
        """See `Store.ping`; waits for a connection."""
        key = self._keys.pool(pool).load if pool else ""
        await self._nodes.ready(key)
        await self._nodes.call(key, ("PING",), self._deadline_s)

    async def report(self, pool: str = "") -> Report:
        """What the node that has the pool tells of itself; any node without a pool.

        Raises:
            StoreError: it does not answer within a second, or the user may not ask it (INFO).
        """
        key = self._keys.pool(pool).load if pool else ""
        return parse_info(data(await self._nodes.call(key, ("INFO",), _REPORT_S)))

    async def close(self) -> None:
        """See `Store.close`."""
        await self._readers.close()
        await self._nodes.close()

    async def _ask(self, key: str, command: Command) -> Any:
        """Run a command where its key is."""
        return await self._nodes.call(key, command, self._deadline_s)

    async def _wait(self, key: str, command: Command, deadline_s: float) -> Any:
        """Run a command that may wait in Redis, on a connection of its own."""
        return await self._readers.call(key, command, deadline_s)

    async def _fields(self, key: str) -> list[tuple[str, Any]]:
        """Fields and values of a hash; a field that is no text was put there by somebody else, and hides no other."""
        flat = await self._ask(key, ("HGETALL", key))
        if not isinstance(flat, list) or len(flat) % 2:
            raise AnsweredError("Redis answered a question for a hash with something else")
        pairs = zip(map(text_or_none, flat[::2]), flat[1::2], strict=True)
        return [(name, value) for name, value in pairs if name is not None]

    async def _write(self, key: str, command: Command) -> Any:
        """Run a command on its one key; a key that holds another type is of no use to anybody and is deleted."""
        try:
            return await self._ask(key, command)
        except RefusedError as error:
            if error.code != "WRONGTYPE":
                raise
        await self._ask(key, ("DEL", key))
        return await self._ask(key, command)

    async def _run(self, name: str, keys: list[str], *args: str | int | bytes) -> Any:
        """Run a script by its digest; hand over the text when Redis does not know it (first use, SCRIPT FLUSH)."""
        script: Script = self._scripts[name]
        try:
            return await self._ask(keys[0], ("EVALSHA", script.sha, len(keys), *keys, *args))
        except RefusedError as error:
            if error.code != "NOSCRIPT":
                raise
        return await self._ask(keys[0], ("EVAL", script.text, len(keys), *keys, *args))


def unpacked(decode: Callable[[Any], T], reply: Any, what: str) -> T:
    """The value packed in a reply to `what`. Raises `AnsweredError` when it is none."""
    try:
        return decode(reply)
    except (msgspec.MsgspecError, TypeError):
        raise AnsweredError(f"Redis answered {what} with something else") from None


def number(reply: Any) -> int:
    """The reply as a number. Raises `AnsweredError` when it is none."""
    if not isinstance(reply, int):
        raise AnsweredError("Redis answered with something that is no number")
    return reply


def data(reply: Any) -> bytes:
    """The reply as bytes. Raises `AnsweredError` when it is none."""
    if not isinstance(reply, bytes):
        raise AnsweredError("Redis answered with something that is no text")
    return reply


def text(reply: Any) -> str:
    """The reply as a text. Raises `AnsweredError` when it is none, or not UTF-8."""
    try:
        return data(reply).decode()
    except UnicodeDecodeError:
        raise AnsweredError("Redis answered with a text that is not UTF-8") from None


def text_or_none(reply: Any) -> str | None:
    """The reply as a text, or None when it is none."""
    try:
        return text(reply)
    except AnsweredError:
        return None


def rows(reply: Any, what: str) -> list[FeedEntry]:
    """Entries of [[id, [field, value, ...]], ...] in a reply to `what`. Raises `AnsweredError` for another one."""
    try:
        return [FeedEntry(text(key), data(fields[1])) for key, fields in reply]
    except (TypeError, ValueError, LookupError):
        raise AnsweredError(f"Redis answered {what} with something else") from None
