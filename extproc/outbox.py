"""Deltas of one pool that wait to be sent to the other replicas."""

from collections import deque

from extproc.state import feed
from extproc.state.feed import Delta

ENTRY_BYTES = 64 * 1024
"""Where an entry ends. What piled up during an outage would be one entry of 40 MB otherwise: no deadline is long enough
for it, the circuit opens, and the same bytes are sent again as soon as it closes. Readers apply 64 KB in about 3 ms."""
_MOST_QUEUED = 10_000
_MOST_QUEUED_BYTES = 16 * 1024 * 1024


class Outbox:
    """Oldest first, in entries that are numbered, so that readers notice when one is missing.

    Attributes:
        number: of the last entry that was made.
    """

    def __init__(self, replica: str) -> None:
        """Start empty; `replica` is who sends."""
        self.number = 0
        self._replica = replica
        self._deltas: deque[Delta] = deque()
        self._bytes = 0
        self._entry: tuple[bytes, int] | None = None
        self._lost = False

    def __len__(self) -> int:
        """Deltas that wait."""
        return len(self._deltas)

    def put(self, delta: Delta) -> bool:
        """Queue a delta; False when there is no room, or it says what cannot be and would be refused."""
        size = feed.size(delta)
        full = len(self._deltas) >= _MOST_QUEUED or (self._deltas and self._bytes + size > _MOST_QUEUED_BYTES)
        if full or not feed.is_sound(delta):
            self._lost = True
            return False
        self._deltas.append(delta)
        self._bytes += size
        return True

    def entry(self) -> bytes:
        """The next entry, empty for none: the oldest deltas, as many as fit one, and one at least.

        It stays the same until it was `sent`: one that was taken although no answer came is known by its number when
        it comes again.
        """
        if self._entry is None and self._deltas:
            # A number left out says that something was given up between the last entry and this one.
            self.number += 2 if self._lost else 1
            self._lost = False
            deltas = self._oldest()
            self._entry = (feed.encode(self._replica, deltas, self.number), len(deltas))
        return self._entry[0] if self._entry else b""

    def sent(self) -> int:
        """Take out what `entry` gave; returns how many deltas that were."""
        _, count = self._entry or (b"", 0)
        for _ in range(count):
            self._bytes -= feed.size(self._deltas.popleft())
        self._entry = None
        return count

    def _oldest(self) -> list[Delta]:
        chosen: list[Delta] = []
        left = ENTRY_BYTES
        for delta in self._deltas:
            left -= feed.size(delta)
            if chosen and left < 0:
                break
            chosen.append(delta)
        return chosen
