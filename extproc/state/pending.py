"""Blocks that an endpoint is about to have: of prompts that were just sent to it, until its events tell of them.

Between a decision and the engine's event lies the prefill. Without this, a burst of requests that begin alike would
find their beginning nowhere and spread over the pool, and compute it everywhere.

Only the blocks that the endpoint did not have are kept, as they are: blocks are chained, so that one that two prompts
share says that they share all before it.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

import msgspec

_LONGEST_S = 60.0
"""A prefill that was decided longer ago is over, or will never be."""
_GRACE_S = 10.0
"""How long after the end of its answer the event of a prompt may come: it goes through a keeper and the feed. One that
is told ends it at once, so this is for overload. With events two seconds late and one second of grace, turns came back
to what nobody knew to be there: 3 % of all prompt tokens that were cached were not expected."""
_MOST = 4096
"""Prompts at a time."""


class _Sent(msgspec.Struct, gc=False):
    """A prompt.

    Attributes:
        endpoint: who prefills it.
        start: blocks before the first of `blocks`: those it had already.
        blocks: the others.
        until: when it is forgotten, by the clock of `Pending.age`.
        answered: its answer is finished.
        outlived: the endpoint's profile began anew since it was sent.
    """

    endpoint: str
    start: int
    blocks: Sequence[int]
    until: float
    answered: bool = False
    outlived: bool = False


class Pending:
    """Prompts that are being prefilled in one pool, by their charges."""

    def __init__(self) -> None:
        self._now: float | None = None
        self._sent: OrderedDict[str, _Sent] = OrderedDict()
        self._of: dict[str, dict[str, _Sent]] = {}
        self._ends: dict[str, dict[int, list[str]]] = {}
        self._blocks: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def endpoints(self) -> Collection[str]:
        """Who prefills any of them."""
        return self._of.keys()

    def began(self, charge_id: str, endpoint: str, start: int, blocks: Sequence[int]) -> None:
        """An endpoint prefills a prompt of which it holds the first `start` blocks; `blocks` are the others."""
        self.drop(charge_id)
        if not blocks:
            return
        sent = _Sent(endpoint, start, blocks, (self._now or 0.0) + _LONGEST_S)
        self._sent[charge_id] = sent
        self._of.setdefault(endpoint, {})[charge_id] = sent
        self._ends.setdefault(endpoint, {}).setdefault(blocks[-1], []).append(charge_id)
        self._blocks[endpoint] = self._blocks.get(endpoint, 0) + len(blocks)
        if len(self._sent) > _MOST:
            self.drop(next(iter(self._sent)))

    def blocks(self, endpoint: str) -> int:
        """How many blocks an endpoint is about to have that it lacked when they were sent."""
        return self._blocks.get(endpoint, 0)

    def answered(self, charge_id: str, endpoint: str, *, running: bool) -> None:
        """Who has a request: another endpoint or none, and it is not prefilled where it was sent.

        Args:
            charge_id: its charge.
            endpoint: who has it; empty for nobody.
            running: its answer is not finished.
        """
        sent = self._sent.get(charge_id)
        if sent is None:
            return
        if sent.endpoint != endpoint or (sent.outlived and not running):
            self.drop(charge_id)
        elif not running:
            sent.answered = True
            sent.until = min(sent.until, (self._now or 0.0) + _GRACE_S)

    def told(self, endpoint: str, blocks: Collection[int]) -> None:
        """An endpoint told of these blocks: prompts that end with one of them were prefilled.

        That it has them, or no longer: a block that came and went between two batches is only told to be gone.
        """
        ends = self._ends.get(endpoint)
        for last in ends.keys() & blocks if ends else ():
            for charge_id in tuple(self._ends[endpoint][last]):
                self.drop(charge_id)

    def extended(self, endpoint: str, depth: int, blocks: Sequence[int]) -> int:
        """How many leading blocks of a prompt an endpoint will have, of which it has `depth` now."""
        for sent in self._of.get(endpoint, {}).values():
            at = depth - sent.start
            if 0 <= at < len(sent.blocks) and depth < len(blocks) and sent.blocks[at] == blocks[depth]:
                depth = sent.start + _shared(sent.blocks, blocks, sent.start, at + 1)
        return depth

    def age(self, now: float) -> None:
        """Forget what has been pending for too long; `now` in seconds, of a clock that never goes back."""
        if self._now is None:
            for sent in self._sent.values():
                sent.until += now
        self._now = now
        for charge_id in [charge_id for charge_id, sent in self._sent.items() if sent.until <= now]:
            self.drop(charge_id)

    def begun(self, endpoint: str) -> None:
        """An endpoint's profile begins anew: what it answered before is in there, or gone.

        That an answer is finished may be heard a little later than that; such a prompt gets no time after its answer.
        """
        for charge_id, sent in tuple(self._of.get(endpoint, {}).items()):
            sent.outlived = True
            if sent.answered:
                self.drop(charge_id)

    def forget(self, endpoint: str) -> None:
        """An endpoint restarted, or left: it prefills nothing that it was sent before."""
        for charge_id in tuple(self._of.get(endpoint, ())):
            self.drop(charge_id)

    def drop(self, charge_id: str) -> None:
        """Forget one prompt."""
        sent = self._sent.pop(charge_id, None)
        if sent is None:
            return
        theirs, ends = self._of[sent.endpoint], self._ends[sent.endpoint]
        self._blocks[sent.endpoint] -= len(sent.blocks)
        del theirs[charge_id]
        alike = ends[sent.blocks[-1]]
        alike.remove(charge_id)
        if not alike:
            del ends[sent.blocks[-1]]
        if not theirs:
            del self._of[sent.endpoint], self._ends[sent.endpoint], self._blocks[sent.endpoint]


def _shared(own: Sequence[int], blocks: Sequence[int], start: int, low: int) -> int:
    """How many of `own` are what `blocks` has from `start` on, given that the first `low` are: a binary search."""
    high = min(len(own), len(blocks) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if own[middle - 1] == blocks[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
