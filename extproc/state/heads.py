"""Which profiles may hold prompts that begin with a block."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from extproc.state.blocktable import BlockTable, Words, leading
from extproc.state.holder import Profile

_GROUPS = 512
"""Groups that are looked through at a time: some 0.1 ms."""


class Heads(BlockTable):
    """Which profiles may hold prompts that begin with a block: a hint, so that a match asks these alone.

    A table from the head to the number of a group of profiles, plus 1. No head is taken out when its profile evicts it:
    what is stale is left out when a match meets it, or when its part of the table is built again.
    """

    _most = 512
    """Each costs 0.5 us, a look into a profile, when its part is built again."""

    def __init__(self) -> None:
        super().__init__()
        # By number: a profile alone, for all heads that it has to itself; or those who share one head. A number given
        # back is given again to the same kind: a stale head may still have that of a profile that left.
        self._groups: list[list[Profile]] = []
        self._free_alone: list[int] = []
        self._free_shared: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, and of the groups."""
        return super().nbytes + sum(8 * len(group) + 64 for group in self._groups)

    def enter(self, profile: Profile) -> None:
        """Give the profile its number."""
        profile.number = self._new_group([profile], self._free_alone)

    def leave(self, profile: Profile) -> None:
        """Take the profile's number back and empty it, since groups may refer to it yet."""
        profile.clear()
        self._groups[profile.number] = []
        self._free_alone.append(profile.number)
        profile.number = -1

    def note(self, block: int, profile: Profile) -> None:
        """Note that the profile holds a prompt that begins with this block."""
        value = self.get(block)
        group = self._groups[value - 1] if value else []
        if profile in group:
            return
        if not group:
            self.put((block,), profile.number + 1)
        elif value - 1 == group[0].number:
            self.change(block, self._new_group([*group, profile], self._free_shared) + 1)
        else:
            group.append(profile)

    def depths(self, blocks: Sequence[int]) -> dict[str, int]:
        """How many leading blocks each profile holds that holds any."""
        value = self.get(blocks[0])
        if not value:
            return {}
        group = self._groups[value - 1]
        depths = leading(group, blocks)
        found = {profile.name: depth for profile, depth in zip(group, depths, strict=True) if depth}
        if len(found) < len(group) > 1:
            group[:] = [profile for profile in group if profile.holds(blocks[0])]
            if not group:
                self.change(blocks[0], 0)
                self._free_group(value - 1)
        return found

    def of(self, profile: Profile) -> Iterator[Words]:
        """Blocks that were noted for this profile, in steps as `entries`; some may not be held any more."""
        noted = np.zeros(len(self._groups) + 1, np.bool_)
        noted[profile.number + 1] = True
        for start in range(0, len(self._groups), _GROUPS):
            for number, group in enumerate(self._groups[start : start + _GROUPS], start):
                if number < len(noted) - 1 and profile in group:
                    noted[number + 1] = True
            yield np.empty(0, np.uint64)
        for blocks, values in self.entries():
            values = np.where(values < len(noted), values, 0)  # noqa: PLW2901 - groups that came meanwhile
            yield blocks[noted[values]]

    def _living(self, blocks: Words, values: Words) -> npt.NDArray[np.bool_]:
        pairs = zip(blocks.tolist(), values.tolist(), strict=True)
        return np.array([value > 0 and self._lives(block, value - 1) for block, value in pairs], np.bool_)

    def _lives(self, block: int, number: int) -> bool:
        group = self._groups[number]
        if any(profile.holds(block) for profile in group):
            return True
        if group and group[0].number != number:
            self._free_group(number)
        return False

    def _new_group(self, group: list[Profile], free: list[int]) -> int:
        if free:
            number = free.pop()
            self._groups[number] = group
            return number
        self._groups.append(group)
        return len(self._groups) - 1

    def _free_group(self, number: int) -> None:
        self._groups[number] = []
        self._free_shared.append(number)
