"""Engines that tell of their KV caches, over ZMQ as vLLM or by calls as TensorRT-LLM, and a worker that hears of it."""

import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import zmq
from aiohttp import web

from extproc.state.deltas import Cached, Delta, Evicted, Exact, is_sound, unpack
from extproc.state.endpoint import Source
from extproc.state.exact_blocks import TokenPrompt, chain_of
from extproc.state.feed import decode
from extproc.state.store import Store
from tests.ports import free_ports

BLOCK = 4
_SEQ = struct.Struct(">q")


def tokens_of(prompt: int, blocks: int) -> list[int]:
    """Token ids of a prompt of so many blocks; two prompts share none."""
    return list(range(prompt * 100_000, prompt * 100_000 + blocks * BLOCK))


def ours(prompt: int, blocks: int) -> set[int]:
    """Our hashes of the prompt's blocks, as a request for it has."""
    return set(chain_of(TokenPrompt(tokens_of(prompt, blocks)), BLOCK))


class Publisher:
    """One rank of an engine: a PUB socket, and a ROUTER for replays, served by a thread as the engine's is.

    Attributes:
        port: of the PUB socket.
        replay_port: of the ROUTER.
        life: counts its restarts.
    """

    def __init__(
        self, *, replay: bool = True, buffer: int = 10_000, hwm: int = 100_000, connect: str = "", topic: str = ""
    ) -> None:
        """Begin its first life, on free ports.

        Args:
            replay: whether it has a replay socket.
            buffer: batches that can be replayed.
            hwm: messages that are kept for a subscriber that does not fetch them.
            connect: address of a subscriber that it connects to, instead of binding a port.
            topic: what it publishes under.
        """
        self.port, self.replay_port = free_ports(2)
        self.life = 0
        self._replay = replay
        self._connect = connect
        self._topic = topic.encode()
        self._hwm = hwm
        self._kept = deque[tuple[int, bytes]](maxlen=buffer)
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Begin a life: numbers count from 0, and nothing is cached."""
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.sndhwm = self._hwm
        if self._connect:
            self._pub.connect(self._connect)
        else:
            self._bind(self._pub, self.port)
        self._ended = threading.Event()
        self._seq = 0
        self._kept.clear()
        self._thread: threading.Thread | None = None
        if self._replay:
            self._thread = threading.Thread(target=self._serve, name="replays")
            self._thread.start()

    def stop(self) -> None:
        """End this life."""
        self._ended.set()
        if self._thread:
            self._thread.join()
        self._context.destroy(linger=0)

    def restart(self) -> None:
        """The process ends and starts again."""
        self.stop()
        self.life += 1
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _bind(self, socket: "zmq.Socket[bytes]", port: int) -> None:
        # The port of the life before may take a moment to be free.
        until = time.monotonic() + 30
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
            except zmq.ZMQError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
            else:
                return

    def _serve(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        self._bind(router, self.replay_port)
        while not self._ended.is_set():
            if router.poll(20):
                client, _, start = router.recv_multipart()
                with self._lock:
                    kept = [each for each in self._kept if each[0] >= _SEQ.unpack(start)[0]]
                for seq, payload in kept:
                    router.send_multipart([client, b"", b"", _SEQ.pack(seq), payload])
                router.send_multipart([client, b"", b"", _SEQ.pack(-1), b""])
        router.close(linger=0)

    def source(self, port: int = 0) -> Source:
        """Where its events are, as it tells itself; `port` is another way to its PUB socket."""
        replay = f"tcp://*:{self.replay_port}" if self._replay else ""
        return Source(
            endpoint=self._connect or f"tcp://*:{port or self.port}", replay=replay, topic=self._topic.decode()
        )

    def publish(self, *events: dict[str, Any]) -> None:
        """Publish one batch."""
        self.send(msgspec.msgpack.encode([time.time(), events, 0]))

    def send(self, payload: bytes) -> None:
        """Publish these bytes as one batch."""
        with self._lock:
            seq, self._seq = self._seq, self._seq + 1
            self._kept.append((seq, payload))
        self._pub.send_multipart([self._topic, _SEQ.pack(seq), payload])

    def store(self, prompt: int, blocks: int = 2, padding: int = 0) -> None:
        """Tell that a prompt's blocks were stored, in so many bytes more than it takes; ids are other in each life."""
        self.publish(
            {
                "type": "BlockStored",
                "block_hashes": self.ids(prompt, blocks),
                "parent_block_hash": None,
                "token_ids": tokens_of(prompt, blocks),
                "block_size": BLOCK,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "session_id": "x" * padding,
            }
        )

    def remove(self, prompt: int, blocks: int = 2) -> None:
        """Tell that they were removed."""
        self.publish({"type": "BlockRemoved", "block_hashes": self.ids(prompt, blocks), "medium": "GPU"})

    def ids(self, prompt: int, blocks: int) -> list[int]:
        """The engine's ids of a prompt's blocks."""
        return [(self.life << 48) + (prompt << 16) + number for number in range(blocks)]


