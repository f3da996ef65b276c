"""Snapshots of what is known, for who joins: one of each endpoint and one of the pool, in parts that a store takes.

The first part is a cover: version, kind, checksum, and how long the sections are that the other parts make together.
Blocks are hashes, which do not compress; everything else is compressed. Plain functions of some 10 ms for the largest
profile, most of them outside the interpreter's lock: run them in a thread.
"""

import zlib
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from extproc.errors import StoreError
from extproc.state import exact_image
from extproc.state.conversations import DIGEST_BYTES
from extproc.state.exact_image import ExactImage, ExactRank
from extproc.state.feed import MOST_BYTES, DamagedError, OtherVersionError, is_start, unzipped
from extproc.state.image import MOST_BLOCKS, ProfileImage, is_sound
from extproc.state.learnt import EndpointLearnt, PoolLearnt

VERSION = 2
PART_BYTES = 64 * 1024
POOL = ""
"""Name of the snapshot of a pool; those of endpoints have the endpoint's id."""

_WORD = 8
_MOST_EXACT = 8 * MOST_BLOCKS
"""Blocks of the exact profiles of an endpoint's ranks together; with more, its snapshot goes without."""
_OLDEST_S = 1e9
_MOST_CONTENT = _WORD * (2 * MOST_BLOCKS + _MOST_EXACT) + 4 * MOST_BYTES


class EndpointSnapshot(msgspec.Struct, frozen=True):
    """One endpoint: its profile, and what else is learnt of it; readings of use counters count as those of the image.

    Attributes:
        learnt: beside the profile.
        image: the profile.
        pieces: stamps of one use.
        exact: its exact profile; None when it has none.
    """

    learnt: EndpointLearnt
    image: ProfileImage
    pieces: int
    exact: ExactImage | None = None


class _Cover(msgspec.Struct, frozen=True, array_like=True):
    """What the parts are.

    Attributes:
        version: format.
        kind: "endpoint" or "pool".
        checksum: XXH3-64 of the content and of what else the cover says, see `_checksum`.
        sections: lengths in the content.
        plain: lengths of the compressed sections before they were.
        pieces: see `EndpointSnapshot`.
    """

    version: int
    kind: str
    checksum: int
    sections: list[int]
    plain: list[int]
    pieces: int


class _Head(msgspec.Struct, frozen=True, array_like=True):
    version: int


class _ExactHead(msgspec.Struct, frozen=True, array_like=True):
    owner: str
    number: int
    ranks: list[tuple[int, int, list[int]]]


class _PoolHead(msgspec.Struct, frozen=True, array_like=True):
    tokens: tuple[float, float]
    reuse: float
    output: tuple[float, int]
    ratios: int
    outputs: int
    numbers: dict[str, int]
    kept: list[tuple[bytes, float]] = []


_pack = msgspec.msgpack.Encoder().encode
_read_head = msgspec.msgpack.Decoder(_Head).decode
_read_cover = msgspec.msgpack.Decoder(_Cover).decode
_read_endpoint = msgspec.msgpack.Decoder(EndpointLearnt).decode
_read_exact = msgspec.msgpack.Decoder(_ExactHead | None).decode
_read_pool = msgspec.msgpack.Decoder(_PoolHead).decode


def of_endpoint(snapshot: EndpointSnapshot) -> Sequence[bytes]:
    """Parts of a snapshot of an endpoint."""
    image = snapshot.image
    gaps = np.diff(image.stamps, prepend=np.uint64(0))
    runs = _bytes(gaps, "<u8") + _bytes(image.counts, "<u4")
    clock = image.clock.to_bytes(_WORD, "little")
    exact = snapshot.exact
    if exact and sum(len(rank.blocks) for rank in exact.ranks) > _MOST_EXACT:
        exact = None
    ranks = exact.ranks if exact else []
    told = [(rank.rank, rank.block_tokens, rank.counts) for rank in ranks]
    head = _ExactHead(exact.owner, exact.number, told) if exact else None
    packed = [_pack(snapshot.learnt), clock + runs, _pack(head)]
    blocks = b"".join(_bytes(rank.blocks, "<u8") for rank in ranks)
    plain = [_bytes(image.heads, "<u8"), _bytes(image.blocks, "<u8"), blocks]
    return _parts("endpoint", packed, plain, snapshot.pieces)


def of_pool(learnt: PoolLearnt) -> Sequence[bytes]:
    """Parts of a snapshot of a pool."""
    ratios, outputs = learnt.ratios, learnt.outputs
    head = _PoolHead(learnt.tokens, learnt.reuse, learnt.output, len(ratios), len(outputs), learnt.numbers, learnt.kept)
    means = np.fromiter((mean for mean, _ in outputs.values()), np.float64, len(outputs))
    answers = np.fromiter((min(count, 1 << 31) for _, count in outputs.values()), np.uint64, len(outputs))
    values = [np.fromiter(ratios.values(), np.float64, len(ratios)), means]
    numbers = b"".join(_bytes(each, "<f4") for each in values) + _bytes(answers, "<u4")
    blocks = [_bytes(np.fromiter(each, np.uint64, len(each)), "<u8") for each in (ratios, outputs)]
    return _parts("pool", [_pack(head), numbers], blocks, 0)


