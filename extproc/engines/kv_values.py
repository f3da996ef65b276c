"""What engines tell of their KV caches, in one form for all kinds and versions. Their hashes are opaque ids here."""

from enum import IntEnum
from typing import Literal

import msgspec


class Tier(IntEnum):
    """Where a block is kept."""

    GPU = 0
    CPU = 1
    DISK = 2


class EventSource(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Where the events of one data-parallel rank are to be had.

    Attributes:
        rank: the rank.
        way: `zmq` is published and can be subscribed to by many; `drain` is taken out by each HTTP call, so that only
            one may call.
        endpoint: ZMQ address as the engine has it (`tcp://*:5557`); path of the call for `drain`.
        replay: ZMQ address of the replay socket as the engine has it; empty for none.
        topic: what the published topics begin with.
    """

    rank: int = 0
    way: Literal["zmq", "drain"] = "zmq"
    endpoint: str = ""
    replay: str = ""
    topic: str = ""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that became cached: a chain, in order.

    Attributes:
        hashes: the engine's ids of the blocks, unsigned 64-bit.
        parent: its id of the block before them; None when they begin a prompt.
        tokens: token ids of all these blocks in a row.
        block_tokens: tokens in each block.
        tier: where they are kept.
        adapter: LoRA adapter; empty for the base model, and for engines that do not tell.
        extras: what beside tokens entered each block, as `state.exact_blocks.chain` takes it; shorter than `hashes`
            when the last ones have nothing.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    block_tokens: int
    tier: Tier = Tier.GPU
    adapter: str = ""
    extras: tuple[bytes, ...] = ()


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks that are gone from a tier.

    Attributes:
        hashes: the engine's ids.
        tier: from where; None when the engine does not tell, which means from all.
    """

    hashes: tuple[int, ...]
    tier: Tier | None = None


class Moved(msgspec.Struct, frozen=True, gc=False):
    """A block went from one tier to another."""

    hash: int
    tier: Tier


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The whole cache of this rank was emptied."""


KvEvent = Stored | Removed | Moved | Cleared


class EventBatch(msgspec.Struct, frozen=True, gc=False):
    """Events of one rank, in order.

    Attributes:
        at: when, in seconds since the epoch by the engine's clock; 0 when not told.
        rank: data-parallel rank; 0 when not told.
        events: the events.
        skipped: events of kinds nobody here knows, or of attention groups that are left out.
    """

    at: float
    rank: int
    events: tuple[KvEvent, ...]
    skipped: int = 0
