"""A table from 64-bit blocks to 64-bit values in flat arrays: 24 to 48 bytes an entry, and no long pause.

Open addressing, in parts of at most some two thousand entries. A part that has filled up is built again by itself, and
split in two when it has outgrown its size, so that growing costs many short pauses instead of one long one (extendible
hashing). Lookups are a few operations on items of an `array`, which cost a third of what single items of numpy cost;
numpy builds the parts, where it is ten times as fast as a loop.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_SPREAD = 3
"""Slots for each entry of a part just built; it is built again when at most two thirds of them are taken. An entry that
is held costs 2 probes on average then, one that is not 5."""
_ROOM = 24
"""Entries that a part just built has room for at the least."""
_STAGGER = 103
"""Blocks being evenly spread, all parts would fill up at the same time. So they get between 0.6 and 1.0 times their
entries as room, by their place times this number modulo 256."""
_ZERO = 0x9E3779B97F4A7C15
"""Stands for the block 0, which marks a free slot. The two are one, like any two blocks whose hashes collide."""
_MOST_SEEN = 64
"""Blocks that a table remembers to have: of as many shared beginnings at a time a search is at its fastest."""
_FREE = array("Q", (0, 0))


class _Part:
    """Entries whose blocks end in the same bits, in slots.

    Attributes:
        slots: block and value of each slot in turn, so that both are in one line of the CPU's cache; block 0 in one
            that is free. Probing goes downwards from the block modulo the number of slots, which wraps around by
            itself: the slot before the first is at -2, the last.
        size: number of slots.
        room: how many slots may be taken yet.
        step: every `step`-th place of the table's parts is this one.
    """

    __slots__ = ("room", "size", "slots", "step")

    def __init__(self, keys: Words, values: Words, step: int, place: int) -> None:
        count = len(keys)
        self.room = max(count - count * (place * _STAGGER % 256) // 640, _ROOM)
        self.size = size = _SPREAD * max(count, _ROOM) | 1
        self.step = step
        self.slots = _FREE * size
        # In order of their home slots, counted from the top: each takes its own, or the one after its predecessor's.
        home = size - 1 - (keys % np.uint64(size)).astype(np.int64)
        # Of 16 bits a stable sort is a radix sort: 10 us for 2,048 entries instead of 50.
        order = np.argsort(home.astype(np.uint16 if size < 1 << 16 else np.uint32), kind="stable")
        steps = np.arange(count)
        taken = size - 1 - (np.maximum.accumulate(home[order] - steps) + steps)
        fits = count - int(np.count_nonzero(taken < 0))
        entries = np.stack((keys[order], values[order]), axis=1)
        np.frombuffer(self.slots, np.uint64).reshape(size, 2)[taken[:fits]] = entries[:fits]
        for block, value in entries[fits:].tolist():
            at = -2
            while self.slots[at]:
                at -= 2
            self.slots[at] = block
            self.slots[at + 1] = value


class Sorted(msgspec.Struct, frozen=True):
    """Entries by the part that they belong to; made by `sort`.

    Attributes:
        blocks: the blocks, those of one part in a row.
        values: their values.
        ends: where each part ends, in order of its place; their number is a power of two.
    """

    blocks: Words
    values: Words
    ends: npt.NDArray[np.int64]


def sort(blocks: Words, values: Words) -> Sorted:
    """Sort distinct blocks for `BlockTable.fill`. Plain numpy: a million take 50 ms, in a thread without the lock."""
    count = 1
    while count * BlockTable._most < len(blocks) and count < BlockTable._most_parts:
        count *= 2
    places = blocks & np.uint64(count - 1)
    order = np.argsort(places.astype(np.uint16), kind="stable")
    ends = np.bincount(places.astype(np.int64), minlength=count).cumsum()
    return Sorted(blocks[order], values[order], ends)


class BlockTable:
    """Values of blocks; 0 stands for none.

    Attributes:
        least: lower values are dead: they are left out when their part is built again, and may be seen until then.
            At least 1.
    """

    _most = 2048
    """Entries of a part that is not split."""
    _most_parts = 1 << 16
    """Only blocks forged to end in the same bits could ask for more."""

    def __init__(self, least: int = 1) -> None:
        self.least = least
        # Where prompts parted that were searched in several tables: blocks of this one, with their values or less.
        self._seen: dict[int, int] = {}
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, and of the list of parts."""
        return 8 * len(self._parts) + sum(16 * part.size for part in {id(part): part for part in self._parts}.values())

    def clear(self) -> None:
        """Hold nothing."""
        nothing = np.empty(0, np.uint64)
        self._parts = [_Part(nothing, nothing, 1, 0)]
        self._mask = 0
        self._seen.clear()

    def entries(self) -> Iterator[tuple[Words, Words]]:
        """Living entries with their values, some two thousand at a time.

        The table may change between two steps. What was living when the first began, and was not touched since, comes
        once; what was put, changed or died meanwhile may come as it was then, as it is, or not at all.
        """
        for part in list(dict.fromkeys(self._parts)):
            blocks, values = np.frombuffer(part.slots, np.uint64).reshape(-1, 2).T
            living = (blocks != 0) & (values >= self.least)
            yield blocks[living], values[living]

    def fill(self, entries: Sorted) -> Iterator[None]:
        """Hold these entries and no others when it is through; each step takes some 0.1 ms."""
        count, start = len(entries.ends), 0
        parts: list[_Part] = []
        for place, end in enumerate(entries.ends.tolist()):
            parts.append(_Part(entries.blocks[start:end], entries.values[start:end], count, place))
            start = end
            yield
        self._parts, self._mask = parts, count - 1
        self._seen.clear()

    def get(self, block: int) -> int:
        """Value of a block, 0 when it has none."""
        block = block or _ZERO
        part = self._parts[block & self._mask]
        slots = part.slots
        at = block % part.size * 2
        while (key := slots[at]) != block:
            if not key:
                return 0
            at -= 2
        return slots[at + 1]

    def changes(self, blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Values of these blocks, in order: (place, value) of the first one, and of each that differs from the last.

        As far as it is read: a prompt of which nothing is held costs one lookup.
        """
        parts, mask = self._parts, self._mask
        last = -1
        for place, block in enumerate(blocks):
            block = block or _ZERO  # noqa: PLW2901 - see `put`
            part = parts[block & mask]
            slots = part.slots
            at = block % part.size * 2
            while (key := slots[at]) != block and key:
                at -= 2
            value = slots[at + 1] if key else 0
            if value != last:
                last = value
                yield place, value

    def put(self, blocks: Sequence[int], value: int) -> list[tuple[int, int]]:
        """Give all these blocks one value; returns what they had, as (value, number of blocks in a row)."""
        parts = self._parts
        mask = self._mask
        runs: list[tuple[int, int]] = []
        run = count = 0
        for block in blocks:
            block = block or _ZERO  # noqa: PLW2901 - a name of its own costs as much as a probe
            part = parts[block & mask]
            slots = part.slots
            at = block % part.size * 2
            while (key := slots[at]) != block:
                if not key:
                    slots[at] = block
                    slots[at + 1] = value
                    part.room -= 1
                    if not part.room:
                        self._build(block & mask)
                        mask = self._mask
                    old = 0
                    break
                at -= 2
            else:
                at += 1
                old = slots[at]
                slots[at] = value
            if old == run:
                count += 1
            else:
                if count:
                    runs.append((run, count))
                run, count = old, 1
        if count:
            runs.append((run, count))
        return runs

    def change(self, block: int, value: int) -> None:
        """Give another value to a block that has one; a block that is not in the table stays out of it."""
        block = block or _ZERO
        self._seen.pop(block, None)
        part = self._parts[block & self._mask]
        at = block % part.size * 2
        while (key := part.slots[at]) != block:
            if not key:
                return
            at -= 2
        part.slots[at + 1] = value

    def _remember(self, block: int, value: int) -> None:
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[block] = value

    def _living(self, blocks: Words, values: Words) -> npt.NDArray[np.bool_]:  # noqa: ARG002 - for those who override it
        """Which entries to keep when a part is built again; asked of up to some four thousand at a time."""
        return values >= np.uint64(self.least)

    def _build(self, at: int) -> None:
        """Build the part in this place again, without what is no longer living; as two parts when it is too large."""
        parts = self._parts
        old = parts[at]
        keys, values = np.frombuffer(old.slots, np.uint64).reshape(-1, 2).T
        taken = keys != 0
        keys, values = keys[taken], values[taken]
        kept = self._living(keys, values)
        keys, values = keys[kept], values[kept]
        step = old.step
        place = at % step
        if len(keys) <= self._most or step == self._most_parts:
            parts[place::step] = [_Part(keys, values, step, place)] * (len(parts) // step)
            return
        if step == len(parts):
            parts.extend(parts)
            self._mask = len(parts) - 1
        upper = (keys & np.uint64(step)) != 0
        for first, chosen in ((place, ~upper), (place + step, upper)):
            half = _Part(keys[chosen], values[chosen], 2 * step, first)
            parts[first :: 2 * step] = [half] * (len(parts) // (2 * step))


def leading(tables: Iterable[BlockTable], blocks: Sequence[int], least: int = 0) -> list[int]:
    """How many leading blocks have a living value in each table, and one of `least` or more.

    No block may have a higher value than the one before it: the answer is a binary search, of eleven lookups for 2,000
    blocks. It begins at the answer of the table before: where tables agree, as on a prompt's shared beginning, the last
    block that all have is remembered, and one lookup is left. One loop for all tables, since calls cost as much.
    """
    found: list[int] = []
    count = len(blocks)
    guess = last = following = 0
    for table in tables:
        lowest = table.least
        if least > lowest:
            lowest = least
        low, high, middle = 0, count, guess - 1 if guess else count >> 1
        if guess and table._seen.get(last, 0) >= lowest:
            part = table._parts[following & table._mask]
            slots = part.slots
            at = following % part.size * 2
            while (key := slots[at]) != following and key:
                at -= 2
            if guess == count or not key or slots[at + 1] < lowest:
                found.append(guess)
                continue
            low = guess + 1
            middle = (low + high) >> 1
        while low < high:
            block = blocks[middle] or _ZERO
            part = table._parts[block & table._mask]
            slots = part.slots
            at = block % part.size * 2
            while (key := slots[at]) != block and key:
                at -= 2
            if key and (value := slots[at + 1]) >= lowest:
                low = middle + 1
                if low == guess:
                    table._remember(last, value)
                    middle = low
                else:
                    middle = (low + high) >> 1
            else:
                high = middle
                middle = (low + high) >> 1
        if low and low != guess:
            guess = low
            last = blocks[guess - 1] or _ZERO
            following = (blocks[guess] or _ZERO) if guess < count else 1
        found.append(low)
    return found
