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
from extproc.fleet.kv_address import Place, is_loopback, split
from extproc.fleet.kv_held import Room

_MOST_SOCKETS: Final = 16_384
"""libzmq's own limit of 1023 is that of 256 data-parallel ranks: each has a subscription, two ends of what watches it,
and at times a replay."""
_QUEUED: Final = 32
"""Messages that libzmq keeps of one engine: 256 MiB of the longest. It counts messages, not bytes. One that is full is
not read: the engine keeps what comes then, 100,000 batches by default. The number stays what it was when a socket was
opened: libzmq may stop reading for good when it is changed."""
_REPLAYED: Final = 20_000
"""The same of a replay: more than the 10,000 batches that engines replay by default, because their router socket drops
what finds no room. Fewer where that would take more than `_REPLAYED_BYTES`."""
_REPLAYED_BYTES: Final = 256 * 1024 * 1024
_USUAL_BYTES: Final = 4 * 1024
"""An answer of a replay of which nothing is known yet: a step of some 20 blocks."""
_WAITING_BYTES: Final = 256 * 1024 * 1024
"""Batches that came for other sources of one bound address, and wait to be fetched."""
_MOST_BYTES: Final = 4 * 1024 * 1024
"""Fetched at a time, and a message: 200 MB a second, and no more memory for an engine that sends long ones."""
_HEARTBEAT_MS: Final = 5_000
"""Without heartbeats a subscriber never learns that a cable was cut: it only listens."""
_DEAD_AFTER_MS: Final = 15_000
_RECONNECT_MS: Final = 100
_RECONNECT_MOST_MS: Final = 2_000
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)


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
        replays: "_Replays",
    ) -> None:
        self._subscription = subscription
        self._topic = topic
        self._context = context
        self._replays = replays
        self._asked = ("", 0)
        self._usual = float(_USUAL_BYTES)
        self._answered = self._answered_bytes = 0
        self._dealer: zmq.Socket[bytes] | None = None
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
        self._asked, self._answered, self._answered_bytes = (address, start), 0, 0
        try:
            most = self._replays.most(self._usual)
            self._dealer = dealer = _socket(self._context, zmq.DEALER, address, most)
            self._replays.count += 1
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
            parts = _received(self._dealer)
            if parts is None:
                break
            size = sum(map(len, parts))
            fetched += size
            self._answered, self._answered_bytes = self._answered + 1, self._answered_bytes + size
            try:
                found.append(kv_frames.replayed(parts))
            except EngineError:
                self.malformed += 1
                continue
            if found[-1] is None:
                self.hang_up()
        self._see_how_long()
        return found

    def _see_how_long(self) -> None:
        """Ask again, by a socket that keeps fewer, when answers are longer than was thought; some come twice."""
        if self._dealer is None or self._answered_bytes < _MOST_BYTES:
            return
        mean = self._answered_bytes / self._answered
        if mean > 4 * self._usual:
            self._usual = mean
            try:
                self.ask(*self._asked)
            except EngineError:
                self.malformed += 1

    def close(self) -> None:
        """Close the sockets."""
        self.hang_up()
        self._subscription.leave(self._topic)

    def hang_up(self) -> None:
        """Take no more answers."""
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
            self._replays.count -= 1


class _Subscription:
    """One socket that is subscribed to the topics of one source, or of several where we bind."""

    def __init__(self, socket: "zmq.Socket[bytes]", at: Place) -> None:
        self.at = at
        self.queues: dict[bytes, deque[Frame]] = {}
        self._waiting = Room(_WAITING_BYTES)
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connections = 0
        self._malformed = 0

    def connections(self) -> int:
        """Connections that came about so far."""
        while _received(self._monitor) is not None:
            self._connections += 1
        return self._connections

    def join(self, topic: bytes) -> None:
        self.queues[topic] = deque()
        self._socket.subscribe(topic)

    def leave(self, topic: bytes) -> None:
        self._waiting.used -= sum(len(frame.payload) for frame in self.queues.pop(topic))
        if self.queues:
            self._socket.unsubscribe(topic)
        else:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    def frames(self, topic: bytes, most: int) -> tuple[list[Frame], int, bool]:
        """Frames of a topic, how many messages were malformed since the last call, and whether there is more."""
        queue, fetched = self.queues[topic], 0
        has_more = len(queue) >= most
        while len(queue) < most and fetched < _MOST_BYTES:
            parts = _received(self._socket)
            has_more = parts is not None
            if parts is None:
                break
            fetched += sum(map(len, parts))
            try:
                frame = kv_frames.live(parts)
            except EngineError:
                self._malformed += 1
                continue
            taker = queue if len(self.queues) == 1 else self._queue(frame.topic)
            # What nobody fetches is lost; its number tells whom it was for.
            if taker is not None and len(taker) < _REPLAYED and self._waiting.take(len(frame.payload)):
                taker.append(frame)
        malformed, self._malformed = self._malformed, 0
        found = [queue.popleft() for _ in range(min(most, len(queue)))]
        self._waiting.used -= sum(len(frame.payload) for frame in found)
        return found, malformed, has_more

    def _queue(self, topic: bytes) -> deque[Frame] | None:
        """Queue of the longest topic that this one begins with."""
        begun = [each for each in self.queues if topic.startswith(each)]
        return self.queues[max(begun, key=len)] if begun else None


class _Replays:
    """Replays that are out, which share the memory for them."""

    def __init__(self) -> None:
        self.count = 0

    def most(self, usual: float) -> int:
        """How many answers of so many bytes libzmq may keep of one more."""
        return max(_QUEUED, min(_REPLAYED, int(_REPLAYED_BYTES / (self.count + 1) / usual)))


class Sockets:
    """All sockets of one keeper, with libzmq's one thread for them.

    Attributes:
        waiting: memory for batches that wait for a replay, of all streams.
    """

    def __init__(self) -> None:
        self.waiting = Room()
        self._replays = _Replays()
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
        return Stream(subscription, name, self._context, self._replays)

    def _open(self, context: "zmq.Context[zmq.Socket[bytes]]", at: Place) -> _Subscription:
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = _socket(context, zmq.SUB, at.address, _QUEUED)
            socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS, _RECONNECT_MOST_MS
            bind = at.bind and _bind(socket, at.address)
            if not bind:
                socket.connect(at.address)
            subscription = _Subscription(socket, at)
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
        self._replays = _Replays()
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


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str, queued: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.rcvhwm = queued
    # libzmq cuts the connection at a message that is longer; one that is not much longer is only left out.
    socket.maxmsgsize = 2 * MAX_PAYLOAD_BYTES
    socket.ipv6 = "[" in address
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _DEAD_AFTER_MS
    return socket


def _received(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    """The next message; None when none is there."""
    # Most sockets have nothing most of the time, and asking costs less than an exception. Enums would cost 2 us more.
    if not int(socket.get(_EVENTS)) & _READABLE:
        return None
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
