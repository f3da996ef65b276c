"""Sockets that are read, and how much libzmq queues for them."""

from typing import Final

import zmq

QUEUED: Final = 20_000
"""Messages that libzmq keeps for us, at most: more than the 10,000 batches that engines replay by default, because a
router socket drops what finds no room, and a few seconds of events."""
_LEAST_QUEUED: Final = 2
QUEUED_BYTES: Final = 256 * 1024 * 1024
"""What libzmq keeps for all sockets together. It counts messages alone, so that each socket's number follows from what
its messages take. One that is full is not read: the engine keeps what comes then, 100,000 batches by default."""
_USUAL_BYTES: Final = 4 * 1024
"""A message of which nothing is known yet: a step of some 20 blocks."""
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)


class Inlets:
    """How many sockets are read, which share the memory that libzmq may take."""

    def __init__(self) -> None:
        self.count = 0

    def opened(self, socket: "zmq.Socket[bytes]") -> "Inlet":
        """One more."""
        self.count += 1
        return Inlet(socket, self)


class Inlet:
    """A socket that is read.

    Attributes:
        socket: the socket.
        peers: how many send to it; libzmq queues for each of them.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", inlets: Inlets) -> None:
        self.socket = socket
        self.peers = 1
        self._inlets = inlets
        self._size = float(_USUAL_BYTES)
        self._most = 0
        self.fit()

    def received(self) -> tuple[list[bytes] | None, int]:
        """The next message, None when none is there, and how many bytes it has."""
        parts = received(self.socket)
        if parts is None:
            return None, 0
        size = sum(map(len, parts))
        # A long one counts at once, those that are shorter little by little.
        self._size = size if size > self._size else self._size + (size - self._size) / 64
        return parts, size

    def fit(self) -> None:
        """Let libzmq queue as many messages as this socket's part of the memory holds."""
        part = QUEUED_BYTES // (self._inlets.count * self.peers)
        most = max(_LEAST_QUEUED, min(QUEUED, int(part / self._size)))
        if 4 * most < 3 * self._most or most >= 2 * self._most:
            self.socket.rcvhwm = self._most = most

    def close(self) -> None:
        """Close it."""
        self._inlets.count -= 1
        self.socket.close(linger=0)


def received(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    """The next message; None when none is there."""
    # Most sockets have nothing most of the time, and asking costs less than an exception. Enums would cost 2 us more.
    if not int(socket.get(_EVENTS)) & _READABLE:
        return None
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
