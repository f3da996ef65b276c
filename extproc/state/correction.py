"""What an answer's cached tokens say of the profile that predicted them, and what that changes."""

import math
from typing import Protocol

import msgspec

from extproc.state.capacity import LEAST_SHARE
from extproc.state.charges import Charge
from extproc.state.facts import Facts
from extproc.state.feed import Answered, Sized

_TOLERANCE = 0.05


class Finding(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one comparison.

    Attributes:
        missing: index of the first block that the profile held and the engine had not; -1 for none.
        more: the engine had more than was predicted.
    """

    missing: int = -1
    more: bool = False


def compare(
    held: int, predicted_tokens: float, cached_tokens: float, tokens_a_block: float, engine_block: int
) -> Finding:
    """Compare a prediction with the report.

    They agree within one KV block of the engine (it reuses whole ones), one of ours (so do we) and 5 % (the bytes of a
    token differ along a prompt). A prediction of 0 against a profile that held something was made for a request that
    skips the cache; it proves nothing.

    Args:
        held: leading blocks of the prompt in the profile.
        predicted_tokens: what was predicted, an earlier answer's tokens included.
        cached_tokens: what the engine reported.
        tokens_a_block: tokens of one of our blocks in this prompt.
        engine_block: tokens in a KV block.
    """
    held_tokens = held * tokens_a_block
    predicted = min(predicted_tokens, held_tokens)
    slack = engine_block + tokens_a_block + _TOLERANCE * max(predicted, cached_tokens)
    if predicted - cached_tokens > slack:
        return Finding(missing=min(math.ceil((cached_tokens + engine_block) / tokens_a_block), held - 1))
    skipped = held > 0 and predicted_tokens <= 0.0
    return Finding(more=not skipped and cached_tokens - max(predicted_tokens, held_tokens) > slack)


class Profiles(Protocol):
    """The verbs of `profile.PrefixIndex` that are needed here."""

    def held(self, endpoint: str, /) -> int:
        """See `PrefixIndex.held`."""
        ...

    def newer(self, endpoint: str, stamp: int, /) -> int:
        """See `PrefixIndex.newer`."""
        ...

    def drop_older(self, endpoint: str, stamp: int, /) -> int:
        """See `PrefixIndex.drop_older`."""
        ...


def correct(
    profiles: Profiles, facts: Facts, charge: Charge, answer: Answered, tokens_a_block: float, claimed: float
) -> Sized | None:
    """Correct an endpoint's profile and the believed size of its cache by an answer of its own.

    A missing block was evicted, and with it whatever was last used before: engines evict the least recently used first.
    Nothing is taken out

    - while the endpoint has not reported any cached token since its start: it may not report them at all;
    - for one report of none: a request that asks for the log-probabilities of its prompt skips the cache; the second
      report of none in a row is believed;
    - when the block's last use was not over at the decision: it may not have been computed yet;
    - when next to nothing was used after it: an engine would have to be tiny to have evicted that. Its template rather
      renders the prompt in another order, with tools in front of the system message, and never held the block.

    Args:
        profiles: the index.
        facts: of the endpoint; changed.
        charge: the decision.
        answer: what the endpoint reported.
        tokens_a_block: tokens of one block in this prompt.
        claimed: blocks that the endpoint claims to hold.

    Returns:
        What other replicas should be told; None when nothing changed.
    """
    cached = answer.cached_tokens
    if cached < 0 or answer.prompt_tokens <= 0 or charge.life != facts.life or not facts.caching:
        return None
    facts.reports = facts.reports or cached > 0
    held = len(charge.stamps)
    found = compare(held, charge.matched_tokens, cached, tokens_a_block, facts.block_tokens)
    if found.more:
        return _sized(charge, facts, -1) if facts.share.more() else None
    missed = facts.missed
    if charge.matched_tokens > 0:
        facts.missed = found.missing >= 0 and cached == 0
    if found.missing < 0 or not facts.reports or (cached == 0 and not missed):
        return None
    stamp = charge.stamps[found.missing]
    if not facts.prefills.over(stamp, charge.clock):
        return None
    if cached > 0 and profiles.newer(charge.endpoint, stamp) < LEAST_SHARE * claimed:
        return None
    profiles.drop_older(charge.endpoint, stamp + 1)
    left = profiles.held(charge.endpoint)
    # As many as at the decision: without those that came since, this prompt's own among them. Where half of the profile
    # came since, the difference would be of two guesses: sizes fell to a sixth of the true one with 32 in flight.
    since = facts.inserted - charge.inserted + held - found.missing
    facts.share.at_most(max(left - since, left / 2) / claimed)
    return _sized(charge, facts, left)


def _sized(charge: Charge, facts: Facts, left: int) -> Sized:
    return Sized(charge.endpoint, facts.share.share, left, facts.started_at)
