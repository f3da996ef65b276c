"""Batches of KV events that wait for a replay, in bounded memory."""

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.fleet.kv_order import Apply

MOST: Final = 10_000
MOST_BYTES: Final = 16 * 1024 * 1024
"""Of one stream; twice the longest batch."""
ROOM_BYTES: Final = 256 * 1024 * 1024
"""Of all streams of a keeper: what 100 busy engines tell in 20 s."""


class Room:
    """Memory that several queues share.

    Args:
        most: how much it is, in bytes.
    """

    def __init__(self, most: int = ROOM_BYTES) -> None:
        self._most = most
        self.used = 0

    def take(self, size: int) -> bool:
        """Take some; False when so much is not left."""
        if self.used + size > self._most:
            return False
        self.used += size
        return True


class Held:
    """Live batches of one stream, oldest first. One that finds no room is missed, which the next one shows.

    Args:
        room: memory for the batches of all streams.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._batches: deque[Apply] = deque()
        self._bytes = 0

    def put(self, batch: "Apply") -> None:
        """Keep a batch, if there is room."""
        size = len(batch.payload)
        if len(self._batches) < MOST and self._bytes + size <= MOST_BYTES and self._room.take(size):
            self._batches.append(batch)
            self._bytes += size

    def take(self) -> "deque[Apply]":
        """All batches; none is kept."""
        batches, self._batches = self._batches, deque()
        self._room.used -= self._bytes
        self._bytes = 0
        return batches