class Drainable:
    """An engine whose events are taken out by each call."""

    def __init__(self) -> None:
        self.calls = 0
        self.number = 0
        self.status = 200
        self.waiting: list[dict[str, object]] = []
        self.address = ""
        self._runner: web.AppRunner | None = None
        self.tell({"type": "created", "num_blocks_per_cache_level": [100, 0]})

    async def start(self) -> None:
        """Serve on a free port."""
        app = web.Application()
        app.router.add_post("/kv_cache_events", self._drain)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = "{}:{}".format(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        """Close everything."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _drain(self, _: web.Request) -> web.Response:
        self.calls += 1
        events, self.waiting = self.waiting, []
        return web.json_response(events, status=self.status)

    def tell(self, data: dict[str, object]) -> None:
        """One more event waits."""
        self.waiting.append({"event_id": self.number, "data": data, "window_size": 4096})
        self.number += 1

    def store(self, prompt: int, blocks: int = 2) -> None:
        """A prompt's blocks were stored."""
        tokens = tokens_of(prompt, blocks)
        told = [
            {
                "type": "stored_block",
                "block_hash": prompt * 1000 + number,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in tokens[number * BLOCK : (number + 1) * BLOCK]
                ],
                "cache_level": 0,
                "priority": 35,
            }
            for number in range(blocks)
        ]
        self.tell({"type": "stored", "parent_hash": None, "blocks": told})

    def remove(self, prompt: int, blocks: int = 2) -> None:
        """They were removed."""
        self.tell({"type": "removed", "block_hashes": [prompt * 1000 + number for number in range(blocks)]})


class Worker:
    """Follows a pool's feed, and knows one rank of one endpoint.

    Attributes:
        block_tokens: of its exact profile; 0 when there is none.
        started_at: start of the engine that it is of.
        tiers: our hashes by tier.
        told: every delta that came, in order.
    """

    def __init__(self, endpoint: str, rank: int = 0) -> None:
        self.block_tokens = 0
        self.started_at = 0.0
        self.tiers: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
        self.told: list[Delta] = []
        self._at = endpoint, rank
        self._after = "0"
        self._numbers: dict[str, int] = {}
        self._owner = ""

    @property
    def blocks(self) -> set[int]:
        """What the GPU has."""
        return self.tiers[0]

    @property
    def begun(self) -> int:
        """Profiles that began."""
        return sum(1 for each in self.told if isinstance(each, Exact) and each.block_tokens)

    def apply(self, deltas: Sequence[Delta]) -> None:
        """Take these in."""
        for delta in deltas:
            assert is_sound(delta)
            if not isinstance(delta, Exact | Cached | Evicted) or (delta.endpoint, delta.rank) != self._at:
                continue
            self.told.append(delta)
            if isinstance(delta, Exact):
                self.block_tokens, self.started_at = delta.block_tokens, delta.started_at
                self.tiers = {0: set(), 1: set(), 2: set()}
                continue
            assert self.block_tokens, "blocks of a profile that never began"
            assert delta.started_at == self.started_at
            if isinstance(delta, Cached):
                self.tiers[delta.tier].update(unpack(delta.blocks))
            else:
                self.tiers[delta.tier].difference_update(unpack(delta.blocks))

    async def follow(self, store: Store, pool: str) -> None:
        """Read what is new in the feed: entries are numbered without a gap, and one that comes twice counts once."""
        while entries := await store.read(pool, self._after, 0):
            for entry in entries:
                self._after = entry.id
                batch = decode(entry.payload)
                last = self._numbers.get(batch.origin, 0)
                if batch.number > last:
                    assert batch.number == last + 1
                    self._numbers[batch.origin] = batch.number
                    self.apply(batch.deltas)
