"""What an engine will still hold of a prompt when its turn comes, where its cache is full and prompts wait before it.

An exact profile is true for the moment of the last event that was told. Until a new prompt is prefilled, those that
were sent before it are: they push out what was used the longest ago, and the events that say so come after the
decision. In queues of a second a tenth of all prompt tokens was promised and not found. The estimated profile has it
already: it takes each prompt in when it is decided, and evicts then what the engine will evict.
"""

from collections.abc import Mapping

import msgspec

from extproc.state.exact import Match

_TOLERANCE = 0.05
"""The bytes of a token differ along a prompt; see `correction.compare`."""


class Foreseen(msgspec.Struct, frozen=True, gc=False):
    """What the estimated profiles say of a prompt.

    Attributes:
        tokens: by endpoint, how many of its first tokens they hold, as counted by its bytes.
        scale: what such a token is in tokens of the engine.
        block_tokens: tokens of the engine in a block of theirs.
    """

    tokens: Mapping[str, float]
    scale: float
    block_tokens: float

    def left_of(self, endpoint: str, match: Match) -> Match:
        """What will be left of an exact match where blocks are going to be pushed out; the match if both agree.

        They agree within a block of each and 5 %: what the engine told is exact then, and the estimate is not.
        """
        held = match.blocks * match.block_tokens
        tokens = self.tokens.get(endpoint, 0.0) * self.scale
        if held - tokens <= match.block_tokens + self.block_tokens + _TOLERANCE * held:
            return match
        blocks = int(tokens / match.block_tokens)
        return msgspec.structs.replace(match, blocks=blocks, worth=match.worth * blocks / match.blocks)
