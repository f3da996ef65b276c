"""The prefix index: which endpoint holds which prompt blocks, as far as one worker knows.

Blocks are chained hashes: a block always follows the same one, so holding block i of a prompt implies that i blocks of
it match. An endpoint's profile evicts as its engine does, least recently used first and of one prompt the tail first.
A profile is therefore closed towards the head: whoever holds a block holds all before it, with a last use at least as
recent. That makes the depth of a match a binary search, and a prompt's last uses a few runs of equal stamps.

Nothing is deleted one by one. Evicting is raising a floor under the stamps of a profile (`uses`), forgetting an
endpoint is dropping its profile; what lies dead in a table is left out when that part of it is built again
(`blocktable`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from extproc.state.blocktable import Sorted, Words
from extproc.state.heads import Heads
from extproc.state.holder import PIECES, Profile
from extproc.state.image import ProfileImage

_HEADS = 128
"""Beginnings of prompts that are noted in one step."""


class PrefixIndex:
    """Profiles of all endpoints of one pool. Not shared between threads.

    Blocks are unsigned 64-bit integers, in the order of the prompt, and chained: a block always has the same one before
    it. When that is broken by removing a block but not those after it, a match may end at any of the gaps.
    """

    def __init__(self) -> None:
        self._profiles: dict[str, Profile] = {}
        self._heads = Heads()
        self._clock = 0  # where the clock of the next profile begins

    def __repr__(self) -> str:
        held = ", ".join(f"{name}: {profile.uses.held}" for name, profile in self._profiles.items())
        return f"<PrefixIndex {held}>"

    def __len__(self) -> int:
        """Number of (block, endpoint) entries."""
        return sum(profile.uses.held for profile in self._profiles.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the tables, without the Python objects around them (some 1 KB an endpoint)."""
        return self._heads.nbytes + sum(profile.nbytes for profile in self._profiles.values())

    def held(self, endpoint: str) -> int:
        """Number of blocks the endpoint's profile holds."""
        profile = self._profiles.get(endpoint)
        return profile.uses.held if profile else 0

    def depth(self, endpoint: str, blocks: Sequence[int]) -> int:
        """How many leading blocks this one endpoint holds."""
        profile = self._profiles.get(endpoint)
        return profile.depth(blocks) if profile else 0

    def match(self, blocks: Sequence[int]) -> Mapping[str, int]:
        """How many leading blocks each endpoint holds; endpoints that hold none are absent."""
        return self._heads.depths(blocks) if blocks else {}

    def add(self, endpoint: str, blocks: Sequence[int], capacity: int) -> int:
        """Note that the endpoint now holds a prompt's blocks; returns how many entries were evicted for them.

        All blocks count as used now, the head last: an engine frees a sequence from its tail, so the head of a prompt
        outlives its tail. `capacity` is in blocks and bounds this endpoint alone: it is never exceeded, and up to a
        sixteenth of it is left free so that not every prompt has to evict.
        """
        profile = self._profiles.get(endpoint) or self._enter(endpoint)
        new_head, evicted = profile.add(blocks, capacity)
        if new_head:
            self._heads.note(blocks[0], profile)
        return evicted

    def remove(self, endpoint: str, blocks: Iterable[int]) -> None:
        """Note that the endpoint does not hold these blocks: the tail of a prompt that it never prefilled."""
        profile = self._profiles.get(endpoint)
        if profile:
            profile.remove(blocks)

    def forget(self, endpoint: str) -> None:
        """Empty an endpoint's profile: it restarted, cleared its cache, or left. Its clock goes on when it returns."""
        profile = self._profiles.pop(endpoint, None)
        if profile is None:
            return
        self._clock = max(self._clock, profile.clock)
        self._heads.leave(profile)
        if not self._profiles:
            self._heads = Heads()

    def retain(self, endpoints: Iterable[str]) -> None:
        """Forget every endpoint that is not among these."""
        for name in set(self._profiles) - set(endpoints):
            self.forget(name)

    def clock(self, endpoint: str) -> int:
        """The endpoint's use counter: each `add` ticks it by one, and it never goes back, not even by `forget`."""
        profile = self._profiles.get(endpoint)
        return profile.clock if profile else self._clock

    def stamps(self, endpoint: str, blocks: Sequence[int]) -> Sequence[int]:
        """What the endpoint's use counter was at the last use of each of the leading blocks that it holds."""
        profile = self._profiles.get(endpoint)
        return profile.stamps(blocks) if profile else ()

    def newer(self, endpoint: str, stamp: int) -> int:
        """How many entries of the endpoint were last used when its use counter was at `stamp` or later."""
        profile = self._profiles.get(endpoint)
        return profile.uses.newer(stamp * PIECES) if profile else 0

    def drop_older(self, endpoint: str, stamp: int) -> int:
        """Evict every entry of the endpoint last used before `stamp`; returns how many."""
        profile = self._profiles.get(endpoint)
        return profile.drop(stamp * PIECES) if profile else 0

    def copy(self, endpoint: str) -> Iterator[tuple[Words, Words, Words]]:
        """A profile in steps of some 0.1 ms: blocks, their stamps, and beginnings of prompts; see `image.image_of`.

        The profile may change between two steps: see `BlockTable.entries`.
        """
        profile = self._profiles.get(endpoint)
        if profile is None:
            return
        none = np.empty(0, np.uint64)
        for blocks, stamps in profile.entries():
            yield blocks, stamps, none
        for heads in self._heads.of(profile):
            yield none, none, heads

    def replace(self, endpoint: str, image: ProfileImage, entries: Sorted, clock: int) -> Iterator[None]:
        """Let an endpoint hold what an image holds, in steps of some 0.1 ms; until the last it holds what it held.

        Args:
            endpoint: whose profile.
            image: what it holds.
            entries: `holder.entries_of` the image and the clock.
            clock: reading of the endpoint's use counter.
        """
        profile = Profile(endpoint, clock)
        yield from profile.become(image, entries)
        profile.clock = max(profile.clock, self.clock(endpoint))
        self.forget(endpoint)
        self._profiles[endpoint] = profile
        self._heads.enter(profile)
        for number, head in enumerate(image.heads.tolist()):
            # One that was forgotten meanwhile holds nothing.
            if profile.holds(head):
                self._heads.note(head, profile)
            if number % _HEADS == 0:
                yield

    def _enter(self, endpoint: str) -> Profile:
        profile = self._profiles[endpoint] = Profile(endpoint, self._clock)
        self._heads.enter(profile)
        return profile
