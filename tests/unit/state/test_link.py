"""The shared connection: order, late replies, loss and return, against a peer that answers when it is told to."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from extproc.errors import StoreError
from extproc.state.link import Link, at
from extproc.state.trouble import RefusedError, StoreDeadlineError, Trouble, UnreachableError
from extproc.state.where import Address, Login, parse
from tests.valkey import Valkey
from tests.waiting import until

LONG_S = 30.0
SHORT_S = 0.02


class Peer:
    """A TCP server that accepts everything and writes only what the test tells it to."""

    def __init__(self) -> None:
        self.url = ""
        self.received = b""
        self.writer: asyncio.StreamWriter | None = None
        self.writers: list[asyncio.StreamWriter] = []
        self.connections = 0
        self.after_login = b""
        self.info = b"-NOPERM this user has no permissions to run the 'info' command\r\n"

    @property
    def address(self) -> Address:
        """Where it listens."""
        return parse(self.url).addresses[0]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the handshake, then only listen."""
        self.connections += 1
        self.writer = writer
        self.writers.append(writer)
        while b"INFO" not in (data := await reader.read(65536)):
            if not data:
                return
        writer.write(b"+OK\r\n" + self.info + self.after_login)
        while data := await reader.read(65536):
            self.received += data
        writer.close()

    async def hang_up(self) -> None:
        """Close all connections, that of a link which was closed while it connected too."""
        await asyncio.sleep(0.01)
        for writer in self.writers:
            writer.close()
        await asyncio.sleep(0)

    def say(self, data: bytes) -> None:
        """Write to the link."""
        assert self.writer is not None
        self.writer.write(data)

    async def heard(self, text: bytes) -> None:
        """Wait until `text` has come."""
        await until(lambda: text in self.received)


def link_to(url: str) -> Link:
    """A link to the one server of a URL."""
    where = parse(url)
    return Link(at(where.addresses[0]), where.login)


@pytest.fixture
async def peer() -> AsyncIterator[tuple[Peer, Link]]:
    """A peer and a link connected to it."""
    peer = Peer()
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    peer.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    link = Link(at(peer.address), Login())
    await link.ready(LONG_S)
    yield peer, link
    await link.close()
    server.close()
    await peer.hang_up()


async def test_a_late_reply_is_not_taken_for_another_calls(peer: tuple[Peer, Link]) -> None:
    """A call that missed its deadline keeps its place: the next call gets its own reply, not the late one."""
    server, link = peer
    with pytest.raises(StoreDeadlineError):
        await link.call(("GET", "first"), SHORT_S)
    second = link.call(("GET", "second"), LONG_S)
    await server.heard(b"second")
    server.say(b"$5\r\nlate!\r\n")
    server.say(b"$4\r\nmine\r\n")
    assert await second == b"mine"


async def test_calls_of_one_turn_leave_together_and_in_order(peer: tuple[Peer, Link]) -> None:
    """Replies are matched first in, first out, also when one packet brings several and half of one."""
    server, link = peer
    calls = [link.call(("ECHO", str(i)), LONG_S) for i in range(3)]
    await server.heard(b"$1\r\n2\r\n")
    assert server.received.index(b"\r\n0\r\n") < server.received.index(b"\r\n1\r\n")
    server.say(b":0\r\n-ERR some value\r\n:")
    assert await calls[0] == 0
    with pytest.raises(RefusedError, match=r"ERR$"):
        await calls[1]
    server.say(b"2\r\n")
    assert await calls[2] == 2


async def test_a_lost_connection_fails_at_once_and_mends(peer: tuple[Peer, Link]) -> None:
    """Calls under way fail when the connection is lost, and a new connection serves without a restart."""
    server, link = peer
    call = link.call(("GET", "x"), LONG_S)
    await server.heard(b"GET")
    assert server.writer is not None
    server.writer.transport.abort()
    with pytest.raises(StoreError, match="lost the connection"):
        await call
    with pytest.raises(StoreError, match="no connection"):
        await link.call(("GET", "x"), LONG_S)
    await link.ready(LONG_S)
    again = link.call(("GET", "again"), LONG_S)
    await server.heard(b"again")
    server.say(b"+fine\r\n")
    assert await again == b"fine"
    assert server.connections == 2


async def test_a_connection_that_is_lost_at_the_end_of_its_login_is_made_anew(peer: tuple[Peer, Link]) -> None:
    """The peer answers the login and is gone in the same moment: the link does not take what it lost for usable."""
    server, first = peer
    await first.close()
    server.after_login = b"+OK\r\n"  # one reply too many: the link hangs up while the login's end is on its way
    link = Link(at(server.address), Login())
    link.connect()
    await until(lambda: server.connections >= 3)
    server.after_login = b""
    await until(lambda: link.usable)
    call = link.call(("GET", "key"), LONG_S)
    await server.heard(b"key")
    server.say(b"$2\r\nhi\r\n")
    assert await call == b"hi"
    await link.close()


async def test_a_silent_peer_is_given_up(peer: tuple[Peer, Link]) -> None:
    """A host that vanished closes no connection: after `stall_s` without a reply a new one is made."""
    server, first = peer
    await first.close()
    link = Link(at(server.address), Login(), stall_s=2 * SHORT_S)
    await link.ready(LONG_S)
    with pytest.raises(StoreDeadlineError):
        await link.call(("GET", "x"), SHORT_S)
    with pytest.raises(StoreError):
        await link.call(("GET", "x"), 3 * SHORT_S)
    await until(lambda: server.connections == 3)
    await link.close()


