"""Engines that publish KV events over ZMQ: `python -m tests.bench.kv_publishers --engines 100 --seconds 10`.

It prints the wall time of its first batch and its addresses as one JSON list; at the end, as another, when the first
`WATCHED` engines published each of their batches. Every engine publishes `STEPS` batches a second as vLLM 0.33 does:
one event with the blocks stored, one for each block removed.
"""

import argparse
import json
import struct
import sys
import time
from collections import deque

import msgspec
import zmq

from tests.ports import free_ports

STEPS = 20
"""Batches a second of one engine: a scheduler step takes 50 ms."""
STORED = 13
"""Blocks stored in a batch."""
REMOVED = 12
"""Blocks removed in a batch, once the cache is full; the first ones are only stored."""
BLOCK = 16
CACHE = 1300
WATCHED = 5
_HEAD_START_S = 3.0


def tokens(engine: int, step: int) -> list[int]:
    """Token ids of the blocks that an engine stores in a step."""
    first = (engine * 1_000_003 + step * 997) % (1 << 24)
    return [(first + 31 * place) % 150_000 for place in range(STORED * BLOCK)]


class _Engine:
    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", number: int, port: int) -> None:
        self._socket = context.socket(zmq.PUB)
        self._socket.sndhwm = 100_000
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._number = number
        self._held: deque[int] = deque()

    def step(self, step: int) -> float:
        """Publish one batch; returns when, by the wall clock."""
        first = (self._number << 40) + step * STORED
        ids = [(first + place) * 0x9E3779B97F4A7C15 % (1 << 64) for place in range(STORED)]
        events: list[dict[str, object]] = [
            {
                "type": "BlockStored",
                "block_hashes": ids,
                "parent_block_hash": None,
                "token_ids": tokens(self._number, step),
                "block_size": BLOCK,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * STORED,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        ]
        self._held.extend(ids)
        while len(self._held) > CACHE and len(events) <= REMOVED:
            events.append(
                {"type": "BlockRemoved", "block_hashes": [self._held.popleft()], "medium": "GPU", "group_idx": 0}
            )
        at = time.time()
        payload = msgspec.msgpack.encode([at, events, 0])
        self._socket.send_multipart([b"", struct.pack(">q", step), payload])
        return at


def main() -> None:
    """Publish for as long as asked, then wait to be ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    context = zmq.Context()
    ports = free_ports(arguments.engines)
    engines = [_Engine(context, number, port) for number, port in enumerate(ports)]
    begin = time.time() + _HEAD_START_S
    sys.stdout.write(json.dumps([str(begin), *map(str, ports)]) + "\n")
    sys.stdout.flush()
    published: list[float] = []
    for slot in range(int(arguments.seconds * STEPS) * len(engines)):
        # Steps of the engines are spread evenly, as nothing keeps them in time with one another.
        due = begin + slot / (STEPS * len(engines))
        if (pause := due - time.time()) > 0:
            time.sleep(pause)
        at = engines[slot % len(engines)].step(slot // len(engines))
        if slot % len(engines) < WATCHED:
            published.append(at)
    sys.stdout.write(json.dumps([str(at) for at in published]) + "\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main()
