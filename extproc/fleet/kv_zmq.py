"""Sockets for KV events: the subscription to what an engine publishes, and the replay of what it published before.

Who binds follows vLLM's own rule (`vllm/distributed/kv_events.py`): an engine whose address has a `*` or `::` binds it,
and we connect to it, for a wildcard at the engine's host. With any other address the engine connects, and the address
is ours to bind, unless it is the engine's own host: then it is what a bound free port turned out to be. One
subscription is bound for all engines that publish to the same address; they are told apart by their topics. An engine
that connects reaches only the host it was pointed at: where several hosts keep, let the engines bind.

Sockets are plain and never wait: whoever reads them looks at them every few milliseconds, and libzmq queues meanwhile.
"""

import errno
import ipaddress
from collections import deque
from typing import Final, NamedTuple

import zmq

from extproc.engines import kv_frames
from extproc.engines.kv_frames import MAX_PAYLOAD_BYTES, Frame
from extproc.errors import EngineError

_MOST_SOCKETS: Final = 16_384
"""libzmq's own limit of 1023 is that of 256 data-parallel ranks: each has a subscription, two ends of what watches it,
and at times a replay."""
_QUEUED: Final = 20_000
"""Messages that libzmq keeps for us: more than the 10,000 batches that engines replay by default, because a router
socket drops what finds no room, and a few seconds of events."""
_MOST_BYTES: Final = 4 * 1024 * 1024
"""Fetched at a time, and a message: 200 MB a second, and no more memory for an engine that sends long ones."""
_HEARTBEAT_MS: Final = 5_000
"""Without heartbeats a subscriber never learns that a cable was cut: it only listens."""
_DEAD_AFTER_MS: Final = 15_000
_RECONNECT_MS: Final = 100
_RECONNECT_MOST_MS: Final = 2_000
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)
_WILDCARDS: Final = frozenset({"*", "::", "0.0.0.0"})  # noqa: S104 -- compared with, not bound


class Place(NamedTuple):
    """Where a subscription is to be had.

    Attributes:
        address: as ZMQ takes it.
        bind: it is ours to bind.
    """

    address: str
    bind: bool


def place(endpoint: str, host: str) -> Place:
    """Where the events are that an engine publishes.

    Args:
        endpoint: ZMQ address as the engine has it.
        host: IP address of the engine.

    Raises:
        EngineError: the address cannot be reached from another process.
    """
    if endpoint.startswith("ipc://"):
        return Place(endpoint, False)
    at, port = _split(endpoint)
    if at in _WILDCARDS:
        return Place(_join(host, port), False)
    if "::" in at or (at == host and not _is_loopback(host)):
        return Place(endpoint, False)
    # A name, or an address that is not ours (a service's), stands for every address of this host.
    return Place(endpoint if _is_ip(at) else f"tcp://*:{port}", True)


def replay_place(endpoint: str, host: str) -> str:
    """Address of an engine's replay socket, which it always binds. See `place`."""
    if endpoint.startswith("ipc://"):
        return endpoint
    at, port = _split(endpoint)
    return _join(host if at in _WILDCARDS else at, port)


def _split(endpoint: str) -> tuple[str, str]:
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    sound = scheme == "tcp" and host and endpoint.isascii() and endpoint.isprintable() and port.isdigit()
    if not sound or not 0 < int(port[:6]) < 65_536:
        raise EngineError(
            f"KV events at {endpoint[:100]!r} cannot be reached: let the engine publish to tcp://*:<port>",
            "unreachable",
        )
    return host, port


def _join(host: str, port: str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_ip(host) and ipaddress.ip_address(host).is_loopback


class Stream:
    """The events of one source. Made by `Sockets`; nothing here waits."""

    def __init__(self, subscription: "_Subscription", topic: bytes, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._subscription = subscription
        self._topic = topic
        self._context = context
        self._dealer: zmq.Socket[bytes] | None = None
        self._connections = 0
        self.malformed = 0

    def reconnected(self) -> bool:
        """Whether a connection came about since the last call: what was published before that was not heard."""
        before, self._connections = self._connections, self._subscription.connections()
        return before != self._connections

    def frames(self, most: int) -> list[Frame]:
        """Batches that were published since, `most` at the most, oldest first."""
        found, malformed = self._subscription.frames(self._topic, most)
        self.malformed += malformed
        return found

    def ask(self, address: str, start: int) -> None:
        """Ask for a replay; answers of an earlier one do not come any more, as each has a socket of its own.

        Raises:
            EngineError: the address cannot be connected to.
        """
        self._hang_up()
        try:
            self._dealer = dealer = _socket(self._context, zmq.DEALER, address)
            dealer.connect(address)
            dealer.send_multipart(kv_frames.replay_request(start), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._hang_up()
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
            fetched += sum(map(len, parts))
            try:
                found.append(kv_frames.replayed(parts))
            except EngineError:
                self.malformed += 1
                continue
            if found[-1] is None:
                self._hang_up()
        return found

    def close(self) -> None:
        """Close the sockets."""
        self._hang_up()
        self._subscription.leave(self._topic)

    def _hang_up(self) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None


class _Subscription:
    """One socket that is subscribed to the topics of one source, or of several where we bind."""

    def __init__(self, socket: "zmq.Socket[bytes]", at: Place) -> None:
        self.at = at
        self.queues: dict[bytes, deque[Frame]] = {}
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
        del self.queues[topic]
        if self.queues:
            self._socket.unsubscribe(topic)
        else:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    def frames(self, topic: bytes, most: int) -> tuple[list[Frame], int]:
        """Frames of a topic, and how many messages were malformed since the last call."""
        queue, fetched = self.queues[topic], 0
        while len(queue) < most and fetched < _MOST_BYTES and (parts := _received(self._socket)) is not None:
            fetched += sum(map(len, parts))
            try:
                frame = kv_frames.live(parts)
            except EngineError:
                self._malformed += 1
                continue
            taker = queue if len(self.queues) == 1 else self._queue(frame.topic)
            # What nobody fetches is lost; its number tells whom it was for.
            if taker is not None and len(taker) < _QUEUED:
                taker.append(frame)
        malformed, self._malformed = self._malformed, 0
        return [queue.popleft() for _ in range(min(most, len(queue)))], malformed

    def _queue(self, topic: bytes) -> deque[Frame] | None:
        """Queue of the longest topic that this one begins with."""
        begun = [each for each in self.queues if topic.startswith(each)]
        return self.queues[max(begun, key=len)] if begun else None


class Sockets:
    """All sockets of one keeper, with libzmq's one thread for them."""

    def __init__(self) -> None:
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
        return Stream(subscription, name, self._context)

    def _open(self, context: "zmq.Context[zmq.Socket[bytes]]", at: Place) -> _Subscription:
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = _socket(context, zmq.SUB, at.address)
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
        self._bound.clear()


def _bind(socket: "zmq.Socket[bytes]", address: str) -> bool:
    """Bind; False when an engine of this very host has bound the address already, so that it is to be connected to."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        host, port = _split(address)
        if error.errno == errno.EADDRINUSE and _is_loopback(host):
            return False
        if error.errno not in {errno.EADDRNOTAVAIL, errno.ENODEV}:
            raise
        socket.bind(f"tcp://*:{port}")
    return True


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.rcvhwm = _QUEUED
    # libzmq cuts the connection at a message that is longer; one that is read no more is only left out.
    socket.maxmsgsize = 8 * MAX_PAYLOAD_BYTES
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
