"""One connection to Redis that many calls share: pipelined, strictly first in first out, never waiting for long.

Calls made in the same turn of the event loop leave in one write. A call whose deadline passes fails at once, but
keeps its place in the queue: its late reply is matched to it and thrown away, never taken for another call's. The
order of calls is the order in which Redis executes them, so a settle cannot overtake its reserve.

redis-py's connections are not used, because they wait for one reply at a time and their reader task wakes after the
timers of a busy loop (a false timeout), while a protocol's callback sees the reply first.
"""

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

import hiredis

from extproc.errors import StoreError
from extproc.state.hello import Command, check, commands, why
from extproc.state.trouble import StoreDeadlineError, Trouble, UnreachableError, refusal
from extproc.state.where import Address, Login

log = logging.getLogger(__name__)

# A loop that was busy runs its timers before it reads its sockets: replies that came meanwhile get this long.
_GRACE_S: Final = 0.001
_STALL_S: Final = 2.0
_CONNECT_S: Final = 1.0
# Longer than one attempt: who waits is told what kept it from becoming a connection.
_READY_S: Final = 1.5
_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_MAX_WAITING: Final = 20_000
# A server that stays read-only is asked whether a name leads to another one by now, no more often than this.
_REDIAL_S: Final = 5.0
# A master that stood still is replaced, and goes on as if nothing had happened until it is told, by Sentinel some ten
# seconds after it is back. What it takes in until then is lost.
_FOLLOW_S: Final = 1.0

_CUT_SHORT: Final = UnreachableError("it hangs up at the login: write rediss:// in redis.url where it speaks TLS only")
# TLS 1.3: who shows no certificate hears of it after the handshake, and not always in words.
_CUT_SHORT_TLS: Final = UnreachableError(
    "it hangs up after the TLS handshake: give ssl_certfile and ssl_keyfile in redis.url where it wants a certificate",
    Trouble.CERTIFICATE,
)

Locate = Callable[[], Awaitable[Address]]
"""Says where to connect to, asked anew before each attempt. Raises `StoreError` when nobody knows."""


def at(address: Address) -> Locate:
    """A server that stays where it is."""

    async def locate() -> Address:
        return address

    return locate


class _Call:
    """One command under way."""

    __slots__ = ("future", "sent", "timer")

    def __init__(self, future: "asyncio.Future[Any]", sent: float) -> None:
        self.future = future
        self.sent = sent
        self.timer: asyncio.TimerHandle | None = None

    def fail(self, error: StoreError) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.future.set_exception(error)

    def answer(self, reply: Any) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.future.set_result(reply)


