"""Deltas: what replicas tell each other of one pool, and what they can say.

Blocks travel as packed little-endian 64-bit hashes, never as text.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence

import msgspec

_LATEST_START = 1e10
"""The year 2286, in seconds since the epoch."""
_MOST = 1e15
"""Largest quantity that is believed."""
_LONGEST = 512
"""Longest name or digest."""

_MOST_RANKS = 4096
_MOST_BLOCK_TOKENS = 1 << 20
_LAST_TIER = 2

_PIECE_BYTES = 8 * 512
_KEPT_BYTES = 16
MOST_KEPT = 512
"""Conversations that one `Kept` tells of at most."""

_DELTA_BYTES = 80
"""Names, numbers and framing of a delta beside its blocks."""
_ANSWERED_BYTES = 128
"""The same of an `Answered` beside its turn; it has seven numbers."""


class Held(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="held"):
    """An endpoint will hold these blocks after the prefill that was just decided.

    Attributes:
        endpoint: endpoint id.
        blocks: packed hashes of the prompt's blocks.
        charge_id: charge of the decision; `Answered` tells by it that the prefill is over. Empty when it was over then.
        started_at: start of the engine that was picked, as the teller knew it; 0 when it knew none. Who joins reads of
            engines that have restarted since.
        shared_block: last block of the longest beginning that any endpoint held before; 0 for none.
        exact: packed hashes, of `exact_blocks`, of the blocks that its exact profile lacked; empty when it has none.
        exact_from: blocks of the prompt before those.
    """

    endpoint: str
    blocks: bytes
    charge_id: str = ""
    started_at: float = 0.0
    shared_block: int = 0
    exact: bytes = b""
    exact_from: int = 0


class Dropped(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="dropped"):
    """An endpoint does not hold these blocks after all: the request failed there or moved elsewhere."""

    endpoint: str
    blocks: bytes


class Answered(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="answered"):
    """A finished request, as the access log told it.

    Attributes:
        charge_id: charge of its decision; the replica that made it may correct its profile by this.
        endpoint: endpoint that answered; empty when none did.
        work_tokens: uncached tokens plus the backlog in front, which the TTFT stands for; -1 when unknown.
        ttft_s: time to the first body byte; -1 when unknown.
        prompt_bytes: canonical prompt length; -1 when unknown.
        prompt_tokens: as the engine reported; -1 when unknown.
        backlog_tokens: the part of `work_tokens` that stood in front, as the ledger had it.
        cached_tokens: prompt tokens that the endpoint reused, as it reported; -1 when unknown.
        output_tokens: tokens of one answer, as reported; -1 when unknown.
        turn: digest of the conversation that was answered, when the teller knows it; the owner of the charge does.
    """

    charge_id: str
    endpoint: str
    work_tokens: float
    ttft_s: float
    prompt_bytes: float
    prompt_tokens: float
    backlog_tokens: float = 0.0
    cached_tokens: float = -1.0
    output_tokens: float = -1.0
    turn: bytes = b""


class Measured(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="measured"):
    """What an answered prompt teaches of those that go through these blocks.

    Attributes:
        blocks: packed hashes of the prompt's marks.
        bytes_per_token: prompt bytes that a token stood for; -1 when unknown.
        output_tokens: tokens of its answer; -1 when unknown.
    """

    blocks: bytes
    bytes_per_token: float
    output_tokens: float = -1.0


class Sized(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="sized"):
    """An endpoint's reports of cached tokens changed what its cache is believed to hold.

    Attributes:
        endpoint: endpoint id.
        share: believed share of the claimed capacity, 0 to 1.
        left: blocks, those used last, that the profile kept; -1 when none were taken out. Replicas use blocks in the
            same order, so the number alone makes their profiles agree.
        started_at: as in `Held`.
    """

    endpoint: str
    share: float
    left: int = -1
    started_at: float = 0.0


class Turned(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="turned"):
    """A turn of a conversation was answered: who continues it finds its tokens cached.

    Attributes:
        turn: digest of the conversation up to this turn.
        endpoint: endpoint that answered.
        prompt_tokens: as it reported.
        output_tokens: as it reported.
        started_at: as in `Held`.
    """

    turn: bytes
    endpoint: str
    prompt_tokens: float
    output_tokens: float
    started_at: float = 0.0


class Exact(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="exact"):
    """An endpoint's precise profile begins anew, empty, or ends: KV events were lost, or cannot be had any more.

    Attributes:
        endpoint: endpoint id.
        rank: data-parallel rank.
        block_tokens: tokens in one block; 0 when the profile ends, and its estimated one counts from now on.
        started_at: as in `Held`.
    """

    endpoint: str
    rank: int
    block_tokens: int
    started_at: float = 0.0


class Cached(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="cached"):
    """An engine told that it has stored these blocks.

    Attributes:
        endpoint: endpoint id.
        rank: data-parallel rank.
        tier: where they are: 0 GPU, 1 host memory, 2 disk or further away. They may be in other tiers too.
        blocks: packed hashes, of `exact_blocks`.
        started_at: as in `Held`.
    """

    endpoint: str
    rank: int
    tier: int
    blocks: bytes
    started_at: float = 0.0


class Evicted(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="evicted"):
    """An engine told that these blocks are gone from a tier.

    Attributes:
        endpoint: endpoint id.
        rank: data-parallel rank.
        tier: as in `Cached`; -1 for all.
        blocks: packed hashes, of `exact_blocks`.
        started_at: as in `Held`.
    """

    endpoint: str
    rank: int
    tier: int
    blocks: bytes
    started_at: float = 0.0


class Kept(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="kept"):
    """Conversations run on in the pool although the weights of their model's versions would put them elsewhere now.

    Attributes:
        conversations: their digests, 16 bytes each, `MOST_KEPT` at most.
    """

    conversations: bytes


Delta = Held | Dropped | Answered | Measured | Sized | Turned | Exact | Cached | Evicted | Kept


def subject(delta: Delta) -> str:
    """The endpoint that a delta is about; empty for one that is about the pool as a whole."""
    return "" if isinstance(delta, Measured | Kept) else delta.endpoint


def in_pieces(delta: Delta) -> Iterator[Delta]:
    """What comes to the same, in deltas that take some 0.3 ms each: an engine may tell of many blocks at once."""
    if not isinstance(delta, Cached | Evicted) or len(delta.blocks) <= _PIECE_BYTES:
        yield delta
        return
    for at in range(0, len(delta.blocks), _PIECE_BYTES):
        yield msgspec.structs.replace(delta, blocks=delta.blocks[at : at + _PIECE_BYTES])


def is_sound(delta: Delta) -> bool:
    """Whether a delta says what can be: damage must not change what a worker believes."""
    match delta:
        case Measured():
            return _is_known(delta.bytes_per_token, delta.output_tokens)
        case Answered():
            named = _is_name(delta.endpoint, delta.charge_id) and len(delta.turn) <= _LONGEST
            sizes = _is_known(delta.prompt_bytes, delta.prompt_tokens, delta.cached_tokens, delta.output_tokens)
            return named and sizes and _is_known(delta.work_tokens, delta.ttft_s, delta.backlog_tokens)
        case Dropped():
            return _is_name(delta.endpoint)
        case Kept():
            return len(delta.conversations) % _KEPT_BYTES == 0 and len(delta.conversations) <= _KEPT_BYTES * MOST_KEPT
    return _is_name(delta.endpoint) and is_start(delta.started_at) and _is_sound_of_a_life(delta)


def _is_sound_of_a_life(delta: Held | Sized | Turned | Exact | Cached | Evicted) -> bool:
    """The same of what is told of one life of an engine, beside its endpoint and start."""
    match delta:
        case Held():
            return _is_name(delta.charge_id) and 0 <= delta.shared_block < 1 << 64 and 0 <= delta.exact_from < 1 << 32
        case Sized():
            return 0.0 <= delta.share <= 1.0 and -1 <= delta.left <= _MOST
        case Turned():
            return len(delta.turn) <= _LONGEST and _is_known(delta.prompt_tokens, delta.output_tokens)
        case Exact():
            return 0 <= delta.rank < _MOST_RANKS and 0 <= delta.block_tokens <= _MOST_BLOCK_TOKENS
        case Cached():
            return 0 <= delta.rank < _MOST_RANKS and 0 <= delta.tier <= _LAST_TIER
        case Evicted():
            return 0 <= delta.rank < _MOST_RANKS and -1 <= delta.tier <= _LAST_TIER


def is_start(started_at: float) -> bool:
    """Whether an engine can have started then; one of the far future would make all real ones look old."""
    return 0.0 <= started_at < _LATEST_START


def _is_name(*names: str) -> bool:
    return all(len(name) <= _LONGEST for name in names)


def _is_known(*values: float) -> bool:
    """Whether these are quantities, or -1 for an unknown one; no comparison holds for a NaN."""
    return all(value == -1.0 or 0.0 <= value <= _MOST for value in values)


def pack(blocks: Sequence[int]) -> bytes:
    """Block hashes (unsigned 64-bit) as little-endian bytes, 8 each."""
    packed = array("Q", blocks)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes) -> Sequence[int]:
    """Inverse of `pack`; bytes that do not fill a hash are left out."""
    blocks = array("Q")
    blocks.frombytes(data[: len(data) // 8 * 8])
    if sys.byteorder == "big":
        blocks.byteswap()
    return blocks


def size(delta: Delta) -> int:
    """About how many bytes a delta adds to a batch."""
    match delta:
        case Held():
            return _DELTA_BYTES + len(delta.blocks) + len(delta.exact)
        case Dropped() | Measured() | Cached() | Evicted():
            return _DELTA_BYTES + len(delta.blocks)
        case Answered():
            return _ANSWERED_BYTES + len(delta.turn)
        case Turned():
            return _DELTA_BYTES + len(delta.turn)
        case Sized() | Exact():
            return _DELTA_BYTES
        case Kept():
            return _DELTA_BYTES + len(delta.conversations)
