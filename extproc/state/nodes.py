"""The servers of a deployment: which one has a key, and what to do when it has it no longer."""

from collections.abc import Awaitable
from typing import Any, Protocol

from extproc.errors import StoreError
from extproc.state.cluster import Cluster
from extproc.state.hello import Command
from extproc.state.link import Link, Locate, at
from extproc.state.sentinel import Sentinels
from extproc.state.where import Login, Where


class Nodes(Protocol):
    """Where calls go. All keys of one pool lie on one node, which may be another one from one moment to the next."""

    def call(self, key: str, command: Command, deadline_s: float) -> Awaitable[Any]:
        """Send a command to the node that has `key`; its reply, or `StoreError` after the deadline at the latest.

        Fails at once while no connection to that node is there. An empty key means any node.
        """
        ...

    async def ready(self, key: str) -> None:
        """Wait up to a second or two for a connection to the node that has `key`. Raises `StoreError` without one."""
        ...

    def open(self, key: str, name: str) -> Link:
        """One more connection to whichever node has `key` when it is made; whoever opens it closes it.

        Args:
            key: what will be asked for.
            name: what CLIENT LIST shows.
        """
        ...

    def failed(self, error: StoreError) -> bool:
        """Be told how a call on a link of `open` failed; True when keys have moved, and a new link leads to them."""
        ...

    async def close(self) -> None:
        """Drop all connections but those of `open`."""
        ...


class OneNode:
    """One server that has all keys: always the same, or whichever is the master.

    Args:
        locate: where it is.
        login: what to say first.
        master: whether another server may become the one, so that a replica is never it.
    """

    def __init__(self, locate: Locate, login: Login, *, master: bool) -> None:
        self._locate = locate
        self._login = login
        self._master = master
        self._link = Link(locate, login, master=master)

    def call(self, key: str, command: Command, deadline_s: float) -> Awaitable[Any]:  # noqa: ARG002  # it has all keys
        """See `Nodes.call`."""
        return self._link.call(command, deadline_s)

    async def ready(self, key: str) -> None:  # noqa: ARG002  # it has all keys
        """See `Nodes.ready`."""
        await self._link.ready()

    def open(self, key: str, name: str) -> Link:  # noqa: ARG002  # it has all keys
        """See `Nodes.open`."""
        return Link(self._locate, self._login, name, master=self._master)

    def failed(self, error: StoreError) -> bool:  # noqa: ARG002  # each link looks for the master by itself
        """See `Nodes.failed`."""
        return False

    async def close(self) -> None:
        """See `Nodes.close`."""
        await self._link.close()


def nodes_of(where: Where) -> Nodes:
    """The servers of a deployment; connections are made at the first call."""
    if where.kind == "sentinel":
        return OneNode(Sentinels(where.addresses, where.master, where.sentinel_login).master, where.login, master=True)
    if where.kind == "cluster":
        return Cluster(where.addresses, where.login)
    return OneNode(at(where.addresses[0]), where.login, master=False)
