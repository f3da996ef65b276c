"""What virtual engines tell of their caches, as their KV events would: some time later."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from extproc.sim.virtual import VirtualEngine


class CacheEvents:
    """Events of all engines of a replay. They count from the first look at an engine after they happened.

    An engine is looked at in each decision, so between two of them nothing is told; a decision could not know it.
    """

    def __init__(self, engines: Sequence[VirtualEngine], delay_s: float) -> None:
        """Listen to engines that hold nothing yet; what happens is told `delay_s` later."""
        self._engines = engines
        self._delay_s = delay_s
        self._logs = [_Log(engine) for engine in engines]
        self._under_way: deque[tuple[float, int, bool, Sequence[int]]] = deque()

    def told(self, now: float) -> Iterator[tuple[int, bool, Sequence[int]]]:
        """What has arrived by `now`, in order: the engine, whether it stored blocks or evicted them, and the blocks."""
        for index, (engine, log) in enumerate(zip(self._engines, self._logs, strict=True)):
            engine.cached_tokens((), 1)  # a look at the cache, for which the engine catches up with its decode steps
            self._under_way += ((now + self._delay_s, index, stored, blocks) for stored, blocks in log.taken())
        while self._under_way and self._under_way[0][0] <= now:
            yield self._under_way.popleft()[1:]


class _Log:
    """What happened to one cache since it was looked at. Copies of a block are one block: it goes with the last."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._copies: Counter[int] = Counter()
        self._happened: list[tuple[bool, Sequence[int]]] = []
        engine.pool.watch = self
        engine.pool.registered = self.registered

    def taken(self) -> Sequence[tuple[bool, Sequence[int]]]:
        """What happened, which is forgotten here."""
        happened, self._happened = self._happened, []
        return happened

    def registered(self, hashes: Sequence[int]) -> None:
        """See `BlockPool.registered`."""
        self._copies.update(hashes)
        if new := [one for one in hashes if self._copies[one] == 1]:
            self._happened.append((True, new))

    def removed(self, block_hash: int) -> None:
        """See `PoolWatch.removed`."""
        self._copies[block_hash] -= 1
        if not self._copies[block_hash]:
            del self._copies[block_hash]
            self._happened.append((False, (block_hash,)))

    def cleared(self) -> None:
        """See `PoolWatch.cleared`: no engine of a replay is emptied."""
        raise RuntimeError("an engine of a replay was emptied, of which nothing is told")
