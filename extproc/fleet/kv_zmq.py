"""Sockets for KV events: the subscription to what an engine publishes, and the replay of what it published before.

Who binds is told in `kv_address`. One subscription is bound for all engines that publish to the same address; they are
told apart by their topics.

Sockets are plain and never wait: whoever reads them looks at them every few milliseconds, and libzmq queues meanwhile.
"""

import errno
from collections import deque
from typing import Final

import zmq

from extproc.engines import kv_frames
from extproc.engines.kv_frames import MAX_PAYLOAD_BYTES, Frame
from extproc.errors import EngineError
from extproc.fleet import kv_inlet
from extproc.fleet.kv_address import Place, is_loopback, split
from extproc.fleet.kv_held import Room
from extproc.fleet.kv_inlet import Inlet, Inlets, received

_MOST_SOCKETS: Final = 16_384
"""libzmq's own limit of 1023 is that of 256 data-parallel ranks: each has a subscription, two ends of what watches it,
and at times a replay."""
_MOST_BYTES: Final = 4 * 1024 * 1024
"""Fetched at a time, and a message: 200 MB a second, and no more memory for an engine that sends long ones."""
_HEARTBEAT_MS: Final = 5_000
"""Without heartbeats a subscriber never learns that a cable was cut: it only listens."""
_DEAD_AFTER_MS: Final = 15_000
_RECONNECT_MS: Final = 100
_RECONNECT_MOST_MS: Final = 2_000


