"""What one worker knows of one pool: profiles, rates and token lengths, changed only by deltas."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from extproc.state import taught
from extproc.state.caches import Caches
from extproc.state.charges import Charge, Charges
from extproc.state.conversations import Conversations
from extproc.state.correction import correct
from extproc.state.feed import (
    Answered,
    Cached,
    Delta,
    Dropped,
    Evicted,
    Exact,
    Held,
    Kept,
    Measured,
    Sized,
    Turned,
    pack,
    unpack,
)
from extproc.state.heat import Heat
from extproc.state.lengths import Lengths
from extproc.state.precise import Chains
from extproc.state.turns import Turn, cached


class Priors(msgspec.Struct, frozen=True):
    """What is believed before anything was seen.

    Attributes:
        prefill_tokens_per_s: prefill speed of an endpoint.
        bytes_per_token: prompt bytes a token stands for.
        kv_tokens: KV cache of an endpoint in tokens.
        block_bytes: prompt bytes in one hashed block.
    """

    prefill_tokens_per_s: float = 8000.0
    bytes_per_token: float = 4.0
    kv_tokens: int = 100_000
    block_bytes: int = 256


class PoolKnowledge:
    """Learnt state of a pool. One writer: the event loop of its worker.

    Attributes:
        heat: how often beginnings of prompts are used, by whichever worker.
        caches: what is believed of the endpoints' caches.
        lengths: what is learnt of prompts and answers.
        conversations: which run here, of models with several versions.
    """

    def __init__(self, priors: Priors) -> None:
        self.heat = Heat()
        self.conversations = Conversations()
        self._priors = priors
        self.lengths = Lengths(priors.bytes_per_token)
        self.caches = Caches(priors.prefill_tokens_per_s, priors.kv_tokens, priors.block_bytes, self.lengths.tokens)
        self._charges = Charges()
        self._heard: list[Callable[[str, str], None]] = []

    def hear(self, listener: Callable[[str, str], None]) -> None:
        """Tell `listener` of each request that an endpoint is known to have: its charge, and the endpoint."""
        self._heard.append(listener)

    @property
    def block_bytes(self) -> int:
        """Prompt bytes in one hashed block; fixed, so that nothing learnt ever changes a hash."""
        return self._priors.block_bytes

    @property
    def bytes_per_token(self) -> float:
        """Prompt bytes a token stands for, in the pool as a whole."""
        return self.lengths.tokens.bytes_per_token

    def bytes_per_token_of(self, blocks: Sequence[int]) -> float:
        """Prompt bytes a token stands for in this prompt: as in one that began like it, else as in the pool."""
        return self.lengths.bytes_per_token_of(blocks)

    def rates(self, endpoints: Iterable[str]) -> Mapping[str, float]:
        """Prefill speeds, tokens a second: each endpoint's own, else that of the pool's others, else the prior."""
        return self.caches.rates(endpoints)

    def rate(self, endpoint: str) -> float:
        """Prefill speed of one endpoint; for all of a pool ask `rates`, which looks at the others once."""
        return self.rates((endpoint,))[endpoint]

    def overhead_s(self, endpoint: str) -> float:
        """What an endpoint's TTFT has besides prefill, in seconds: see `rate.predict_ttft_ms`."""
        known = self.caches.known(endpoint)
        return known.rate.overhead_s if known else 0.0

    def held(self, endpoint: str) -> int:
        """Blocks in the endpoint's profile."""
        return self.caches.index.held(endpoint)

    def capacity(self, endpoint: str) -> int:
        """Blocks that the endpoint's profile may have: what it claims to hold, and what its reports leave of that."""
        return self.caches.capacity(endpoint)

    def expected_output(self, blocks: Sequence[int], max_tokens: int | None) -> float:
        """Tokens expected of one answer: as of prompts that begin alike, else as of the pool; at most `max_tokens`."""
        return self.lengths.expected_output(blocks, max_tokens)

    def queue_tokens(self, endpoint: str, waiting: int) -> float:
        """Prefill tokens of `waiting` requests in the engine's queue, freshly read; 0 before the first answer."""
        known = self.caches.known(endpoint)
        return max(0, waiting) * known.uncached if known else 0.0

    def matched_tokens(self, blocks: Sequence[int], follows: bytes = b"") -> Mapping[str, float]:
        """By endpoint, how many of the prompt's first tokens its cache holds.

        Args:
            blocks: the prompt's blocks.
            follows: digest of the turn whose answer the prompt continues; who answered that has the answer too.
        """
        tokens_a_block = self._tokens_a_block(blocks)
        matched = {name: count * tokens_a_block for name, count in self.caches.index.match(blocks).items()}
        turn = self.caches.turns.find(follows)
        if turn is None or not self.caches.of(turn.endpoint).caching:
            return matched
        matched[turn.endpoint] = cached(
            turn,
            base=matched.get(turn.endpoint, 0.0),
            prompt=(len(blocks) + 1) * tokens_a_block,
            tokens_a_block=tokens_a_block,
            share=self.lengths.reuse.share,
        )
        return matched

    def continued(self, digest: bytes) -> tuple[str, float] | None:
        """Who answered a turn, and the tokens of the conversation up to and with that answer; None when unknown.

        The engine puts these in front of a request that names the stored response, less what templates leave out.
        """
        turn = self.caches.turns.find(digest)
        return (turn.endpoint, turn.prompt_tokens + turn.output_tokens * self.lengths.reuse.share) if turn else None

    def decided(
        self,
        charge_id: str,
        endpoint: str,
        blocks: Sequence[int],
        *,
        matched_tokens: float = 0.0,
        turn: bytes = b"",
        follows: bytes = b"",
        shared_block: int = 0,
    ) -> Sequence[Delta]:
        """Take in a decision of this worker; returns what the other replicas should be told.

        Args:
            charge_id: id of its charge.
            endpoint: the pick.
            blocks: the prompt's blocks.
            matched_tokens: prompt tokens that were predicted cached at the pick; 0 for a request that skips the cache.
            turn: digest of the conversation, this request included.
            follows: digest of the turn that it continues.
            shared_block: last block of the longest beginning that any endpoint held; 0 for none. The others' `heat`
                takes its use from that, as this worker's own takes it from `Heat.used`.
        """
        if not blocks and not turn:
            return ()
        facts = self.caches.of(endpoint)
        charge = self._charge(endpoint, blocks, matched_tokens, turn, self.caches.turns.use(follows))
        self._charges.put(charge_id, charge)
        if not self.caches.hold(endpoint, blocks, charge_id):
            return ()
        return (Held(endpoint, pack(blocks), charge_id, facts.started_at, shared_block),)

    def sent(self, deltas: Sequence[Delta], chains: Chains, held_tokens: float | None = None) -> Sequence[Delta]:
        """Take in the token blocks of what was `decided`; returns its deltas with them: see `Precise.sent`."""
        exact = self.caches.exact
        return [exact.sent(each, chains, held_tokens) if isinstance(each, Held) else each for each in deltas]

    def apply(self, delta: Delta, now: float | None = None, *, old: bool = False, origin: str = "") -> Sequence[Delta]:
        """Take in one delta, whoever learnt it; returns corrections that the other replicas should be told.

        Args:
            delta: what was learnt.
            now: when it was, by the clock of `heat`, for one that another worker learnt.
            old: it was so long ago that the prefill which it tells of is over.
            origin: who told it; empty for this worker.
        """
        match delta:
            case Held():
                self._held(delta, now, old=old)
            case Exact() | Cached() | Evicted():
                if self.caches.current(delta.endpoint, delta.started_at):
                    self.caches.exact.told(delta, origin)
            case Dropped():
                self.caches.index.remove(delta.endpoint, unpack(delta.blocks))
            case Measured():
                self.lengths.measured(delta)
            case Sized():
                self.caches.sized(delta)
            case Turned():
                self._turned(delta)
            case Kept() if now is not None:
                self.conversations.told(delta.conversations, now)
            case Answered():
                return self._answered(delta)
        return ()

    def engine_seen(
        self, endpoint: str, kv_tokens: int, started_at: float, block_tokens: int = 0, *, caching: bool = True
    ) -> None:
        """Note what an engine tells of itself; a new start time, or that it caches nothing, empties its profile.

        Args:
            endpoint: endpoint id.
            kv_tokens: its KV cache in tokens; 0 when not told.
            started_at: start of its process, seconds since the epoch; 0 when not told.
            block_tokens: tokens in one of its KV blocks; 0 when not told.
            caching: it reuses prefixes: they are not switched off, and it is not asleep, which empties its cache.
        """
        self.caches.engine_seen(endpoint, kv_tokens, started_at, block_tokens, caching=caching)

    def age(self, now: float, ttl_s: float = 3600.0, unreachable: Collection[str] = ()) -> None:
        """Forget what time has made untrue; call it several times a second or less, with a clock that never goes back.

        Args:
            now: present time in seconds, from any origin.
            ttl_s: blocks that nothing used for so long are forgotten (up to an eighth later).
            unreachable: endpoints that cannot be connected to; after a minute they lose their profiles.
        """
        self.caches.age(now, ttl_s, unreachable)

    def retain(self, endpoints: Iterable[str]) -> None:
        """Forget endpoints that left the pool."""
        self.caches.retain(endpoints)

    def _charge(
        self, endpoint: str, blocks: Sequence[int], matched_tokens: float, turn: bytes, follows: Turn | None
    ) -> Charge:
        """A decision that is to be prefilled by `endpoint`, as its profile stands before that."""
        facts, index = self.caches.of(endpoint), self.caches.index
        return Charge(
            endpoint=endpoint,
            blocks=blocks,
            stamps=index.stamps(endpoint, blocks),
            clock=index.clock(endpoint),
            inserted=facts.inserted,
            life=facts.life,
            matched_tokens=matched_tokens,
            turn=turn,
            follows=follows,
        )

    def _tokens_a_block(self, blocks: Sequence[int]) -> float:
        return self._priors.block_bytes / self.bytes_per_token_of(blocks)

    def _held(self, delta: Held, now: float | None, *, old: bool) -> None:
        if now is not None and delta.shared_block:
            self.heat.used(delta.shared_block, now)
        if self.caches.current(delta.endpoint, delta.started_at):
            self.caches.hold(delta.endpoint, unpack(delta.blocks), "" if old else delta.charge_id)
            if not old:
                self.caches.exact.held(delta)

    def _turned(self, delta: Turned) -> None:
        turn = Turn(delta.endpoint, delta.prompt_tokens, delta.output_tokens)
        self.caches.answered(delta.turn, turn, delta.started_at)

    def _answered(self, delta: Answered) -> Sequence[Delta]:
        self.lengths.answered(delta)
        running = taught.tells_only_who(delta)
        self.caches.exact.pending.answered(delta.charge_id, delta.endpoint, running=running)
        started_at = 0.0
        if delta.endpoint:
            for listener in self._heard:
                listener(delta.charge_id, delta.endpoint)
            facts = self.caches.of(delta.endpoint)
            facts.answered(delta)
            facts.prefills.ended(delta.charge_id, self.caches.index.clock(delta.endpoint))
            started_at = facts.started_at
        charge = self._charges.take(delta.charge_id)
        if charge and running and delta.endpoint == charge.endpoint:
            self._charges.put(delta.charge_id, charge)
            return ()
        told: list[Delta] = []
        if turn := taught.turned(delta, delta.turn or (charge.turn if charge else b""), started_at):
            self._turned(turn)
            told += () if delta.turn else (turn,)  # who reads the answer itself knows it already
        if charge is None:
            return told
        if measured := taught.measured(delta, charge.blocks):
            self.lengths.measured(measured)
            told.append(measured)
        by_the_pick = delta.endpoint == charge.endpoint
        return [*told, *(self._corrected(delta, charge) if by_the_pick else self._moved(delta, charge))]

    def _moved(self, delta: Answered, charge: Charge) -> Sequence[Delta]:
        """Another endpoint than the pick answered, or none: the pick never prefilled what it did not hold."""
        facts = self.caches.of(charge.endpoint)
        facts.prefills.ended(delta.charge_id, self.caches.index.clock(charge.endpoint))
        if not charge.blocks:
            return ()
        never_prefilled = charge.blocks[len(charge.stamps) :]
        self.caches.index.remove(charge.endpoint, never_prefilled)
        dropped = Dropped(charge.endpoint, pack(never_prefilled))
        running = delta.charge_id if taught.tells_only_who(delta) else ""
        if delta.endpoint and running:
            # What it reports at its end is compared with no prediction: none was made of this endpoint.
            self._charges.put(running, self._charge(delta.endpoint, charge.blocks, 0.0, charge.turn, None))
        if not delta.endpoint or not self.caches.hold(delta.endpoint, charge.blocks, running):
            return [dropped]
        started_at = self.caches.of(delta.endpoint).started_at
        return [dropped, Held(delta.endpoint, pack(charge.blocks), started_at=started_at)]

    def _corrected(self, delta: Answered, charge: Charge) -> Sequence[Delta]:
        """The pick answered: what it reports of its cache corrects its profile."""
        facts = self.caches.of(charge.endpoint)
        if charge.follows is not None and charge.follows.endpoint == charge.endpoint and delta.cached_tokens >= 0:
            self.lengths.reuse.observe(charge.follows, delta.cached_tokens, facts.block_tokens)
        sized = correct(
            self.caches.index,
            facts,
            charge,
            delta,
            self._tokens_a_block(charge.blocks),
            self.caches.claimed(charge.endpoint),
        )
        return () if sized is None else (sized,)
