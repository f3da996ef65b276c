"""A cluster: each pool lies on the node that has its hash slot, and stays in reach when the slot moves."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from extproc.errors import StoreError
from extproc.state.hello import Command
from extproc.state.link import Link, at
from extproc.state.slots import nodes, parse_redirection, parse_slots, slot_of
from extproc.state.trouble import (
    AnsweredError,
    RefusedError,
    StoreDeadlineError,
    Trouble,
    UnreachableError,
    trouble_of,
)
from extproc.state.where import Address, Login

log = logging.getLogger(__name__)

# A failover takes a second or two: nodes are asked who has what until somebody else has it, no more often than this.
_ASK_AGAIN_S: Final = 0.2
_ANSWER_S: Final = 1.0
_MAP_S: Final = 2.0
_DOWN: Final = frozenset({"CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "LOADING"})


class Cluster:
    """The masters of a cluster, a connection to each. Serves `nodes.Nodes`.

    Who has which slot is asked of any node: at the start, when a node says that a slot has moved, and while a node is
    lost. A call that meets a slot on its move is sent once more, to where it is now, within its own deadline. Pools on
    living nodes are served while another node is down.

    Args:
        addresses: some of its nodes.
        login: what to say first to each node.
    """

    def __init__(self, addresses: Sequence[Address], login: Login) -> None:
        self._seeds = list(addresses)
        self._login = login
        self._owners: dict[int, Address] = {}
        self._links: dict[Address, Link] = {}
        self._known = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._turn = 0
        self._trouble = UnreachableError("none was asked yet")
        self._closed = False

    async def call(self, key: str, command: Command, deadline_s: float) -> Any:
        """See `Nodes.call`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        owner = self._owner(key)
        try:
            return await self._link(owner).call(command, deadline_s)
        except RefusedError as error:
            return await self._elsewhere(error, command, until - loop.time())
        except StoreError as error:
            self.failed(error)
            raise

    async def ready(self, key: str) -> None:
        """See `Nodes.ready`. Without a key, one node that answers is enough, once the slots are known."""
        await self._map()
        try:
            await self._link(self._owner(key)).ready()
        except UnreachableError as error:
            self.failed(error)
            raise

    def open(self, key: str, name: str) -> Link:
        """See `Nodes.open`."""

        async def locate() -> Address:
            await self._map()
            return self._owner(key)

        return Link(locate, self._login, name)

    def failed(self, error: StoreError) -> bool:
        """See `Nodes.failed`."""
        refused = isinstance(error, RefusedError) and error.code in {"MOVED", "ASK", *_DOWN}
        if refused or isinstance(error, UnreachableError | StoreDeadlineError):
            self._ask_soon()
        return isinstance(error, RefusedError) and error.code == "MOVED" and self._follow(error) is not None

    async def close(self) -> None:
        """See `Nodes.close`."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for link in self._links.values():
            await link.close()
        self._links.clear()

    async def _elsewhere(self, error: RefusedError, command: Command, left_s: float) -> Any:
        """Send a command to where its slot is, once. Raises `StoreError` when it is nowhere, or there is no time."""
        self.failed(error)
        if error.code in _DOWN:
            raise UnreachableError(f"the cluster does not serve this slot ({error.code})", Trouble.CLUSTER_DOWN)
        if error.code not in {"MOVED", "ASK"}:
            raise error
        if (node := self._follow(error)) is None:
            raise UnreachableError(f"the cluster does not say where the slot is ({error.code})", Trouble.CLUSTER_DOWN)
        link = self._link(node)
        began = asyncio.get_running_loop().time()
        if not link.usable:
            await link.ready(max(0.0, left_s))
            left_s -= asyncio.get_running_loop().time() - began
        if error.code == "ASK":
            # Nothing comes between the two: they are written in one turn of the event loop.
            link.call(("ASKING",), left_s).add_done_callback(_seen)
        try:
            return await link.call(command, left_s)
        except RefusedError as again:
            if again.code in _DOWN | {"MOVED", "ASK"}:
                raise UnreachableError(f"the slot is on its move ({again.code})", Trouble.CLUSTER_DOWN) from None
            raise

    def _follow(self, error: RefusedError) -> Address | None:
        """Where a redirection points, remembered when it is for good; None when it cannot be read."""
        if (found := parse_redirection(error.to, self._owners)) is None:
            return None
        slot, node = found
        if error.code == "MOVED":
            self._owners[slot] = node
        return node

    def _owner(self, key: str) -> Address:
        """The node that has a key; for an empty one, a connected node if there is any. Raises `UnreachableError`."""
        if key:
            if (owner := self._owners.get(slot_of(key))) is not None:
                return owner
        elif self._owners:
            usable = (node for node, link in self._links.items() if link.usable)
            return next(usable, next(iter(self._owners.values())))
        self._ask_soon()
        if not self._owners:
            raise self._unmapped()
        raise UnreachableError("no node of the cluster has this slot", Trouble.CLUSTER_DOWN)

    def _unmapped(self) -> UnreachableError:
        text = f"no node of the cluster says which node has what: {self._trouble}"
        return UnreachableError(text, self._trouble.trouble)

    def _link(self, node: Address) -> Link:
        if (link := self._links.get(node)) is None:
            link = self._links[node] = Link(at(node), self._login)
        return link

    async def _map(self) -> None:
        """Wait until it is known who has what. Raises `UnreachableError` when nobody says so in time."""
        if self._known.is_set():
            return
        self._ask_soon()
        try:
            async with asyncio.timeout(_MAP_S):
                await self._known.wait()
        except TimeoutError:
            raise self._unmapped() from None

    def _ask_soon(self) -> None:
        if not self._closed and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._ask_around())

    async def _ask_around(self) -> None:
        """Ask the nodes in turn who has what, until one answers."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._asked_at + _ASK_AGAIN_S - loop.time()))
        while True:
            self._asked_at = loop.time()
            # Each time another one: who is cut off from the others knows the owners of the past only.
            around = nodes([*self._owners.values(), *self._seeds])
            node = around[self._turn % len(around)]
            self._turn += 1
            try:
                await self._learn(node)
            except StoreError as error:
                self._note(error)
            else:
                return
            await asyncio.sleep(_ASK_AGAIN_S / len(around))

    def _note(self, error: StoreError) -> None:
        """Remember, and log once, what keeps a node from telling."""
        trouble = trouble_of(error)
        text = str(error)
        if trouble is Trouble.NO_PERMISSION:
            text = "the user may not ask for slots (NOPERM): allow +cluster|slots"
        elif isinstance(error, RefusedError):
            text = f"a node refused to tell of slots ({error.code}): write redis:// in redis.url for what is no cluster"
        if text != str(self._trouble):
            log.warning("no node of the cluster says which node has what; asking on", extra={"error": text})
        self._trouble = UnreachableError(text, trouble)

    async def _learn(self, node: Address) -> None:
        link = self._link(node)
        await link.ready(_ANSWER_S / 2)
        reply = await link.call(("CLUSTER", "SLOTS"), _ANSWER_S)
        try:
            owners = parse_slots(reply, node)
        except ValueError:
            raise AnsweredError("a node answered CLUSTER SLOTS with something else") from None
        if not owners:
            raise UnreachableError("its nodes are not joined, or have no slots yet", Trouble.CLUSTER_DOWN)
        self._owners = owners
        self._known.set()
        masters = set(owners.values())
        # The node that answered may be a replica, and no call goes there.
        gone = [self._links.pop(each) for each in self._links.keys() - masters]
        for each in gone:
            await each.close()
        for master in masters:
            self._link(master).connect()


def _seen(reply: "asyncio.Future[Any]") -> None:
    """ASKING has no answer of use; where it failed, so does the command behind it."""
    if not reply.cancelled():
        reply.exception()
