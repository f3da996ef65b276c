"""The engine core: continuous batching over a paged KV cache, stepped in engine time. No I/O, no clock.

One step computes at most `token_budget` tokens: first one for each decoding sequence and the next chunk of each
sequence still in prefill, in order of admission, then chunks of waiting sequences, first come first served. A
step over T tokens with a batch of B sequences lasts

    max(step_s + per_seq_s x B, T / prefill_tokens_per_s)

the two bounds of a GPU: reading weights and the cache, which grows with the batch, and arithmetic, which grows
with the tokens. Whichever is longer hides the other, so a lone uncached prompt of 2,000 tokens takes
2,000 / prefill_tokens_per_s, and decoding beside a prefill chunk costs that chunk's time, as in vLLM.

Requests and aborts that arrive during a step are seen when it ends. The gauges are taken after a step's results
and before new arrivals are seen, as vLLM does.
"""

from collections import deque
from collections.abc import Iterable

from extproc.sim.blocks import BlockPool
from extproc.sim.sequence import Sequence
from extproc.sim.settings import EngineSettings
from extproc.sim.stats import EngineStats
from extproc.sim.watches import BlockWatch, StepWatch


class Engine:
    """Scheduler and cache of one engine. Callers pass the time, in engine seconds, and never go back.

    Attributes:
        settings: cache and speed.
        pool: the KV cache.
        stats: what is counted.
        slowdown: how many times longer a step lasts.
        prefill_factor: how many times longer its arithmetic takes.
        decode_factor: how many times longer reading the weights and the cache takes.
        steps: who hears of steps, if anybody does.
        counts_adapters: whether `stats.adapters` is kept.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.blocks, caching=settings.prefix_caching)
        self.stats = EngineStats(settings.context_tokens)
        self.slowdown = 1.0
        self.prefill_factor = self.decode_factor = 1.0
        self.steps: StepWatch | None = None
        self.counts_adapters = False
        self._blocks: BlockWatch | None = None
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._arrivals: list[Sequence] = []
        self._aborts: list[Sequence] = []
        self._batch: list[Sequence] = []
        self._step_began = 0.0
        self._step_ends: float | None = None

    @property
    def next_event(self) -> float | None:
        """When the step in progress ends; None while the engine is idle."""
        return self._step_ends

    @property
    def live(self) -> int:
        """Sequences that are running, waiting or just arrived."""
        return len(self._running) + len(self._waiting) + len(self._arrivals)

    @property
    def queued(self) -> int:
        """Sequences that have not been admitted."""
        return len(self._waiting) + len(self._arrivals)

    @property
    def queued_tokens(self) -> int:
        """Tokens of the sequences that wait."""
        return sum(one.known for one in self._waiting)

    def watch_blocks(self, watch: BlockWatch) -> None:
        """Tell `watch` of the cache from now on. Without prefix caching there is nothing to tell."""
        if self.settings.prefix_caching:
            self._blocks = self.pool.watch = watch

    def submit(self, sequences: Iterable[Sequence], now: float) -> None:
        """Accept `sequences` at `now`; `advance(now)` was called before. An idle engine starts a step at once."""
        for sequence in sequences:
            sequence.arrived_at = now
            self._arrivals.append(sequence)
        if self._step_ends is None:
            self._begin_step(now)

    def abort(self, sequence: Sequence, now: float) -> None:
        """Drop `sequence`, if it has not finished, as soon as the step in progress ends."""
        if sequence.finished is not None or sequence.aborted:
            return
        sequence.aborted = True
        self._aborts.append(sequence)
        if self._step_ends is None:
            self._begin_step(now)

    def drop_all(self, now: float) -> list[Sequence]:
        """End every sequence at once, in mid-step if need be, as "abort"; return those that nobody aborted before."""
        dropped = [*self._running, *self._waiting, *self._arrivals]
        for sequence in dropped:
            sequence.finished, sequence.finished_at = "abort", now
            self._release(sequence)
        for inbox in (self._running, self._waiting, self._arrivals, self._aborts, self._batch):
            inbox.clear()
        self._step_ends = None
        told = [sequence for sequence in dropped if not sequence.aborted]
        self.stats.finished["abort"] += len(told)
        self._take_gauges(now)
        return told

    def advance(self, now: float) -> list[Sequence]:
        """Run every step that ends by `now`; return the sequences with news, in the order it came up.

        A sequence that is not `streamed` is reported only when it finishes.
        """
        changed: list[Sequence] = []
        while self._step_ends is not None and self._step_ends <= now:
            end = self._step_ends
            self._end_step(end, changed)
            self._begin_step(end)
        for sequence in changed:
            sequence.changed = False
        return changed

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing done, while any sequence holds blocks."""
        return self.pool.reset()

    def _begin_step(self, at: float) -> None:
        self._settle_inbox()
        tokens = self._schedule(at)
        if not self._batch:
            self._step_ends = None
            self._take_gauges(at)
            if self.steps is not None:
                self.steps.idle()
            return
        settings = self.settings
        bound_by_memory = (settings.step_s + settings.per_seq_s * len(self._batch)) * self.decode_factor
        bound_by_arithmetic = tokens / settings.prefill_tokens_per_s * self.prefill_factor
        self.stats.step_tokens.observe(tokens)
        self._step_began = at
        self._step_ends = at + max(bound_by_memory, bound_by_arithmetic) * self.slowdown

    def _settle_inbox(self) -> None:
        if self._arrivals:
            self._waiting.extend(self._arrivals)
            self._arrivals.clear()
        if not self._aborts:
            return
        for sequence in self._aborts:
            if sequence.finished is None:
                sequence.finished = "abort"
                self._release(sequence)
        self._aborts.clear()
        self._running = [one for one in self._running if one.finished is None]
        self._waiting = deque(one for one in self._waiting if one.finished is None)

    def _schedule(self, at: float) -> int:
        """Fill the batch; return the number of tokens it computes."""
        budget = self.settings.token_budget
        self._batch = []
        preemptions = self.stats.preemptions
        running, index = self._running, 0
        while index < len(running) and budget:
            sequence = running[index]
            chunk = min(sequence.prompt_tokens + sequence.produced - sequence.computed, budget)
            if not self._make_room(sequence, chunk):
                break
            budget -= self._put_in_batch(sequence, chunk)
            index += 1
        lacking: list[Sequence] = []
        while self._waiting and budget and preemptions == self.stats.preemptions:
            if self._lacks_adapter_slot(self._waiting[0]):
                lacking.append(self._waiting.popleft())
                continue
            if len(running) >= self.settings.max_num_seqs or not self._admit(self._waiting[0], budget, at):
                break
            sequence = self._waiting.popleft()
            running.append(sequence)
            budget -= self._put_in_batch(sequence, min(sequence.known - sequence.computed, budget))
        self.stats.deferred = len(lacking)
        self._waiting.extendleft(reversed(lacking))
        return self.settings.token_budget - budget

    def _lacks_adapter_slot(self, sequence: Sequence) -> bool:
        """Whether all places for adapters are taken by others; later sequences may overtake such a one."""
        slots = self.settings.max_loras
        if not slots or not sequence.adapter:
            return False
        taken = {one.adapter for one in self._running} - {"", sequence.adapter}
        return len(taken) >= slots

    def _put_in_batch(self, sequence: Sequence, chunk: int) -> int:
        """Register the blocks that `chunk` more tokens fill; vLLM makes them findable within the same step."""
        full = (sequence.computed + chunk) // self.settings.block_size
        for number in range(sequence.registered, full):
            self.pool.register(sequence.blocks[number], sequence.hashes[number])
        if self._blocks is not None and full > sequence.registered:
            self._blocks.stored(sequence, sequence.registered, full)
        sequence.registered = max(sequence.registered, full)
        sequence.chunk = chunk
        self._batch.append(sequence)
        return chunk

    def _make_room(self, sequence: Sequence, chunk: int) -> bool:
        """Give a running sequence the blocks for `chunk` more tokens, preempting the newest while none is free.

        False when the sequence itself had to go.
        """
        missing = -(-(sequence.computed + chunk) // self.settings.block_size) - len(sequence.blocks)
        if missing <= 0:
            return True
        while missing > self.pool.free:
            newest = self._running.pop()
            self._release(newest)
            newest.computed = 0
            newest.preemptions += 1
            self.stats.preemptions += 1
            self._waiting.appendleft(newest)
            if newest is sequence:
                return False
        sequence.blocks += self.pool.take(missing)
        return True

    def _admit(self, sequence: Sequence, budget: int, at: float) -> bool:
        """Give a waiting sequence its cached prefix and room for a first chunk; False if it does not fit yet.

        At least the last token is always computed, so of n tokens at most floor((n - 1) / block) blocks hit.
        """
        size, known = self.settings.block_size, sequence.known
        hits = self.pool.lookup(sequence.hashes, (known - 1) // size)
        cached = len(hits) * size
        first = cached + min(known - cached, budget)
        must_fit = known if self.settings.reserve_full_prompt else first
        if -(-must_fit // size) - len(hits) + self.pool.idle(hits) > self.pool.free:
            return False
        self.pool.touch(hits)
        sequence.blocks = hits + self.pool.take(-(-first // size) - len(hits))
        sequence.computed, sequence.registered = cached, len(hits)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = cached
            sequence.admitted_at = at
            if self.settings.prefix_caching:
                self.stats.prefix_queries += known
                self.stats.prefix_hits += cached
        return True

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _end_step(self, end: float, changed: list[Sequence]) -> None:
        stats, began = self.stats, self._step_began
        steady = tokens = ended = 0
        for sequence in self._batch:
            sequence.computed += sequence.chunk
            if sequence.computed < sequence.prompt_tokens + sequence.produced:
                continue
            if sequence.answer_tokens:
                sequence.produced += 1
                tokens += 1
                if sequence.produced == 1:
                    self._note_first_token(sequence, end)
                elif sequence.last_token_at == began:
                    steady += 1
                else:
                    stats.token_gap.observe(end - sequence.last_token_at)
                sequence.last_token_at = end
            if sequence.produced == sequence.answer_tokens:
                self._finish(sequence, end)
                ended += 1
            elif not sequence.streamed:
                continue
            if not sequence.changed:
                sequence.changed = True
                changed.append(sequence)
        if steady:
            stats.token_gap.observe(end - began, steady)
        if ended:
            self._running = [one for one in self._running if one.finished is None]
        stats.generation_tokens += tokens
        stats.steps += 1
        stats.busy_s += end - began
        self._take_gauges(end)
        self._tell(began, end)

    def _tell(self, began: float, end: float) -> None:
        if self._blocks is not None:
            self._blocks.step_ended()
        if self.steps is not None:
            self.steps.stepped(self._batch, began, end)

    def _note_first_token(self, sequence: Sequence, at: float) -> None:
        sequence.first_token_at = at
        self.stats.first_token.observe(at - sequence.arrived_at)
        self.stats.prompt_tokens += sequence.prompt_tokens
        self.stats.prompt_tokens_cached += sequence.cached_tokens

    def _finish(self, sequence: Sequence, at: float) -> None:
        stats = self.stats
        if not sequence.answer_tokens:
            self._note_first_token(sequence, at)
        sequence.finished = sequence.end_reason
        sequence.finished_at = at
        self._release(sequence)
        stats.finished[sequence.end_reason] += 1
        stats.whole.observe(at - sequence.arrived_at)
        stats.queued.observe(sequence.admitted_at - sequence.arrived_at)
        stats.inference.observe(at - sequence.admitted_at)
        stats.prefill.observe(sequence.first_token_at - sequence.admitted_at)
        stats.decode.observe(at - sequence.first_token_at)
        stats.prompt_length.observe(sequence.prompt_tokens)
        stats.computed_length.observe(sequence.prompt_tokens - sequence.cached_tokens)
        stats.answer_length.observe(sequence.produced)
        stats.preempted.observe(sequence.preemptions)
        if sequence.produced > 1:
            stats.time_per_token.observe((at - sequence.first_token_at) / (sequence.produced - 1))

    def _take_gauges(self, at: float) -> None:
        stats = self.stats
        stats.running = len(self._running)
        stats.waiting = len(self._waiting)
        stats.cache_usage = self.pool.usage
        if self.counts_adapters:
            live = dict.fromkeys(one.adapter for one in (*self._running, *self._waiting) if one.adapter)
            stats.adapters[",".join(live)] = at
