"""Exact profiles with what they do not tell yet, as a pool's deltas change them."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from extproc.state.exact import ExactIndex, Match
from extproc.state.feed import Cached, Evicted, Exact, Held, pack, unpack
from extproc.state.pending import Pending

Chains = Mapping[int, Sequence[int]]
"""A prompt's token blocks by block size, of `exact_blocks`."""


class Precise:
    """Exact profiles of one pool.

    Attributes:
        index: what the engines told.
        pending: prompts that they prefill.
    """

    def __init__(self) -> None:
        self.index = ExactIndex()
        self.pending = Pending()
        self._behind: frozenset[str] = frozenset()

    def kept(self, *, behind: Collection[str]) -> None:
        """Note of whom nothing was heard for so long that blocks may be gone: their estimated profiles count instead.

        Events come through a keeper and the store. Silence of an idle engine looks like silence of a dead keeper, so
        this is told by what keepers say of engines all the time, their states.
        """
        self._behind = frozenset(behind)

    def counts(self, endpoint: str) -> bool:
        """Whether the endpoint's exact profile is what counts."""
        return self.index.is_on(endpoint) and endpoint not in self._behind

    def told(self, delta: Exact | Cached | Evicted, origin: str) -> None:
        """Take in what an engine told, of the life that it is in; `origin` is who passed it on."""
        index = self.index
        match delta:
            case Exact() if delta.block_tokens > 0:
                index.begin(delta.endpoint, delta.rank, delta.block_tokens, origin)
                self.pending.begun(delta.endpoint)
            case Exact():
                index.end(delta.endpoint, delta.rank)
            case Cached():
                blocks = unpack(delta.blocks)
                index.stored(delta.endpoint, delta.rank, delta.tier, blocks, origin)
                self.pending.told(delta.endpoint, blocks)
            case Evicted():
                blocks = unpack(delta.blocks)
                index.evicted(delta.endpoint, delta.rank, delta.tier, blocks, origin)
                self.pending.told(delta.endpoint, blocks)

    def sent(self, decided: Held, chains: Chains, held_tokens: float | None = None) -> Held:
        """An endpoint will prefill a prompt; returns the delta with the blocks that the endpoint lacks.

        Args:
            decided: the delta.
            chains: the prompt.
            held_tokens: what the endpoint holds of it, pending prompts included, where that was just looked up.
        """
        name = decided.endpoint
        sizes = {each.block_tokens for each in self.index.lives(name)}
        block_tokens = sizes.pop() if len(sizes) == 1 else 0
        blocks = chains.get(block_tokens, ())
        if not blocks:
            return decided
        depth = self.index.depth(name, blocks) if held_tokens is None else round(held_tokens) // block_tokens
        if depth >= len(blocks):
            return decided
        self.pending.began(decided.charge_id, name, depth, blocks[depth:])
        return msgspec.structs.replace(decided, exact=pack(blocks[depth:]), exact_from=depth)

    def held(self, delta: Held) -> None:
        """Another worker decided."""
        if delta.exact:
            self.pending.began(delta.charge_id, delta.endpoint, delta.exact_from, unpack(delta.exact))

    def matches(self, chains: Chains, prompt_tokens: int, far: tuple[float, float]) -> Mapping[str, Match]:
        """What endpoints hold of a prompt, or will when what they prefill now is done; see `ExactIndex.match`."""
        found = self.index.match(chains, prompt_tokens, far)
        if self._behind:
            found = {name: each for name, each in found.items() if name not in self._behind}
        if not len(self.pending):
            return found
        return {name: self._extended(name, each, chains, prompt_tokens) for name, each in found.items()}

    def crowded(self, endpoint: str, kv_blocks: float, estimated_blocks: float) -> bool:
        """Whether what the endpoint is about to compute pushes out blocks, and its estimated profile tells which.

        It does where more blocks have no room than a full cache has and the estimate does not know. Else most of what
        it does not know came past this fleet, or before it looked, and stays. What is pushed out of the GPU is not lost
        where an engine keeps blocks elsewhere too.

        Args:
            endpoint: endpoint id.
            kv_blocks: blocks of the engine that its cache has room for.
            estimated_blocks: blocks that its estimated profile has, as many as they are of the engine.
        """
        computing = self.pending.blocks(endpoint)
        if not computing or self.index.is_tiered(endpoint):
            return False
        return self.index.held(endpoint) + computing - kv_blocks > max(0.0, kv_blocks - estimated_blocks)

    def empty(self, endpoint: str) -> None:
        """The endpoint restarted, or its cache was emptied."""
        self.index.clear(endpoint)
        self.pending.forget(endpoint)

    def age(self, now: float) -> None:
        """See `Pending.age`."""
        self.index.tidy()
        self.pending.age(now)

    def _extended(self, endpoint: str, match: Match, chains: Chains, prompt_tokens: int) -> Match:
        size = match.block_tokens
        most = max(0, prompt_tokens - 1) // size
        depth = min(self.pending.extended(endpoint, match.blocks, chains[size]), most)
        if depth <= match.blocks:
            return match
        return msgspec.structs.replace(match, blocks=depth, worth=match.worth + (depth - match.blocks) * size)
