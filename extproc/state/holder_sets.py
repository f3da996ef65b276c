"""Sets of holders of blocks, each kept once: many blocks are held by the same endpoints, in the same tiers.

A holder is a number, and a set three integers with a bit for each holder: one for each tier. Blocks refer to a set by
its id. That a holder is gone is noted in the sets, of which there are few, and not in the blocks, of which there are
millions. 500,000 blocks at ten random ones of 64 holders, the worst that five million entries can be, make as many
sets.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

TIERS = 3
"""GPU, host memory, disk or further away."""
Members = tuple[int, int, int]
"""Masks of holders, by tier."""
NOBODY: Members = (0, 0, 0)
_STEP = 512
"""Sets that are looked at in one step of a sweep: 0.1 ms."""


class HolderSets:
    """Sets by id, with the number of blocks that refer to each. Id 0 is the empty set.

    Attributes:
        members: by id, who is in the set.
        alive: by id, whether anybody is.
        readers: who relies on ids of the past: none is given to another set while there are any.
    """

    def __init__(self) -> None:
        self.members: list[Members] = [NOBODY]
        self.alive: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)
        self.readers = 0
        self._ids: dict[Members, int] = {}
        self._uses = [0]
        self._free: list[int] = []
        self._freed: list[int] = []

    def __len__(self) -> int:
        """Number of sets."""
        return len(self.members) - len(self._free) - len(self._freed)

    def of(self, members: Members) -> int:
        """Id of a set; one that is new has no block yet, and lasts until `count` finds that it has none."""
        if members == NOBODY:
            return 0
        known = self._ids.get(members)
        if known is not None:
            return known
        if not self.readers and self._freed:
            self._free, self._freed = [*self._free, *self._freed], []
        if self._free:
            number = self._free.pop()
            self.members[number] = members
        else:
            number = len(self.members)
            self.members.append(members)
            self._uses.append(0)
            if number >= len(self.alive):
                self.alive = np.concatenate((self.alive, np.zeros(len(self.alive), np.bool_)))
        self._ids[members] = number
        self.alive[number] = True
        return number

    def count(self, number: int, more: int) -> None:
        """So many blocks more, or less, refer to a set."""
        if not number:
            return
        self._uses[number] += more
        if not self._uses[number]:
            self._forget(number)
            self.alive[number] = False
            (self._freed if self.readers else self._free).append(number)

    def without(self, gone: int) -> Iterator[None]:
        """Take holders, given as a mask, out of all sets, in steps; two that become equal stay two."""
        for number in range(1, len(self.members)):
            gpu, cpu, disk = self.members[number]
            if (gpu | cpu | disk) & gone:
                self._forget(number)
                left = self.members[number] = (gpu & ~gone, cpu & ~gone, disk & ~gone)
                if left == NOBODY:
                    self.alive[number] = False
                elif self.alive[number]:
                    self._ids.setdefault(left, number)
            if number % _STEP == 0:
                yield

    def _forget(self, number: int) -> None:
        members = self.members[number]
        if self._ids.get(members) == number:
            del self._ids[members]