def read(parts: Sequence[bytes]) -> EndpointSnapshot | PoolLearnt:
    """Undo `of_endpoint` and `of_pool`.

    Raises:
        OtherVersionError: a worker of another version wrote it.
        DamagedError: it is no snapshot, or says what cannot be.
    """
    try:
        return _read(parts)
    except StoreError:
        raise
    except (msgspec.MsgspecError, zlib.error, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise DamagedError(f"a snapshot cannot be read: {error}") from error


def _read(parts: Sequence[bytes]) -> EndpointSnapshot | PoolLearnt:
    version = _read_head(parts[0]).version
    if version != VERSION:
        raise OtherVersionError(f"a snapshot is of version {version}, this worker reads version {VERSION}")
    cover = _read_cover(parts[0])
    content = b"".join(parts[1:])
    if len(content) > _MOST_CONTENT or _checksum(cover, content) != cover.checksum:
        raise ValueError("it is another than it was")
    sections = _cut(content, cover.sections)
    half = len(sections) // 2
    packed = [unzipped(each, size) for each, size in zip(sections[:half], cover.plain, strict=True)]
    if cover.kind == "pool":
        return _pool(packed, sections[half:])
    return _endpoint(packed, sections[half:], cover.pieces)


def _endpoint(packed: Sequence[bytes], plain: Sequence[bytes], pieces: int) -> EndpointSnapshot:
    head, runs, exact = packed
    heads, blocks, exact_blocks = plain
    learnt = _read_endpoint(head)
    clock, count = int.from_bytes(runs[:_WORD], "little"), (len(runs) - _WORD) // (_WORD + 4)
    stamps = _array(runs[_WORD : _WORD + count * _WORD], "<u8").cumsum(dtype=np.uint64)
    counts = _array(runs[_WORD + count * _WORD :], "<u4").astype(np.uint32)
    image = ProfileImage(_words(blocks), stamps, counts, _words(heads), clock)
    sound = is_start(learnt.started_at) and 0.0 <= learnt.share <= 1.0 and 0 <= learnt.kv_tokens < 1 << 50
    if not (sound and 0 < pieces < 1 << 16 and is_sound(image, pieces)):
        raise ValueError("it says what cannot be")
    return EndpointSnapshot(learnt, image, pieces, _exact(exact, exact_blocks))


def _exact(told: bytes, blocks: bytes) -> ExactImage | None:
    head = _read_exact(told)
    if head is None:
        return None
    parts = _cut(blocks, [_WORD * sum(counts) for _, _, counts in head.ranks]) if head.ranks else []
    ranks = [
        ExactRank(rank, block_tokens, counts, _words(part))
        for (rank, block_tokens, counts), part in zip(head.ranks, parts, strict=True)
    ]
    image = ExactImage(head.owner, head.number, ranks)
    if not exact_image.is_sound(image):
        raise ValueError("it says what cannot be")
    return image


def _pool(packed: Sequence[bytes], plain: Sequence[bytes]) -> PoolLearnt:
    head, numbers = packed
    ratio_blocks, output_blocks = plain
    known = _read_pool(head)
    if not all(len(digest) == DIGEST_BYTES and 0.0 <= age_s < _OLDEST_S for digest, age_s in known.kept):
        raise ValueError("it says what cannot be")
    first, second, third = _cut(numbers, [4 * known.ratios, 4 * known.outputs, 4 * known.outputs])
    ratios, means = _array(first, "<f4").tolist(), _array(second, "<f4").tolist()
    answers = _array(third, "<u4").tolist()
    return PoolLearnt(
        tokens=known.tokens,
        reuse=known.reuse,
        output=known.output,
        ratios=dict(zip(_words(ratio_blocks).tolist(), ratios, strict=True)),
        outputs=dict(zip(_words(output_blocks).tolist(), zip(means, answers, strict=True), strict=True)),
        numbers=known.numbers,
        kept=known.kept,
    )


def _parts(kind: str, packed: Sequence[bytes], plain: Sequence[bytes], pieces: int) -> Sequence[bytes]:
    sections = [*(zlib.compress(each, 1) for each in packed), *plain]
    content = b"".join(sections)
    cover = _Cover(
        version=VERSION,
        kind=kind,
        checksum=0,
        sections=[len(each) for each in sections],
        plain=[len(each) for each in packed],
        pieces=pieces,
    )
    cover = msgspec.structs.replace(cover, checksum=_checksum(cover, content))
    return [_pack(cover), *(content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES))]


def _checksum(cover: _Cover, content: bytes) -> int:
    """Of the content with the cover behind it, the checksum left out."""
    return xxhash.xxh3_64_intdigest(content + _pack(msgspec.structs.replace(cover, checksum=0)))


def _cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The data in pieces of these sizes. Raises ValueError unless they are all of it."""
    if min(sizes) < 0 or sum(sizes) != len(data):
        raise ValueError("its parts have impossible sizes")
    return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _bytes(values: npt.NDArray[np.generic], form: str) -> bytes:
    return values.astype(form, copy=False).tobytes()


def _array(data: bytes, form: str) -> npt.NDArray[np.generic]:
    return np.frombuffer(data, form)


def _words(data: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
