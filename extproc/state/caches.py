"""What is believed of the caches of a pool's endpoints: profiles, answered turns, and what tells how true they are."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from extproc.state.blocktable import Sorted
from extproc.state.exact import Match
from extproc.state.exact_image import ExactImage
from extproc.state.facts import Facts, learnt_rates
from extproc.state.feed import Sized, is_start
from extproc.state.foreseen import Foreseen
from extproc.state.image import MOST_BLOCKS, ProfileImage
from extproc.state.learn import TokenEstimator
from extproc.state.learnt import EndpointLearnt
from extproc.state.precise import Chains, Precise
from extproc.state.profile import PrefixIndex
from extproc.state.turns import Turn, Turns

_SAVED_TURNS = 2048
"""Turns of an endpoint that a worker which joins is told: some 70 KB."""


class Caches:
    """Caches of all endpoints of one pool.

    Args:
        prior_rate: prefill tokens a second before anything was seen.
        kv_tokens: KV cache of an endpoint that tells none, in tokens.
        block_bytes: prompt bytes in one hashed block.
        tokens: bytes of a token in the pool.

    Attributes:
        index: profiles.
        turns: who answered which turn.
        exact: profiles as the engines themselves tell them.
    """

    def __init__(self, prior_rate: float, kv_tokens: int, block_bytes: int, tokens: TokenEstimator) -> None:
        self.index = PrefixIndex()
        self.turns = Turns()
        self.exact = Precise()
        self._prior_rate = prior_rate
        self._kv_tokens = kv_tokens
        self._block_bytes = block_bytes
        self._tokens = tokens
        self._facts: dict[str, Facts] = {}

    @property
    def endpoints(self) -> Collection[str]:
        """Endpoints of which anything is known."""
        return self._facts.keys()

    def of(self, endpoint: str) -> Facts:
        """What is learnt of an endpoint; of one that is not known yet, nothing."""
        facts = self._facts.get(endpoint)
        if facts is None:
            facts = self._facts[endpoint] = Facts(self._prior_rate)
        return facts

    def known(self, endpoint: str) -> Facts | None:
        """What is learnt of an endpoint, if anything was."""
        return self._facts.get(endpoint)

    def rates(self, endpoints: Iterable[str]) -> Mapping[str, float]:
        """Prefill speeds, tokens a second: each endpoint's own, else that of the pool's others, else the prior."""
        return learnt_rates(self._facts, endpoints, self._prior_rate)

    def claimed(self, endpoint: str) -> float:
        """Blocks that the endpoint claims to hold."""
        kv_tokens = self.of(endpoint).kv_tokens or self._kv_tokens
        return min(max(1.0, kv_tokens * self._tokens.bytes_per_token / self._block_bytes), MOST_BLOCKS)

    def capacity(self, endpoint: str) -> int:
        """Blocks that the endpoint's profile may have: what it claims to hold, and what its reports leave of that."""
        return max(1, int(self.claimed(endpoint) * self.of(endpoint).share.share))

    def exact_matches(
        self, chains: Chains, prompt_tokens: int, far: tuple[float, float], foreseen: Foreseen | None
    ) -> Mapping[str, Match]:
        """What endpoints with an exact profile will hold of a prompt when its turn comes.

        Args:
            chains: see `Precise.matches`, as for the next two.
            prompt_tokens: its length.
            far: worth of other tiers.
            foreseen: what the estimated profiles say of it; None when they were not asked.
        """
        found = self.exact.matches(chains, prompt_tokens, far)
        if foreseen is None:
            return found
        left = dict(found)
        for name in self.exact.pending.endpoints:
            match = found.get(name)
            less = foreseen.left_of(name, match) if match else None
            if match and less and less is not match and self._crowded(name, match.block_tokens):
                left[name] = less
        return left

    def _crowded(self, endpoint: str, block_tokens: int) -> bool:
        kv_tokens = self.of(endpoint).kv_tokens or self._kv_tokens
        estimated = self.index.held(endpoint) * self._block_bytes / self._tokens.bytes_per_token
        return self.exact.crowded(endpoint, kv_tokens / block_tokens, estimated / block_tokens)

    def hold(self, endpoint: str, blocks: Sequence[int], charge_id: str = "") -> bool:
        """Put a prompt into an endpoint's profile; False when it caches nothing.

        Args:
            endpoint: endpoint id.
            blocks: the prompt's blocks.
            charge_id: charge of its decision, when the prefill may be under way yet.
        """
        facts, index = self.of(endpoint), self.index
        if not blocks or not facts.caching:
            return False
        before, held = index.clock(endpoint), index.held(endpoint)
        evicted = index.add(endpoint, blocks, self.capacity(endpoint))
        facts.inserted += index.held(endpoint) - held + evicted
        if charge_id:
            facts.prefills.began(charge_id, before, index.clock(endpoint))
        return True

    def cut(self, endpoint: str, most: int) -> None:
        """Evict what an endpoint holds beyond so many blocks."""
        if self.index.held(endpoint) > most:
            self.index.add(endpoint, (), most)

    def sized(self, delta: Sized) -> None:
        """Take over what another replica came to believe of the size of an endpoint's cache."""
        if self.current(delta.endpoint, delta.started_at):
            self.of(delta.endpoint).share.told(delta.share)
            if delta.left >= 0:
                self.cut(delta.endpoint, delta.left)

    def answered(self, digest: bytes, turn: Turn, started_at: float) -> None:
        """Note an answered turn of the life that its endpoint's engine is in."""
        if self.current(turn.endpoint, started_at):
            self.turns.learn(digest, turn)

    def current(self, endpoint: str, started_at: float) -> bool:
        """Whether news are of the life that the endpoint's engine is in; a later life empties the profile first."""
        facts = self.of(endpoint)
        if started_at > facts.started_at:
            if facts.started_at > 0:
                self._empty([endpoint])
            facts.started_at = started_at
        return not 0.0 < started_at < facts.started_at

    def engine_seen(
        self, endpoint: str, kv_tokens: int, started_at: float, block_tokens: int, *, caching: bool
    ) -> None:
        """See `knowledge.PoolKnowledge.engine_seen`."""
        facts, started_at = self.of(endpoint), started_at if is_start(started_at) else 0.0
        facts.kv_tokens = kv_tokens if kv_tokens > 0 else facts.kv_tokens
        facts.block_tokens = block_tokens if block_tokens > 0 else facts.block_tokens
        known = facts.started_at > 0 or facts.untold
        if (known and 0 < started_at != facts.started_at) or (facts.caching and not caching):
            self._empty([endpoint])
        # An engine that does not tell its start gets one when its counters went back: that is its second life.
        facts.untold = started_at == 0
        facts.started_at = started_at if started_at > 0 else facts.started_at
        facts.caching = caching
        self.cut(endpoint, self.capacity(endpoint))

    def age(self, now: float, ttl_s: float, unreachable: Collection[str]) -> None:
        """See `knowledge.PoolKnowledge.age`."""
        for name, facts in self._facts.items():
            old = facts.aged(now, self.index.clock(name), ttl_s)
            if old is not None:
                self.index.drop_older(name, old + 1)
            facts.listened(now)
        self.exact.age(now)
        lost = [name for name, facts in self._facts.items() if facts.lost(now, unreachable=name in unreachable)]
        if lost:
            self._empty(lost)
            for name in lost:
                self.exact.index.suspend(name)

    def retain(self, endpoints: Iterable[str]) -> None:
        """Forget endpoints that left the pool."""
        gone = set(self._facts) - set(endpoints)
        if gone:
            self._empty(gone)
            for name in gone:
                self.exact.index.drop(name)
                del self._facts[name]

    def learnt(self, endpoint: str, now: float) -> EndpointLearnt:
        """What is known of an endpoint beside its profile; `now` as in `age`."""
        return self.of(endpoint).learnt(endpoint, now, self.turns.of(endpoint, _SAVED_TURNS))

    def resume(
        self,
        learnt: EndpointLearnt,
        image: ProfileImage,
        entries: Sorted,
        clock: int,
        then: float,
        exact: ExactImage | None = None,
    ) -> Iterator[None]:
        """Let an endpoint be known as another worker knew it, in steps of some 0.1 ms.

        Nothing is taken over of an engine that started again since, or that caches nothing.

        Args:
            learnt: what that worker knew.
            image: what it took the endpoint to hold.
            entries: `holder.entries_of` the image and the clock.
            clock: reading of the endpoint's use counter, as `entries` were made for it.
            then: when that was, by the clock of `age`.
            exact: what the endpoint held as its events told; None where that worker had no exact profile of it. One
                that this worker has stays then: the feed brings it up to date.
        """
        name = learnt.endpoint
        if not self.current(name, learnt.started_at) or not self.of(name).caching:
            return
        facts, life = self.of(name), self.of(name).life
        steps = chain(
            self.index.replace(name, image, entries, clock), self.exact.index.replace(name, exact) if exact else ()
        )
        more = True
        while more:
            yield
            if facts.life != life or self._facts.get(name) is not facts:
                return
            more = next(steps, self) is not self
        self.turns.forget([name])
        facts.resume(learnt, then, clock + 1)
        for digest, prompt_tokens, output_tokens in learnt.turns:
            self.turns.learn(digest, Turn(name, prompt_tokens, output_tokens))
        self.cut(name, self.capacity(name))

    def _empty(self, endpoints: Collection[str]) -> None:
        self.turns.forget(endpoints)
        for name in endpoints:
            self.index.forget(name)
            self.exact.empty(name)
            self.of(name).emptied()
