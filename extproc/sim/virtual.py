"""The engine core for replay: what `Engine` does, event for event, at a cost that does not grow with decode steps.

`Engine` touches every sequence in every step, which a server that streams tokens must do anyway. A replay wants
first tokens and ends only, so here

- steps in which nobody prefills and nobody can be admitted form one *run*: all are equally long, and the engine
  jumps to the run's end, which is the earliest finish or the step that may find no free block. An arrival cuts
  the run at the end of the step in progress;
- a decoding sequence is not touched while it decodes: see `DecodingSet`. Blocks that are filled and taken within
  a run are caught up with when the run ends or somebody looks at the cache.

Every sequence in the running batch gets at least one token a step (it was admitted because budget was left over),
and at most one, the newest, is in the midst of its prefill. Both follow from `Engine`'s rules, and the above rests
on them.

What differs from `Engine`:

- Times are `began + steps x length` instead of a sum, so they agree to rounding errors. An arrival that falls on a
  step's end to within such an error may be seen one step earlier or later: on eight engines that concerned 16 of the
  first 3,000 rows of Mooncake's conversation trace, whose arrivals are whole milliseconds.
- There is no abort, no slowdown, and no statistics beyond those below.
- A sequence that could never fit is refused, where `Engine` would let it wait for ever.
- Blocks for which a sequence brings no hash are never registered. Those with a hash, generated ones included, are
  registered as they fill, as in `Engine`.
- Hashes must be chained, as `tokens.block_hashes` makes them: one hash never stands at two places.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import chain, islice, takewhile

from extproc.sim.blocks import BlockPool
from extproc.sim.decoding import DecodingSet
from extproc.sim.sequence import Sequence
from extproc.sim.settings import EngineSettings


class VirtualEngine:
    """Scheduler and cache of one engine. Callers pass the time, in engine seconds, and never go back.

    What is read between calls (gauges, `busy_s`, the cache) is as of the last `advance`. `produced` of a sequence
    is right when it gets its first token, when it is preempted and when it has finished, not in between.

    Attributes:
        next_event: when something may change by itself next: the end of a run of steps; None while idle.
        preemptions: times a sequence had to give its blocks back.
        submitted: sequences that were ever submitted.
        prefilled_tokens: prompt tokens computed, those found in the cache left out; counted at the first token.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.blocks, caching=settings.prefix_caching)
        self.next_event: float | None = None
        self.preemptions = 0
        self.submitted = 0
        self.prefilled_tokens = 0.0
        self._arrivals: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []  # those with a chunk in the step in progress, in order of admission
        self._decoding = DecodingSet(self.pool, settings.block_size, caching=settings.prefix_caching)
        self._now = 0.0
        # The run in progress: its first step's number, how many steps, when it began, the length of one step, and
        # how many of its steps the pool and the gauges know to be over.
        self._first, self._steps, self._began, self._length, self._seen = 0, 0, 0.0, 0.0, 0
        self._busy_s = 0.0
        self._gauges = (0, 0, 0.0)

    @property
    def busy_s(self) -> float:
        """Seconds of all steps that are over."""
        return self._busy_s + self._catch_up() * self._length

    @property
    def running(self) -> int:
        """Sequences in the running batch, as of the end of the last step."""
        self._catch_up()
        return self._gauges[0]

    @property
    def waiting(self) -> int:
        """Sequences that wait for admission, as of the end of the last step; later arrivals are not seen yet."""
        self._catch_up()
        return self._gauges[1]

    @property
    def cache_usage(self) -> float:
        """Share of the cache's blocks that sequences held at the end of the last step, 0 to 1."""
        self._catch_up()
        return self._gauges[2]

    def submit(self, sequences: Iterable[Sequence], now: float) -> None:
        """Accept `sequences` at `now`; `advance(now)` was called before. An idle engine starts a step at once.

        Raises:
            ValueError: a sequence is empty or longer than the whole cache.
        """
        self._now = now
        capacity = self.settings.capacity_tokens
        for sequence in sequences:
            if not 0 < sequence.prompt_tokens <= capacity - sequence.answer_tokens:
                raise ValueError(
                    f"a prompt of {sequence.prompt_tokens} tokens with an answer of {sequence.answer_tokens} does not "
                    f"fit: a prompt has at least 1 token, and the cache holds {capacity}; raise blocks or leave it out"
                )
            sequence.arrived_at = now
            self._arrivals.append(sequence)
            self.submitted += 1
        if self.next_event is None:
            self._begin_run(now)
        elif self._steps > 1:
            self._steps = self._steps_over() + 1
            self.next_event = self._began + self._steps * self._length

    def advance(self, now: float) -> list[Sequence]:
        """Run every step that ends by `now`.

        Returns:
            The sequences that got their first token or finished, in the order of that; one that did both is
            listed once.
        """
        self._now = now
        if self.next_event is None or self.next_event > now:
            return []
        changed: list[Sequence] = []
        while self.next_event is not None and self.next_event <= now:
            end = self.next_event
            self._end_run(end, changed)
            self._begin_run(end)
        for sequence in changed:
            sequence.changed = False
        return changed

    def cached_tokens(self, hashes: Items[int], prompt_tokens: int) -> int:
        """Return how many tokens of such a prompt are in the cache: whole blocks, and never its last token."""
        self._catch_up()
        size = self.settings.block_size
        return len(self.pool.lookup(hashes, (prompt_tokens - 1) // size)) * size

    def step_left(self) -> float:
        """Return the seconds left of the step in progress; 0 while idle."""
        if self.next_event is None:
            return 0.0
        return self._began + (self._steps_over() + 1) * self._length - self._now

    def steps_to_room(self, blocks: int) -> int:
        """Return after how many steps, the one in progress not counted, so many blocks are free.

        Counts on decoding sequences to end as planned and to need no further blocks, on nobody else to take any, and
        on no preemption. If all ends together do not free so many, the last one counts.
        """
        self._catch_up()
        return self._decoding.steps_to_free(blocks - self.pool.free, self._first + self._seen)

    def decoding_next(self) -> int:
        """Return how many sequences get a token in the step after the one in progress, those waiting left out."""
        going = self._decoding.alive_after(self._first + self._steps_over())
        for one in self._prefilling:
            going += one.computed + one.chunk >= one.known and one.answer_tokens > 1
        return going

    def newest(self, count: int) -> list[Sequence]:
        """Return the last `count` sequences that came, in order, without those that were ever admitted."""
        backwards = chain(reversed(self._arrivals), reversed(self._waiting))
        return [one for one in islice(backwards, count) if one.cached_tokens < 0][::-1]

    def begun(self) -> list[Sequence]:
        """Return who was admitted and prefills after the step in progress: in its midst, or preempted; in order."""
        midst = [one for one in self._prefilling if one.computed + one.chunk < one.known]
        return midst + list(takewhile(lambda one: one.cached_tokens >= 0, self._waiting)) if self._waiting else midst

    # Runs: how they begin, how long they are, how they end.

    def _begin_run(self, at: float) -> None:
        if self._arrivals:
            self._waiting.extend(self._arrivals)
            self._arrivals.clear()
        settings = self.settings
        tokens, preempted = self._schedule(at)
        batch = len(self._decoding) + len(self._prefilling)
        self._began, self._seen = at, 0
        if not batch:
            self.next_event, self._steps = None, 0
            self._take_gauges()
            return
        self._length = max(settings.step_s + settings.per_seq_s * batch, tokens / settings.prefill_tokens_per_s)
        self._steps = 1
        if not self._prefilling and not preempted:
            self._steps = self._decoding.steps_alike(self._first, self._waiting[0] if self._waiting else None)
        self.next_event = at + self._steps * self._length

    def _end_run(self, end: float, changed: list[Sequence]) -> None:
        last = self._first + self._steps - 1
        self._busy_s += self._steps * self._length
        self._first = last + 1
        self._decoding.cross(last)
        for sequence in self._decoding.end(last):
            self._finish(sequence, end, changed)
        if self._prefilling:
            self._end_chunks(end, changed)
        self._take_gauges()

    def _steps_over(self) -> int:
        """Return how many steps of the run in progress are over; the last one never is, `advance` ends it."""
        if self._steps < 2:
            return 0
        over = int((self._now - self._began) / self._length)
        if self._began + over * self._length > self._now:
            over -= 1
        elif self._began + (over + 1) * self._length <= self._now:
            over += 1
        return min(over, self._steps - 1)

    def _catch_up(self) -> int:
        """Let pool and gauges know the steps of the run that are over, and the one in progress; return how many."""
        over = self._steps_over()
        if over > self._seen:
            self._seen = over
            self._decoding.cross(self._first + over - 1)
            self._take_gauges()
            self._decoding.cross(self._first + over)
        return over

    def _take_gauges(self) -> None:
        self._gauges = (len(self._decoding) + len(self._prefilling), len(self._waiting), self.pool.usage)

    # One step: who gets a part of the budget, and the blocks for it.

    def _schedule(self, at: float) -> tuple[int, bool]:
        """Fill the batch; return the number of tokens it computes and whether somebody was preempted."""
        preemptions = self.preemptions
        while not self._decoding.cross(self._first):
            self._preempt_newest()
        budget = left = self.settings.token_budget
        left -= len(self._decoding)
        if self._prefilling:
            left -= self._go_on(self._prefilling[0], left)
        if preemptions != self.preemptions:
            return budget - left, True
        places = self.settings.max_num_seqs - len(self._decoding) - len(self._prefilling)
        while self._waiting and left and places and self._admit(self._waiting[0], left, at):
            sequence = self._waiting.popleft()
            self._prefilling.append(sequence)
            left -= self._compute(sequence, min(sequence.known - sequence.computed, left))
            places -= 1
        return budget - left, False

    def _go_on(self, sequence: Sequence, budget: int) -> int:
        """Give the sequence in the midst of its prefill its next chunk; return the tokens, 0 if it had to go."""
        chunk = min(sequence.known - sequence.computed, budget)
        missing = -(-(sequence.computed + chunk) // self.settings.block_size) - len(sequence.blocks)
        if missing > self.pool.free:
            self._preempt_newest()
            return 0
        sequence.blocks += self.pool.take(missing)
        return self._compute(sequence, chunk)

    def _compute(self, sequence: Sequence, chunk: int) -> int:
        """Register the blocks that `chunk` more tokens fill, as far as their hashes are known."""
        full = min((sequence.computed + chunk) // self.settings.block_size, len(sequence.hashes))
        done = sequence.registered
        if full > done:
            self.pool.register_all(sequence.blocks[done:full], sequence.hashes[done:full])
            sequence.registered = full
        sequence.chunk = chunk
        return chunk

    def _admit(self, sequence: Sequence, budget: int, at: float) -> bool:
        """Give a waiting sequence its cached prefix and room for a first chunk; False if it does not fit yet."""
        size, known, pool = self.settings.block_size, sequence.known, self.pool
        hits = pool.lookup(sequence.hashes, (known - 1) // size)
        found = len(hits)
        cached = found * size
        first = min(known, cached + budget)
        must_fit = known if self.settings.reserve_full_prompt else first
        if -(-must_fit // size) - found + pool.idle(hits) > pool.free:
            return False
        pool.touch(hits)
        sequence.blocks = hits + pool.take(-(-first // size) - found)
        sequence.computed, sequence.registered = cached, found
        if sequence.cached_tokens < 0:
            sequence.cached_tokens, sequence.admitted_at = cached, at
        return True

    # What becomes of sequences: preempted, decoding, finished.

    def _preempt_newest(self) -> None:
        """Let the newest sequence give its blocks back, to be computed again later."""
        newest = self._prefilling.pop() if self._prefilling else self._decoding.remove_newest(self._first)
        self.pool.release(newest.blocks)
        newest.blocks = []
        newest.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(newest)

    def _end_chunks(self, end: float, changed: list[Sequence]) -> None:
        """Count the chunks of the step that ends; who has no more to prefill gets a token."""
        unfinished: list[Sequence] = []
        for sequence in self._prefilling:
            sequence.computed += sequence.chunk
            if sequence.computed < sequence.known:
                unfinished.append(sequence)
                continue
            if sequence.answer_tokens:
                sequence.produced += 1
            if sequence.produced <= 1:
                self._note_first_token(sequence, end, changed)
            if sequence.produced == sequence.answer_tokens:
                self._finish(sequence, end, changed)
            else:
                self._decoding.begin(sequence, self._first)
        self._prefilling = unfinished

    def _note_first_token(self, sequence: Sequence, at: float, changed: list[Sequence]) -> None:
        sequence.first_token_at = at
        self.prefilled_tokens += sequence.prompt_tokens - sequence.cached_tokens
        sequence.changed = True
        changed.append(sequence)

    def _finish(self, sequence: Sequence, at: float, changed: list[Sequence]) -> None:
        sequence.finished = sequence.end_reason
        sequence.finished_at = at
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        if not sequence.changed:
            sequence.changed = True
            changed.append(sequence)
