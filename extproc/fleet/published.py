"""What the store last had of the endpoints' states, and since when they stand as they are, by this host's own clock.

Nothing here compares the wall clocks of two hosts: a state is as old as the time since it was last seen to change.
"""

from collections.abc import Collection, Mapping

import msgspec

from extproc.errors import StoreError
from extproc.state.endpoint import EndpointState, decode


class _Receipt(msgspec.Struct):
    """One state as it was read.

    Attributes:
        payload: its bytes.
        since: monotonic time at which it was first seen so.
        state: the same, read; None before it was asked for, and for bytes that cannot be read.
    """

    payload: bytes
    since: float
    state: EndpointState | None = None


class Published:
    """The states of one pool."""

    def __init__(self) -> None:
        self._receipts: dict[str, _Receipt] = {}

    def learn(self, states: Mapping[str, bytes], at: float) -> None:
        """Take all states of the pool as they were read at the monotonic time `at`."""
        before = self._receipts
        self._receipts = {
            name: seen if (seen := before.get(name)) and seen.payload == payload else _Receipt(payload, at)
            for name, payload in states.items()
        }

    def state(self, name: str) -> EndpointState | None:
        """The state of an endpoint; None when there is none that can be read."""
        receipt = self._receipts.get(name)
        if receipt is None:
            return None
        if receipt.state is None:
            try:
                receipt.state = decode(receipt.payload)
            except StoreError:
                return None
        return receipt.state

    def stale(self, members: Collection[str], before: float) -> list[str]:
        """Endpoints that are no members, and whose states have not changed since before the monotonic time `before`."""
        return [name for name, seen in self._receipts.items() if name not in members and seen.since <= before]