class Link(asyncio.Protocol):
    """A self-mending connection to the Redis that `locate` names.

    It connects at the first call and again after every loss, with back-off, until `close`. While there is no
    connection, calls fail at once with an `UnreachableError` that tells what keeps it from being there. A server that
    answers that it is read-only is left: a failover made another one the master.

    Args:
        locate: where the server is; asked before each attempt.
        login: what to say first.
        name: what CLIENT LIST shows.
        master: connect to a master only, and leave it when another one is the master.
        stall_s: a server that owes a reply for longer is taken for gone, and a new connection is made.
    """

    def __init__(
        self, locate: Locate, login: Login, name: str = "warmpath", *, master: bool = False, stall_s: float = _STALL_S
    ) -> None:
        self._locate = locate
        self._login = login
        self._name = name
        self._master = master
        self._stall_s = stall_s
        self._transport: asyncio.Transport | None = None
        self._usable = False
        self._since = 0.0
        self._closed = False
        self._trouble = UnreachableError("no connection to Redis yet")
        self._calls: deque[_Call] = deque()
        self._outbox: list[bytes] = []
        self._reader = hiredis.Reader()
        self._connecting: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._up = asyncio.Event()

    @property
    def usable(self) -> bool:
        """Connected and past the handshake."""
        return self._usable

    def call(self, command: Command, deadline_s: float) -> "asyncio.Future[Any]":
        """Send one command; the future holds its reply, or `StoreError` after `deadline_s` seconds at the latest."""
        loop = asyncio.get_running_loop()
        if self._usable and len(self._calls) < _MAX_WAITING:
            return self._send(loop, command, deadline_s)
        future: asyncio.Future[Any] = loop.create_future()
        if self._usable:
            future.set_exception(UnreachableError("Redis owes too many replies", Trouble.SLOW))
        else:
            self._connect_soon(loop)
            future.set_exception(self._unreachable())
        return future

    @property
    def trouble(self) -> UnreachableError:
        """What kept the latest attempt from becoming a connection."""
        return self._trouble

    def connect(self) -> None:
        """Begin to connect, so that the first call finds a connection."""
        if not self._usable:
            self._connect_soon(asyncio.get_running_loop())

    async def ready(self, timeout_s: float = _READY_S) -> None:
        """Wait for a usable connection. Raises `UnreachableError` when there is none after `timeout_s`."""
        if self._usable:
            return
        self._connect_soon(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise self._unreachable() from None

    async def close(self) -> None:
        """Drop the connection and stop mending it; calls under way fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._transport is not None:
            self._transport.abort()
            self._lost(None)

    def _unreachable(self) -> UnreachableError:
        return UnreachableError(f"no connection to Redis: {self._trouble}", self._trouble.trouble)

    def _send(self, loop: asyncio.AbstractEventLoop, command: Command, deadline_s: float) -> "asyncio.Future[Any]":
        call = _Call(loop.create_future(), loop.time())
        call.timer = loop.call_later(deadline_s, self._overdue, call)
        self._calls.append(call)
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append(hiredis.pack_command(command))  # type: ignore[arg-type]  # its stub forgets tuple[X, ...]
        return call.future

    def _flush(self) -> None:
        if self._outbox and self._transport is not None:
            self._transport.write(b"".join(self._outbox))
        self._outbox.clear()

    def _overdue(self, call: _Call) -> None:
        call.timer = asyncio.get_running_loop().call_later(_GRACE_S, self._expire, call)

    def _expire(self, call: _Call) -> None:
        call.fail(StoreDeadlineError("Redis did not answer within the deadline"))
        now = asyncio.get_running_loop().time()
        if self._transport is not None and self._calls and now - self._calls[0].sent > self._stall_s:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Match replies to calls in the order in which the calls were sent."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                call = self._calls.popleft()
                if isinstance(reply, hiredis.ReplyError):
                    self._refused(call, str(reply))
                else:
                    call.answer(reply)
        except (hiredis.ProtocolError, IndexError):
            log.warning("Redis sent something that is no reply; connecting anew")
            if self._transport is not None:
                self._transport.abort()

    def _refused(self, call: _Call, text: str) -> None:
        error = refusal(text)
        call.fail(error)
        now = asyncio.get_running_loop().time()
        if error.code == "READONLY" and self._transport is not None and (self._master or now - self._since > _REDIAL_S):
            log.warning("Redis is a read-only replica; looking for the master")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is under way and start to mend, unless this connection was given up before."""
        self._lost(exc)

    def _lost(self, exc: Exception | None) -> None:
        if self._usable and not self._closed:
            log.warning("lost the connection to Redis")
            self._trouble = UnreachableError("it was lost")
        error = UnreachableError("lost the connection to Redis")
        if not self._usable:
            cut_short = _CUT_SHORT_TLS if self._login.tls else _CUT_SHORT
            error = why(exc) if isinstance(exc, ssl.SSLError) else cut_short
        self._transport, self._usable = None, False
        self._up.clear()
        if self._following is not None:
            self._following.cancel()
            self._following = None
        self._outbox.clear()
        self._reader = hiredis.Reader()
        calls, self._calls = self._calls, deque()
        for call in calls:
            call.fail(error)
        if not self._closed:
            self._connect_soon(asyncio.get_running_loop())

    def _connect_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._closed or (self._connecting is not None and not self._connecting.done()):
            return
        self._connecting = loop.create_task(self._connect())

    async def _connect(self) -> None:
        attempt = 0
        while True:
            try:
                address = await self._locate()
                async with asyncio.timeout(_CONNECT_S):
                    await self._dial(address)
            except (OSError, StoreError) as error:
                reason = why(error)
                # Once for each reason: a wrong password and a wrong port need different remedies.
                if attempt == 0 or str(reason) != str(self._trouble):
                    log.warning("cannot connect to Redis yet; trying on", extra={"error": str(reason)})
                self._trouble = reason
            else:
                self._usable, self._since = True, asyncio.get_running_loop().time()
                self._up.set()
                if self._master:
                    self._following = asyncio.create_task(self._follow(address))
                return
            if self._transport is not None:
                self._transport.abort()
            await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1

    async def _follow(self, address: Address) -> None:
        """Leave a server that is not the master any more: the same other one was named twice in a row, and is one.

        Once would not do: for a second or two after a failover, some of those who are asked still name the old one. And
        sentinels that lost their way name one that is dead, or a replica, for as long as they like.
        """
        named = unfit = address
        while True:
            await asyncio.sleep(_FOLLOW_S)
            before = named
            with contextlib.suppress(OSError, StoreError):
                named = await self._locate()
            if named == address or named != before:
                continue
            if not await self._takes_writes(named):
                if named != unfit:
                    log.warning("the sentinels name a master that cannot be used; staying with this one")
                unfit = named
            elif self._transport is not None:
                log.warning("another Redis is the master; leaving this one")
                self._transport.abort()
                return

    async def _takes_writes(self, address: Address) -> bool:
        """Whether a server lets this one in and says that it is a master."""
        probe = Link(at(address), self._login, self._name, master=True)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await probe._dial(address)
        except (OSError, StoreError):
            return False
        finally:
            await probe.close()
        return True

    async def _dial(self, address: Address) -> None:
        """Open the socket and log in."""
        loop, tls = asyncio.get_running_loop(), self._login.tls
        if not address.port:
            self._transport, _ = await loop.create_unix_connection(lambda: self, address.host)
        else:
            # Reading the authorities that a system trusts takes milliseconds.
            context = await asyncio.to_thread(tls.context) if tls else None
            self._transport, _ = await loop.create_connection(lambda: self, address.host, address.port, ssl=context)
        first = commands(self._login, self._name)
        replies = [self._send(loop, command, _CONNECT_S) for command in first.values()]
        check(list(first), await asyncio.gather(*replies, return_exceptions=True), master=self._master)
        if self._transport is None:  # lost between the last reply and this task's turn: nobody mends it but this task
            raise UnreachableError("it was lost at the end of the login")