class Stream:
    """The events of one source. Made by `Sockets`; nothing here waits.

    Attributes:
        malformed: messages that were none; whoever reads sets it back.
        has_more: more has come than the last call of `frames` returned.
    """

    def __init__(
        self,
        subscription: "_Subscription",
        topic: bytes,
        context: "zmq.Context[zmq.Socket[bytes]]",
        inlets: Inlets,
    ) -> None:
        self._subscription = subscription
        self._topic = topic
        self._context = context
        self._inlets = inlets
        self._dealer: Inlet | None = None
        self._connections = 0
        self.malformed = 0
        self.has_more = False

    def reconnected(self) -> bool:
        """Whether a connection came about since the last call: what was published before that was not heard."""
        before, self._connections = self._connections, self._subscription.connections()
        return before != self._connections

    def frames(self, most: int) -> list[Frame]:
        """Batches that were published since, `most` at the most, oldest first."""
        found, malformed, self.has_more = self._subscription.frames(self._topic, most)
        self.malformed += malformed
        return found

    def ask(self, address: str, start: int) -> None:
        """Ask for a replay; answers of an earlier one do not come any more, as each has a socket of its own.

        Raises:
            EngineError: the address cannot be connected to.
        """
        self.hang_up()
        try:
            dealer = _socket(self._context, zmq.DEALER, address)
            self._dealer = self._inlets.opened(dealer)
            dealer.connect(address)
            dealer.send_multipart(kv_frames.replay_request(start), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.hang_up()
            raise EngineError(
                f"the replay of KV events at {address} cannot be asked for: {error}", "unreachable"
            ) from error

    def answers(self, most: int) -> list[Frame | None]:
        """Answers of the replay that came since, `most` at the most; None is its end."""
        found: list[Frame | None] = []
        fetched = 0
        while self._dealer is not None and len(found) < most and fetched < _MOST_BYTES:
            parts, size = self._dealer.received()
            if parts is None:
                break
            fetched += size
            try:
                found.append(kv_frames.replayed(parts))
            except EngineError:
                self.malformed += 1
                continue
            if found[-1] is None:
                self.hang_up()
        if self._dealer is not None:
            self._dealer.fit()
        return found

    def close(self) -> None:
        """Close the sockets."""
        self.hang_up()
        self._subscription.leave(self._topic)

    def hang_up(self) -> None:
        """Take no more answers."""
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None


class _Subscription:
    """One socket that is subscribed to the topics of one source, or of several where we bind."""

    def __init__(self, inlet: Inlet, at: Place) -> None:
        self.at = at
        self.queues: dict[bytes, deque[Frame]] = {}
        self._queued = Room(kv_inlet.QUEUED_BYTES)
        self._inlet = inlet
        self._socket = socket = inlet.socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connections = 0
        self._malformed = 0

    def connections(self) -> int:
        """Connections that came about so far."""
        while received(self._monitor) is not None:
            self._connections += 1
        return self._connections

    def join(self, topic: bytes) -> None:
        self.queues[topic] = deque()
        self._inlet.peers = len(self.queues) if self.at.bind else 1
        self._socket.subscribe(topic)

    def leave(self, topic: bytes) -> None:
        self._queued.used -= sum(len(frame.payload) for frame in self.queues.pop(topic))
        if self.queues:
            self._inlet.peers = len(self.queues) if self.at.bind else 1
            self._socket.unsubscribe(topic)
        else:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._inlet.close()

    def frames(self, topic: bytes, most: int) -> tuple[list[Frame], int, bool]:
        """Frames of a topic, how many messages were malformed since the last call, and whether there is more."""
        queue, fetched = self.queues[topic], 0
        has_more = len(queue) >= most
        while len(queue) < most and fetched < _MOST_BYTES:
            parts, size = self._inlet.received()
            has_more = parts is not None
            if parts is None:
                break
            fetched += size
            try:
                frame = kv_frames.live(parts)
            except EngineError:
                self._malformed += 1
                continue
            taker = queue if len(self.queues) == 1 else self._queue(frame.topic)
            # What nobody fetches is lost; its number tells whom it was for.
            if taker is not None and len(taker) < kv_inlet.QUEUED and self._queued.take(len(frame.payload)):
                taker.append(frame)
        self._inlet.fit()
        malformed, self._malformed = self._malformed, 0
        found = [queue.popleft() for _ in range(min(most, len(queue)))]
        self._queued.used -= sum(len(frame.payload) for frame in found)
        return found, malformed, has_more

    def _queue(self, topic: bytes) -> deque[Frame] | None:
        """Queue of the longest topic that this one begins with."""
        begun = [each for each in self.queues if topic.startswith(each)]
        return self.queues[max(begun, key=len)] if begun else None


class Sockets:
    """All sockets of one keeper, with libzmq's one thread for them.

    Attributes:
        waiting: memory for batches that wait for a replay, of all streams.
    """

    def __init__(self) -> None:
        self.waiting = Room()
        self._inlets = Inlets()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._bound: dict[str, _Subscription] = {}

    def subscribe(self, at: Place, topic: str) -> Stream:
        """Subscribe; connecting goes on by itself, as often as it takes.

        Raises:
            EngineError: the address cannot be bound or connected to, or another source has its topic.
        """
        if self._context is None:
            self._context = zmq.Context(io_threads=1)
            self._context.max_sockets = _MOST_SOCKETS
        name = topic.encode(errors="surrogatepass")
        subscription = self._bound.get(at.address) if at.bind else None
        if subscription is not None and subscription.queues:
            if name in subscription.queues:
                raise EngineError(
                    f"two sources of KV events publish to {at.address} under one topic: give each a topic of its own, "
                    "or let the engines publish to tcp://*:<port>",
                    "unreachable",
                )
        else:
            subscription = self._open(self._context, at)
        subscription.join(name)
        return Stream(subscription, name, self._context, self._inlets)

    def _open(self, context: "zmq.Context[zmq.Socket[bytes]]", at: Place) -> _Subscription:
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = _socket(context, zmq.SUB, at.address)
            socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS, _RECONNECT_MOST_MS
            bind = at.bind and _bind(socket, at.address)
            if not bind:
                socket.connect(at.address)
            subscription = _Subscription(self._inlets.opened(socket), at)
        except zmq.ZMQError as error:
            if socket is not None:
                socket.close(linger=0)
            raise EngineError(f"KV events at {at.address} cannot be subscribed to: {error}", "unreachable") from error
        if bind:
            self._bound[at.address] = subscription
        return subscription

    def close(self) -> None:
        """Close all sockets, those of streams too, and end libzmq's thread."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._inlets = Inlets()
        self._bound.clear()


def _bind(socket: "zmq.Socket[bytes]", address: str) -> bool:
    """Bind; False when an engine of this very host has bound the address already, so that it is to be connected to."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        host, port = split(address)
        if error.errno == errno.EADDRINUSE and is_loopback(host):
            return False
        if error.errno not in {errno.EADDRNOTAVAIL, errno.ENODEV}:
            raise
        socket.bind(f"tcp://*:{port}")
    return True


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    # libzmq cuts the connection at a message that is longer; one that is not much longer is only left out.
    socket.maxmsgsize = 2 * MAX_PAYLOAD_BYTES
    socket.ipv6 = "[" in address
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _DEAD_AFTER_MS
    return socket
