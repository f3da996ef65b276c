"""Batches of KV events that are decoded in steps: the same values, and no step that takes long."""

from collections.abc import Generator
from typing import Any

import msgspec
import pytest

from extproc.engines import kv_decode, kv_wire
from extproc.engines.kv_decode import decode, decoding
from extproc.engines.kv_values import EventBatch, KvEvent, Removed, Stored
from extproc.engines.kv_wire import AT_ONCE_BYTES
from extproc.errors import EngineError

STEP = 512
"""Blocks, or events of fewer, of one step."""


def run(steps: Generator[None, None, EventBatch]) -> tuple[EventBatch, int]:
    """What is decoded, and in how many steps."""
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


def batch(*events: Any, rank: int = 0) -> bytes:
    """A payload."""
    return msgspec.msgpack.encode([1.0, events, rank])


def stored(first: int, blocks: int, size: int = 2, **changes: Any) -> dict[str, Any]:
    """Blocks in a row that begin a prompt."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, first + blocks)),
        "parent_block_hash": None,
        "token_ids": [7 * token % 30_000 for token in range(blocks * size)],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "lb",
        "extra_keys": [["lb", f"key {number}"] if number % 3 else None for number in range(blocks)],
        "cache_salt": "tenant",
        **changes,
    }


def removed(first: int, blocks: int) -> dict[str, Any]:
    """As many blocks that are gone."""
    return {"type": "BlockRemoved", "block_hashes": list(range(first, first + blocks)), "medium": "GPU"}


def joined(events: tuple[KvEvent, ...]) -> list[KvEvent]:
    """Events with those that go on from the one before in one."""
    found: list[KvEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Removed) and isinstance(last, Removed):
            found[-1] = Removed(last.hashes + event.hashes, last.tier)
        elif isinstance(event, Stored) and isinstance(last, Stored) and event.parent == last.hashes[-1]:
            extras = (
                (last.extras + (b"",) * (len(last.hashes) - len(last.extras)) + event.extras) if event.extras else ()
            )
            found[-1] = msgspec.structs.replace(
                last,
                hashes=last.hashes + event.hashes,
                tokens=last.tokens + event.tokens,
                extras=extras or last.extras,
            )
        else:
            found.append(event)
    return found


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every payload is decoded in steps, however short."""
    monkeypatch.setattr(kv_decode, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(kv_wire, "AT_ONCE_BYTES", 64)


@pytest.mark.parametrize(
    "payload",
    [
        batch(stored(1000, 4), removed(5, 1), {"type": "AllBlocksCleared"}, stored(2000, 3), rank=3),
        batch(stored(1000, 3 * STEP + 7), removed(1000, 2 * STEP)),
        batch(stored(1000, STEP + 1, token_ids=[1]), stored(2000, 2)),
        batch(stored(1000, 2 * STEP, extra_keys=None, medium="TAPE"), removed(3, 1)),
        batch(stored(1000, 2 * STEP, parent_block_hash=4, group_idx=1), stored(9, 1, group_idx=0)),
        batch(["BlockRemoved", [1, 2], "GPU"], stored(9, 1), ["Wonder", 1], {"type": "Wonder"}),
        batch(stored(1, 1, token_ids=[[1, 2], [3, 4]]), stored(9, 1)),
        batch(),
        msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]] * 2000]),
    ],
)
@pytest.mark.usefixtures("in_steps")
def test_steps_give_the_same_values(payload: bytes) -> None:
    """But that long events come in pieces, each of which goes on from the one before."""
    whole, (parted, _) = decode(payload), run(decoding(payload))
    assert joined(parted.events) == joined(whole.events)
    assert (parted.at, parted.rank, parted.skipped) == (whole.at, whole.rank, whole.skipped)
    assert all(len(event.hashes) <= STEP for event in parted.events if isinstance(event, Stored | Removed))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0, [5]]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", "x"]], 0]),
        batch(rank=-1),
        batch(rank=5000),
        batch(stored(1, 1), {"type": "BlockStored"}),
        bytes(8 * 1024 * 1024 + 1),
    ],
)
@pytest.mark.usefixtures("in_steps")
def test_steps_refuse_the_same_payloads(payload: bytes) -> None:
    """Before any event of them is given out."""
    for attempt in (lambda: decode(payload), lambda: run(decoding(payload))):
        with pytest.raises(EngineError):
            attempt()


@pytest.mark.parametrize(
    "payload",
    [
        batch(*[stored(number, 1, 16) for number in range(6_000)]),
        batch(*[removed(number, 1) for number in range(40_000)]),
        batch(stored(1, 60_000, 16, extra_keys=None)),
        batch(*[removed(number, 1 << 17) for number in range(3)]),
        msgspec.msgpack.encode([1.0, [["Wonder", 1]] * (1 << 16), 0]),
    ],
    ids=["stored", "removed", "one long", "few long", "unknown"],
)
def test_no_step_does_much(payload: bytes) -> None:
    """A payload of megabytes is decoded in as many steps as its bytes, and its blocks, make."""
    decoded, steps = run(decoding(payload))
    blocks = sum(len(event.hashes) for event in decoded.events if isinstance(event, Stored | Removed))
    longest = max((each.nbytes for each in events_of(payload)), default=0)
    assert steps >= max(len(payload) // max(AT_ONCE_BYTES, longest), blocks // (2 * STEP)) > 8


def events_of(payload: bytes) -> list[memoryview]:
    """The events of a payload, each as it is written."""
    raw = msgspec.msgpack.decode(payload, type=tuple[float, list[msgspec.Raw], int])
    return [memoryview(each) for each in raw[1]]


def test_what_is_short_takes_one_step() -> None:
    """Nearly all batches are: they cost no more than before."""
    payload = batch(*[stored(number, 1) for number in range(100)])
    assert len(payload) <= AT_ONCE_BYTES
    assert run(decoding(payload)) == (decode(payload), 1)
