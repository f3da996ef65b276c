"""Decisions of this worker that wait for their answer, with what was believed when they were made."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from extproc.state.turns import Turn

RECENT_DECISIONS = 4096
RECENT_BLOCKS = 1_000_000
"""Blocks of the decisions that wait for their answer's access-log entry. Most are corrected within seconds; those whose
entry was lost would hold 350 MB of long prompts otherwise."""


class Charge(msgspec.Struct, frozen=True, gc=False):
    """One decision.

    Attributes:
        endpoint: the pick.
        blocks: the prompt's blocks.
        stamps: last use, by the profile's clock, of each leading block that the pick held already.
        clock: the profile's clock before the decision touched it.
        inserted: blocks that had been put into the profile since the endpoint's start, before the decision.
        life: which life of the endpoint's cache that was; the next one begins when it is emptied.
        matched_tokens: prompt tokens that were predicted cached.
        turn: digest of the conversation, this turn included; empty for none.
        follows: the answered turn that it continues, as it was known then; None for none.
    """

    endpoint: str
    blocks: Sequence[int]
    stamps: Sequence[int]
    clock: int
    inserted: int
    life: int
    matched_tokens: float = 0.0
    turn: bytes = b""
    follows: Turn | None = None


class Charges:
    """The newest decisions by charge id, bounded in number and in blocks."""

    def __init__(self) -> None:
        self._charges: OrderedDict[str, Charge] = OrderedDict()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._charges)

    def put(self, charge_id: str, charge: Charge) -> None:
        """Keep a decision; the oldest go for it when there is no room."""
        # Eight bytes a stamp, where a list of integers takes forty.
        kept = msgspec.structs.replace(charge, stamps=array("q", charge.stamps))
        self._charges[charge_id] = kept
        self._blocks += len(kept.blocks)
        while len(self._charges) > RECENT_DECISIONS or self._blocks > RECENT_BLOCKS:
            _, oldest = self._charges.popitem(last=False)
            self._blocks -= len(oldest.blocks)

    def take(self, charge_id: str) -> Charge | None:
        """Take a decision out; None for one that is not known."""
        charge = self._charges.pop(charge_id, None)
        if charge is not None:
            self._blocks -= len(charge.blocks)
        return charge
