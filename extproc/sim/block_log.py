"""What happens to an engine's cache, in the order it happens, under the names the engine gives to blocks."""

from collections.abc import Callable
from dataclasses import dataclass

from extproc.sim.block_keys import Key, Keys, Wire
from extproc.sim.profiles import Kind
from extproc.sim.sequence import Content, Sequence
from extproc.sim.tokens import TOKEN_BYTES, token_count


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of one sequence that became cached, in order.

    Attributes:
        hashes: their names.
        parent: name of the block before them; None if they begin a prompt.
        data: their tokens, as `tokens` has them.
        content: what they are part of.
        start: the place of their first token there.
    """

    hashes: list[Wire]
    parent: Wire | None
    data: bytes
    content: Content
    start: int = 0

    @property
    def block_size(self) -> int:
        """Tokens in each block."""
        return token_count(self.data) // len(self.hashes)

    def blocks(self) -> "list[Stored]":
        """The same, a block each."""
        size = len(self.data) // len(self.hashes)
        parents = [self.parent, *self.hashes]
        return [
            Stored(
                [one], parents[n], self.data[n * size : (n + 1) * size], self.content, self.start + n * self.block_size
            )
            for n, one in enumerate(self.hashes)
        ]


@dataclass(frozen=True, slots=True)
class Removed:
    """A block that was evicted."""

    hash: Wire


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache was emptied."""


Event = Stored | Removed | Cleared


@dataclass(slots=True)
class _Block:
    key: Key
    wire: Wire
    copies: int = 0


class BlockLog:
    """A `BlockWatch` that hands on the events of each step together.

    A cache that was cleared between two requests is told of with the next step, as vLLM does: an idle engine says
    nothing.
    """

    def __init__(self, kind: Kind, keys: Keys, block_size: int, publish: Callable[[list[Event]], None]) -> None:
        """Events of a step go to `publish`.

        Args:
            kind: whose rules hold. vLLM's pool tells of each of several blocks that hold the same tokens; the others
                keep a tree of prefixes, which holds tokens once. TensorRT-LLM has no event for an emptied cache.
            keys: how blocks are named.
            block_size: tokens in a block.
            publish: takes a step's events; called for steps with events only.
        """
        self._copies = kind == "vllm"
        self._tells_clearing = kind != "trtllm"
        self._keys = keys
        self._size = block_size
        self._stride = block_size * TOKEN_BYTES
        self._publish = publish
        self._blocks: dict[int, _Block] = {}
        self._pending: list[Event] = []

    def stored(self, sequence: Sequence, start: int, stop: int) -> None:
        """See `BlockWatch.stored`.

        Raises:
            RuntimeError: the sequence came without its content.
        """
        content, hashes = sequence.content, sequence.hashes
        if content is None:
            raise RuntimeError("an engine that tells of its blocks needs the content of each sequence")
        parent = self._blocks[hashes[start - 1]] if start else None
        run: list[Wire] = []
        run_parent = parent
        for number in range(start, stop):
            block = self._blocks.get(hashes[number])
            if block is None:
                data = content.data[number * self._stride : (number + 1) * self._stride]
                key = self._keys.key(None if parent is None else parent.key, data, content, number * self._size)
                block = self._blocks[hashes[number]] = _Block(key, self._keys.wire(key, content))
            block.copies += 1
            if self._copies or block.copies == 1:
                if not run:
                    run_parent = parent
                run.append(block.wire)
            elif run:
                self._add(run, run_parent, number, content)
                run = []
            parent = block
        if run:
            self._add(run, run_parent, stop, content)

    def removed(self, block_hash: int) -> None:
        """See `PoolWatch.removed`."""
        block = self._blocks[block_hash]
        block.copies -= 1
        if not block.copies:
            del self._blocks[block_hash]
        if self._copies or not block.copies:
            self._pending.append(Removed(block.wire))

    def cleared(self) -> None:
        """See `PoolWatch.cleared`."""
        removed = [Removed(block.wire) for block in self._blocks.values()]
        self._blocks.clear()
        self._pending += [Cleared()] if self._tells_clearing else removed

    def step_ended(self) -> None:
        """See `BlockWatch.step_ended`."""
        if self._pending:
            events, self._pending = self._pending, []
            self._publish(events)

    def _add(self, run: list[Wire], parent: _Block | None, stop: int, content: Content) -> None:
        start = stop - len(run)
        data = content.data[start * self._stride : stop * self._stride]
        self._pending.append(Stored(run, None if parent is None else parent.wire, data, content, start * self._size))
