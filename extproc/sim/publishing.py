"""Events over ZMQ: a publishing socket and one that replays, for each data-parallel rank of an engine."""

import asyncio
import re
from collections import deque

import zmq

from extproc.sim.core import Endpoint
from extproc.sim.settings import KvEvents

HIGH_WATER = 100_000
"""Batches kept for a subscriber that does not read: vLLM's default `hwm`."""
END = b"\xff" * 8
"""What stands for a number at the end of a replay."""

_BIND_TRIES = 100
_BIND_PAUSE_S = 0.02
_NUMBER_BYTES = 8
_REQUEST_FRAMES = 3


class Publisher:
    """The events of one rank, from the engine's start to its end. Batches are numbered from 0."""

    def __init__(self, publishing: zmq.Socket[bytes], replaying: zmq.Socket[bytes] | None, settings: KvEvents) -> None:
        """Take over sockets that are bound or connected. `settings` says what is kept and under which topic."""
        self._publishing = publishing
        self._replaying = replaying
        self._loop: asyncio.AbstractEventLoop | None = None
        self._topic = settings.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer)
        self._next = 0
        self._held: list[tuple[bytes, bytes]] | None = None
        self._replay_topic = True
        self.losing = 0
        self.forgetting = False

    def start(self, *, replay_topic: bool) -> None:
        """Answer those who ask for old batches; `replay_topic` says whether each answer names the topic."""
        self._replay_topic = replay_topic
        if self._replaying is not None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._replaying.fileno(), self._replay)
            self._replay()

    def publish(self, payload: bytes) -> None:
        """Number, keep and send a batch; or lose it, or hold it back, as was ordered."""
        number = self._next.to_bytes(_NUMBER_BYTES, "big")
        self._next += 1
        lost = self.losing > 0
        if lost:
            self.losing -= 1
        if not lost or not self.forgetting:
            self._kept.append((number, payload))
        if lost:
            return
        if self._held is None:
            self._send(number, payload)
        else:
            self._held.append((number, payload))

    def hold(self, *, back: bool) -> None:
        """Keep batches from going out, or let them go, those held back first."""
        if back:
            self._held = self._held or []
            return
        held, self._held = self._held or [], None
        for number, payload in held:
            self._send(number, payload)

    def close(self) -> None:
        """Close the sockets; what was not read is gone."""
        if self._replaying is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._replaying.fileno())
            self._replaying.close(linger=0)
        self._publishing.close(linger=0)

    def _send(self, number: bytes, payload: bytes) -> None:
        # A publishing socket never blocks: it drops what a subscriber over the high-water mark does not take.
        self._publishing.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def _replay(self) -> None:
        """Answer requests `[id, "", number]` with every kept batch from that number on; ignore all others.

        Reads until nothing is left: ZMQ signals its descriptor once for all that came.
        """
        router = self._replaying
        while router is not None:
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != _REQUEST_FRAMES:
                continue
            client, _, start = frames
            topic, no_topic = ((self._topic,), (b"",)) if self._replay_topic else ((), ())
            # Numbers of equal length compare as bytes as they do as numbers.
            for number, payload in self._kept:
                if number >= start:
                    router.send_multipart((client, b"", *topic, number, payload), zmq.NOBLOCK)
            router.send_multipart((client, b"", *no_topic, END, b""), zmq.NOBLOCK)


class Sockets:
    """The ports of one engine's ranks; they outlive its restarts."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", settings: KvEvents, host: str, ranks: int) -> None:
        """Ports are taken on `host` when `open` is called."""
        self._context = context
        self._settings = settings
        self._host = f"[{host}]" if ":" in host else host
        self._ranks = ranks
        self._port = settings.port
        self._replay_port = settings.replay_port
        self._opened = False

    def endpoint(self, rank: int) -> Endpoint:
        """Where the events of a rank are to be had; known once `open` has returned."""
        replay_port = None if self._replay_port is None else self._replay_port + rank
        if self._settings.connect:
            return Endpoint(shifted(self._settings.connect, rank), 0, replay_port)
        port = self._port + rank
        return Endpoint(f"tcp://*:{port}", port, replay_port)

    async def open(self) -> list[Publisher]:
        """Return the publishers of all ranks.

        Raises:
            OSError: a port is taken.
        """
        settings = self._settings
        replaying: list[zmq.Socket[bytes]] = []
        if settings.connect:
            publishing = [self._socket(zmq.PUB) for _ in range(self._ranks)]
            for rank, socket in enumerate(publishing):
                socket.connect(shifted(settings.connect, rank))
        else:
            publishing, self._port = await self._bound(zmq.PUB, self._port)
        try:
            if self._replay_port is not None:
                replaying, self._replay_port = await self._bound(zmq.ROUTER, self._replay_port)
        except OSError:
            _close(publishing)
            raise
        self._opened = True
        answering = [*replaying, *[None] * (self._ranks - len(replaying))]
        return [Publisher(one, other, settings) for one, other in zip(publishing, answering, strict=True)]

    async def _bound(self, kind: int, first: int) -> tuple[list[zmq.Socket[bytes]], int]:
        """Return a socket for each rank, bound to ports that follow each other, and the first port.

        A port that an engine has just left is not free at once, since ZMQ closes it in a thread of its own.
        """
        tries = _BIND_TRIES if self._opened or not first else 1
        for attempt in range(tries):
            sockets = [self._socket(kind) for _ in range(self._ranks)]
            try:
                sockets[0].bind(f"tcp://{self._host}:{first or '*'}")
                base = int(sockets[0].getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
                for rank, socket in enumerate(sockets[1:], 1):
                    socket.bind(f"tcp://{self._host}:{base + rank}")
            except zmq.ZMQError as error:
                _close(sockets)
                if error.errno != zmq.EADDRINUSE or attempt == tries - 1:
                    at = f"{first} to {first + self._ranks - 1}" if first else "0"
                    raise OSError(f"ports {at} for events of {self._host}: {error}") from error
                await asyncio.sleep(_BIND_PAUSE_S)
            else:
                return sockets, base
        raise AssertionError("the last try raises")

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, int("[" in self._host))
        # A router drops what is over its mark, which would cut a long replay short.
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER if kind == zmq.PUB else 0)
        return socket


def shifted(address: str, rank: int) -> str:
    """Return a ZMQ address with its TCP port higher by `rank`."""
    return re.sub(r":(\d+)$", lambda port: f":{int(port[1]) + rank}", address)


def _close(sockets: list[zmq.Socket[bytes]]) -> None:
    for socket in sockets:
        socket.close(linger=0)
