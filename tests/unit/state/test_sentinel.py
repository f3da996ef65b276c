"""Sentinels asked for the master, against some that are dead, silent, cut off or of another mind."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from extproc.state.sentinel import Sentinels
from extproc.state.trouble import Trouble, UnreachableError
from extproc.state.where import Address, Login
from tests.ports import free_port


def named(host: bytes, port: int) -> bytes:
    """A sentinel's reply to SENTINEL GET-MASTER-ADDR-BY-NAME."""
    number = str(port).encode()
    return b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(host), host, len(number), number)


class Stage:
    """Sentinels that answer what they are told to."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._servers: list[asyncio.Server] = []

    async def sentinel(self, *replies: bytes) -> Address:
        """One that answers each connection with all of these, or says nothing when there are none."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.heard.append(await reader.read(65_536))
            writer.write(b"".join(replies))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", port := free_port())
        self._servers.append(server)
        return Address("127.0.0.1", port)

    def close(self) -> None:
        """Stop them."""
        for server in self._servers:
            server.close()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """An empty stage."""
    stage = Stage()
    yield stage
    stage.close()


async def test_the_first_that_answers_is_believed(stage: Stage) -> None:
    """Dead and silent sentinels are passed over."""
    dead, silent = Address("127.0.0.1", free_port()), await stage.sentinel()
    alive = await stage.sentinel(named(b"10.0.0.1", 7))
    assert await Sentinels([dead, silent, alive], "m", Login()).master() == Address("10.0.0.1", 7)


async def test_each_time_another_one_is_asked_first(stage: Stage) -> None:
    """A sentinel cut off from the others goes on naming a dead master: who cannot use that one hears the next."""
    stale = await stage.sentinel(named(b"10.0.0.1", 7))
    right = await stage.sentinel(named(b"10.0.0.2", 7))
    sentinels = Sentinels([stale, right], "m", Login())
    assert [(await sentinels.master()).host for _ in range(3)] == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


async def test_one_that_knows_no_such_master_is_passed_over(stage: Stage) -> None:
    """A sentinel that was just set up knows nothing yet; when none knows, the name is what is wrong."""
    ignorant = await stage.sentinel(b"*-1\r\n")
    knowing = await stage.sentinel(named(b"10.0.0.2", 7))
    assert (await Sentinels([ignorant, knowing], "m", Login()).master()).host == "10.0.0.2"
    with pytest.raises(UnreachableError, match=r"know no master of this name: correct it in redis\.url"):
        await Sentinels([ignorant], "m", Login()).master()


@pytest.mark.parametrize(
    ("replies", "trouble", "text"),
    [
        ((b"-NOAUTH Authentication required.\r\n",), Trouble.WRONG_PASSWORD, "sentinel_password"),
        ((b"-NOPERM no\r\n",), Trouble.NO_PERMISSION, r"allow \+sentinel\|get-master-addr-by-name"),
        ((b"-ERR unknown command 'SENTINEL'\r\n",), Trouble.GONE, "names sentinels"),
        ((b":1\r\n",), Trouble.GONE, "no master of this name"),
        ((b"?nonsense\r\n",), Trouble.GONE, "no sentinel answers: correct the ports"),
    ],
)
async def test_what_a_sentinel_refuses_is_told(
    stage: Stage, replies: tuple[bytes, ...], trouble: Trouble, text: str
) -> None:
    """A login, a permission, a server that is no sentinel: each has its remedy."""
    with pytest.raises(UnreachableError, match=text) as caught:
        await Sentinels([await stage.sentinel(*replies)], "m", Login()).master()
    assert caught.value.trouble is trouble


async def test_the_login_at_sentinels_is_their_own(stage: Stage) -> None:
    """User and password go before the question; a password alone is the default user's; a wrong one is told."""
    answer = await stage.sentinel(b"+OK\r\n", named(b"10.0.0.1", 7))
    await Sentinels([answer], "m", Login(username="me", password="pw")).master()
    await Sentinels([answer], "m", Login(password="pw")).master()
    assert b"AUTH\r\n$2\r\nme\r\n$2\r\npw\r\n" in stage.heard[0]
    assert b"AUTH\r\n$7\r\ndefault\r\n$2\r\npw\r\n" in stage.heard[1]
    refusing = await stage.sentinel(b"-WRONGPASS invalid\r\n", b"-NOAUTH no\r\n")
    with pytest.raises(UnreachableError, match=r"WRONGPASS.*correct sentinel_username"):
        await Sentinels([refusing], "m", Login(password="bad")).master()
