"""Which server is the master, by the sentinels that watch it."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import hiredis

from extproc.errors import StoreError
from extproc.state.hello import Command, why
from extproc.state.trouble import Trouble, UnreachableError, refusal
from extproc.state.where import Address, Login

log = logging.getLogger(__name__)

# A sentinel answers within a millisecond; one that is frozen or cut off must not hold up the question to the next.
_ASK_S: Final = 0.5
_READ: Final = 65_536


class Sentinels:
    """The sentinels of one master.

    Args:
        addresses: where they listen; at least one.
        name: how they call the master.
        login: at the sentinels, which have users of their own.
    """

    def __init__(self, addresses: Sequence[Address], name: str, login: Login) -> None:
        self._addresses = addresses
        self._name = name
        self._login = login
        self._next = 0

    async def master(self) -> Address:
        """Where the master is, by the first sentinel that answers; the next time another one is asked first.

        A sentinel that is cut off from the others may go on naming a master of the past, so that whoever cannot use
        the one that was named has to hear another sentinel.

        Raises:
            UnreachableError: none answers, or those that do know no such master.
        """
        first, self._next = self._next, (self._next + 1) % len(self._addresses)
        trouble = UnreachableError("no sentinel answers")
        for address in (*self._addresses[first:], *self._addresses[:first]):
            try:
                async with asyncio.timeout(_ASK_S):
                    return await self._ask(address)
            except (OSError, StoreError) as error:
                trouble = why(error)
        raise UnreachableError(f"no sentinel names the master: {trouble}", trouble.trouble)

    async def _ask(self, address: Address) -> Address:
        commands: list[Command] = []
        login = self._login
        if login.username or login.password:
            commands.append(("AUTH", login.username or "default", login.password))
        commands.append(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name))
        reply = (await _exchange(address, login, commands))[-1]
        match reply:
            case [bytes(host), bytes(port)] if port.isdigit():
                return Address(host.decode(), int(port))
            case hiredis.ReplyError():
                raise _refused(refusal(str(reply)).code)
        raise UnreachableError("the sentinels know no master of this name: correct it in redis.url")


def _refused(code: str) -> UnreachableError:
    if code in {"NOAUTH", "WRONGPASS"}:
        return UnreachableError(
            f"a sentinel refused the login ({code}): correct sentinel_username and sentinel_password in redis.url",
            Trouble.WRONG_PASSWORD,
        )
    if code == "NOPERM":
        return UnreachableError(
            "a sentinel's user may not ask (NOPERM): allow +sentinel|get-master-addr-by-name", Trouble.NO_PERMISSION
        )
    return UnreachableError(f"a sentinel refused the question ({code}): see that redis.url names sentinels")


async def _exchange(address: Address, login: Login, commands: Sequence[Command]) -> list[Any]:
    """Replies to commands on a connection of their own, up to the first error."""
    context = await asyncio.to_thread(login.tls.context) if login.tls else None
    stream, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    try:
        writer.write(b"".join(hiredis.pack_command(command) for command in commands))  # type: ignore[arg-type]
        parser = hiredis.Reader()
        replies: list[Any] = []
        while len(replies) < len(commands):
            if not (data := await stream.read(_READ)):
                raise UnreachableError("a sentinel hung up")
            parser.feed(data)
            while (reply := parser.gets()) is not False:
                replies.append(reply)
                if isinstance(reply, hiredis.ReplyError):
                    return replies
    except hiredis.ProtocolError:
        raise UnreachableError("something that is no sentinel answers: correct the ports in redis.url") from None
    finally:
        writer.transport.abort()
    return replies