@pytest.mark.parametrize("nonsense", [b"?what\r\n", b"+unasked\r\n"])
async def test_a_peer_that_is_no_redis_is_dropped(peer: tuple[Peer, Link], nonsense: bytes) -> None:
    """Bytes that are no reply, and replies that nobody asked for, end the connection: order is lost."""
    server, link = peer
    server.say(nonsense)
    await until(lambda: server.connections == 2)
    await link.ready(LONG_S)


async def test_a_cancelled_call_keeps_its_place(peer: tuple[Peer, Link]) -> None:
    """The reply to a call whose caller went away is thrown away."""
    server, link = peer
    gone = link.call(("GET", "gone"), LONG_S)
    here = link.call(("GET", "here"), LONG_S)
    gone.cancel()
    await server.heard(b"here")
    server.say(b"+one\r\n+two\r\n")
    assert await here == b"two"


async def test_a_closed_link_stays_closed(peer: tuple[Peer, Link]) -> None:
    """After `close` calls fail and nothing connects again."""
    server, link = peer
    call = link.call(("GET", "x"), LONG_S)
    await link.close()
    with pytest.raises(StoreError):
        await call
    with pytest.raises(StoreError):
        await link.call(("GET", "x"), LONG_S)
    with pytest.raises(StoreError):
        await link.ready(SHORT_S)
    assert server.connections == 1


async def test_password_and_database_come_from_the_url() -> None:
    """The handshake logs in and selects; with a wrong password the link never gets ready."""
    with Valkey(0, "--requirepass", "hidden") as server:
        good = link_to(f"redis://:hidden@127.0.0.1:{server.port}/3")
        await good.ready(LONG_S)
        assert b"db=3" in await good.call(("CLIENT", "INFO"), LONG_S)
        await good.close()
        bad = link_to(f"redis://:wrong@127.0.0.1:{server.port}")
        bad.connect()
        await until(lambda: bad.trouble.trouble is Trouble.WRONG_PASSWORD)
        with pytest.raises(
            UnreachableError, match=r"refused the login \(WRONGPASS\): correct user and password"
        ) as caught:
            await bad.call(("PING",), LONG_S)
        assert caught.value.trouble is Trouble.WRONG_PASSWORD
        await bad.close()


async def test_a_wrong_password_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The log tells a wrong password from a wrong address, and holds neither of the two passwords."""
    with Valkey(0, "--requirepass", "right") as server:
        link = link_to(f"redis://:wrong@127.0.0.1:{server.port}/0")
        await until(lambda: refused_by(link, caplog))
        await link.close()
    assert "right" not in caplog.text
    assert "wrong" not in caplog.text


def refused_by(link: Link, caplog: pytest.LogCaptureFixture) -> bool:
    """Call once; whether the log says by now that the password is wrong."""
    link.call(("PING",), LONG_S).exception()
    return any("WRONGPASS" in str(getattr(record, "error", "")) for record in caplog.records)


async def test_an_old_version_is_not_used(peer: tuple[Peer, Link], caplog: pytest.LogCaptureFixture) -> None:
    """What the scripts need is not there before Redis 6.2: calls fail with the remedy, until it has been renewed."""
    server, first = peer
    await first.close()
    server.info = bulk(b"# Server\r\nredis_version:5.0.14\r\nrole:master\r\n")
    link = Link(at(server.address), Login())
    link.connect()
    await until(lambda: link.trouble.trouble is Trouble.OLD_VERSION)
    with pytest.raises(UnreachableError, match=r"redis 5\.0\.14 is too old: use Redis 6\.2 or Valkey 7\.2"):
        await link.call(("PING",), LONG_S)
    assert [record for record in caplog.records if "too old" in str(getattr(record, "error", ""))]
    server.info = bulk(b"redis_version:6.2.0\r\n")
    await until(lambda: link.usable)
    await link.close()


async def test_a_reason_is_logged_once(peer: tuple[Peer, Link], caplog: pytest.LogCaptureFixture) -> None:
    """A server that cannot be used is tried for hours: one line for each reason, not for each attempt."""
    server, first = peer
    await first.close()
    caplog.clear()
    server.info = bulk(b"redis_version:5.0.14\r\n")
    link = Link(at(server.address), Login())
    link.connect()
    await until(lambda: server.connections >= 4)
    server.info = bulk(b"valkey_version:7.0.1\r\nredis_version:7.2.4\r\n")
    await until(lambda: "valkey" in str(link.trouble))
    reasons = [str(getattr(record, "error", "")) for record in caplog.records if "cannot connect" in record.message]
    assert len(reasons) == len(set(reasons)) == 2
    await link.close()


async def test_a_replica_is_no_master(peer: tuple[Peer, Link]) -> None:
    """Who needs a master passes a replica by, and asks anew where the master is before each attempt."""
    server, first = peer
    await first.close()
    asked = 0

    async def locate() -> Address:
        nonlocal asked
        asked += 1
        return server.address

    server.info = bulk(b"redis_version:7.0.15\r\nrole:slave\r\n")
    link = Link(locate, Login(), master=True)
    link.connect()
    await until(lambda: asked >= 3)
    assert link.trouble.trouble is Trouble.READ_ONLY
    server.info = bulk(b"redis_version:7.0.15\r\nrole:master\r\n")
    await until(lambda: link.usable)
    before = server.connections
    refused = link.call(("SET", "x", 1), LONG_S)
    await server.heard(b"SET")
    server.say(b"-READONLY You can't write against a read only replica.\r\n")
    with pytest.raises(RefusedError, match="READONLY"):
        await refused
    await until(lambda: server.connections > before and link.usable)
    await link.close()


def bulk(text: bytes) -> bytes:
    """A bulk string, as Redis writes it."""
    return b"$%d\r\n%b\r\n" % (len(text), text)
