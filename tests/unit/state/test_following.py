"""A link to whichever server is the master, by the word of those who may be wrong."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from extproc.state.link import Link
from extproc.state.where import Address, Login
from tests.unit.state.test_link import LONG_S, Peer, bulk
from tests.waiting import until

MASTER, REPLICA = bulk(b"redis_version:7.0.15\r\nrole:master\r\n"), bulk(b"redis_version:7.0.15\r\nrole:slave\r\n")


class Servers:
    """Servers that say of themselves what they are told to."""

    def __init__(self) -> None:
        self._peers: list[tuple[Peer, asyncio.Server]] = []

    async def start(self, info: bytes) -> Peer:
        """One more; without an `info` nobody listens at its address."""
        peer = Peer()
        listening = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        peer.url = f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        peer.info = info
        if not info:
            listening.close()
        self._peers.append((peer, listening))
        return peer

    async def stop(self) -> None:
        """Stop them."""
        for peer, listening in self._peers:
            listening.close()
            await peer.hang_up()


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    """None yet."""
    servers = Servers()
    yield servers
    await servers.stop()


class Sentinel:
    """Names these addresses in turn, and the last one for ever after."""

    def __init__(self, *answers: Peer) -> None:
        self.asked = 0
        self.answers = answers

    async def master(self) -> Address:
        """The next answer."""
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1].address


async def test_a_master_of_the_past_is_left(servers: Servers) -> None:
    """One that goes on answering after a failover is left once another one was named twice; one voice is not enough."""
    old, new = await servers.start(MASTER), await servers.start(MASTER)
    sentinel = Sentinel(old, new, old, new, new)
    link = Link(sentinel.master, Login(), master=True)
    link.connect()
    await until(lambda: sentinel.asked >= 3 and link.usable)
    assert new.connections == 0
    # Once to see that it is a master, and once to stay.
    await until(lambda: new.connections == 2 and link.usable)
    assert sentinel.asked == 6
    await link.close()


@pytest.mark.parametrize("info", [b"", REPLICA], ids=["dead", "a replica"])
async def test_a_master_is_not_left_for_what_is_none(servers: Servers, info: bytes) -> None:
    """Sentinels that name a dead server or a replica, again and again, cost no connection to a master that answers."""
    right, wrong = await servers.start(MASTER), await servers.start(info)
    sentinel = Sentinel(right, wrong)
    link = Link(sentinel.master, Login(), master=True)
    await link.ready(LONG_S)
    await until(lambda: sentinel.asked >= 5)
    assert link.usable
    assert right.connections == 1
    await link.close()
