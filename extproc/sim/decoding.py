"""Sequences that decode, none of which is touched while it does: who ends when, and who crosses into which block.

Steps are numbered. From the step after its last chunk on, a sequence gets one token in every step, so the step that
gives it its last token is known from the start, and so are the steps in which it fills a block or needs the next.
Both are kept in heaps: a step without an end or a crossing costs nothing here, however many sequences decode.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from extproc.sim.blocks import BlockPool
from extproc.sim.sequence import Sequence

_Event = tuple[int, int, Sequence]
"""Step, order within the step, sequence. The order is twice the sequence's rank, plus 1 if a block is filled."""


class DecodingSet:
    """Decoding sequences of one engine, in order of admission."""

    def __init__(self, pool: BlockPool, block_size: int, *, caching: bool) -> None:
        self._pool = pool
        self._size = block_size
        self._caching = caching
        self._last_step: dict[Sequence, int] = {}
        self._ends: list[_Event] = []
        self._crossings: list[_Event] = []
        self._ranks = 0

    def __len__(self) -> int:
        return len(self._last_step)

    def begin(self, sequence: Sequence, step: int) -> None:
        """Add `sequence`, whose prefill is done and which lacks at least one token: it gets the next in `step`."""
        self._ranks += 1
        order = 2 * self._ranks
        last = step + sequence.answer_tokens - sequence.produced - 1
        self._last_step[sequence] = last
        heappush(self._ends, (last, order, sequence))
        into = sequence.computed % self._size
        if into:
            self._plan(sequence, step + self._size - into, order)
        else:
            heappush(self._crossings, (step, order, sequence))

    def cross(self, step: int) -> bool:
        """Register the blocks that are filled, and take those that are needed, in the steps up to `step`.

        Returns:
            Whether that is done; False as soon as a block is needed and none is free. Go on when one is.
        """
        crossings, pool = self._crossings, self._pool
        while crossings and crossings[0][0] <= step:
            at, order, sequence = crossings[0]
            if order % 2:
                heappop(crossings)
                number = sequence.registered
                pool.register(sequence.blocks[number], sequence.hashes[number])
                sequence.registered = number + 1
                if at < self._last_step[sequence]:
                    heappush(crossings, (at + 1, order - 1, sequence))
            elif pool.free:
                heappop(crossings)
                sequence.blocks += pool.take(1)
                self._plan(sequence, at + self._size, order)
            else:
                return False
        return True

    def end(self, step: int) -> Iterator[Sequence]:
        """Remove and yield the sequences to which `step` gave their last token, and set what they `produced`."""
        ends = self._ends
        while ends and ends[0][0] == step:
            sequence = heappop(ends)[2]
            del self._last_step[sequence]
            sequence.produced = sequence.answer_tokens
            yield sequence

    def steps_to_free(self, blocks: int, step: int) -> int:
        """Return how many steps after `step` the one is in which sequences that end have given back `blocks` blocks.

        0 when none are lacking; the last end of all if even that leaves some lacking.
        """
        if blocks <= 0 or not self._ends:
            return 0
        last = step
        for at, _, sequence in sorted(self._ends):
            last = at
            blocks -= len(sequence.blocks)
            if blocks <= 0:
                break
        return max(0, last - step)

    def alive_after(self, step: int) -> int:
        """Return how many sequences get a token after `step`, which none has passed that is still here."""
        if not self._ends or self._ends[0][0] > step:
            return len(self._last_step)
        return sum(last > step for last in self._last_step.values())

    def remove_newest(self, step: int) -> Sequence:
        """Remove and return the last added before it gets a token in `step`; preemption is rare, so this is slow."""
        newest, last = self._last_step.popitem()
        newest.produced = newest.answer_tokens - (last - step + 1)
        for heap in (self._ends, self._crossings):
            heap[:] = [event for event in heap if event[2] is not newest]
            heapify(heap)
        return newest

    def steps_alike(self, step: int, waiting: Sequence | None) -> int:
        """Return how many steps from `step` on (its own crossings are done) are surely alike.

        The last of them is at most the one in which the first sequence ends. The step after them may find no free
        block, or may find room for `waiting`, which has none at present: without ends, free blocks only become
        fewer, but a block may be filled that it would share.
        """
        steps = self._ends[0][0] - step + 1
        if waiting is not None:
            steps = min([steps, *(at - step for at in self._fills_shared_with(waiting))])
        free = self._pool.free
        if len(self._last_step) * -(-(steps - 1) // self._size) <= free or not self._crossings:
            return steps
        # The first step that finds no block free: each sequence needs its next at a known step, then every `size`.
        needs = sorted(at + order % 2 for at, order, _ in self._crossings)
        rounds, rest = divmod(free, len(needs))
        return min(steps, needs[rest] + rounds * self._size - step)

    def _fills_shared_with(self, waiting: Sequence) -> Iterator[int]:
        """Yield, of each sequence in the midst of a block that `waiting` would find, the step that fills it.

        The next such block changes nothing: to fill it, one that is free must be taken first. Hashes are chained, so
        if the present block is not shared, none after it is.
        """
        wanted = waiting.hashes
        for at, order, one in self._crossings:
            number = one.registered
            if order % 2 and number < len(wanted) and wanted[number] == one.hashes[number]:
                yield at

    def _plan(self, sequence: Sequence, step: int, order: int) -> None:
        """Note that `sequence`, if it lives so long, needs a block in `step`, having filled one just before."""
        if self._caching and sequence.registered < len(sequence.hashes):
            step, order = step - 1, order + 1
        if step <= self._last_step[sequence]:
            heappush(self._crossings, (step, order, sequence))
