"""The engine core for replay does what the exact one does, event for event, in far fewer events."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.sim.engine import Engine
from extproc.sim.sequence import Sequence
from extproc.sim.settings import EngineSettings
from extproc.sim.virtual import VirtualEngine

TICK = 2.0**-12
DYADIC = EngineSettings(blocks=2001, step_s=2.0**-7, per_seq_s=TICK, prefill_tokens_per_s=2.0**14)
"""Every time that comes of these is a sum of powers of two and exact, so events that coincide do so in both engines."""
UNEVEN = replace(DYADIC, step_s=0.00613, per_seq_s=0.000137, prefill_tokens_per_s=19_731.0)
UNEVEN_TICK = 0.000_271_828_182_8


class Reference(Engine):
    """The exact engine, for sequences of which not every block's hash is known too."""

    def _put_in_batch(self, sequence: Sequence, chunk: int) -> int:
        computed = sequence.computed
        last = len(sequence.hashes) * self.settings.block_size
        sequence.computed = min(computed, last - chunk)  # registers no block past the last known hash
        super()._put_in_batch(sequence, chunk)
        sequence.computed = computed
        return chunk


@dataclass(frozen=True)
class Row:
    """One request of a random workload."""

    gap: int
    family: int
    shared: int
    known: int
    prompt: int
    answer: int

    def sequence(self, number: int, block_size: int) -> Sequence:
        """The request as a sequence.

        Its first `shared` blocks are those of the family, the others its own; `known` of them have a hash.
        """
        blocks = min((self.prompt + self.answer) // block_size, self.known)
        own = 1_000_000 * (number + 1)
        hashes = [1000 * (self.family + 1) + n if n < self.shared else own + n for n in range(blocks)]
        return Sequence(self.prompt, self.answer, hashes)


ROWS = st.lists(
    st.builds(
        Row,
        gap=st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 900)),
        family=st.integers(0, 2),
        shared=st.integers(0, 60),
        known=st.one_of(st.just(9999), st.integers(0, 30)),
        prompt=st.integers(1, 70),
        answer=st.one_of(st.integers(0, 3), st.integers(0, 90)),
    ),
    min_size=1,
    max_size=25,
)
SETTINGS: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    blocks=st.one_of(st.integers(2, 30), st.integers(10, 120), st.just(4000)),
    block_size=st.sampled_from([1, 2, 4, 16]),
    token_budget=st.one_of(st.integers(1, 12), st.integers(8, 64), st.just(2048)),
    max_num_seqs=st.one_of(st.integers(1, 4), st.just(256)),
    prefix_caching=st.sampled_from([True, True, True, False]),
    reserve_full_prompt=st.booleans(),
)


class Pair:
    """One workload on both engines."""

    def __init__(self, knobs: EngineSettings, tolerance: float) -> None:
        self.exact, self.virtual = Reference(knobs), VirtualEngine(knobs)
        self.ones: list[tuple[Sequence, Sequence]] = []
        self.tolerance = tolerance
        self.first: set[int] = set()

    def submit(self, rows: Items[tuple[int, Row]], now: float) -> None:
        """Give both engines the same sequences."""
        size = self.exact.settings.block_size
        fresh = [(row.sequence(number, size), row.sequence(number, size)) for number, row in rows]
        self.ones += fresh
        self.exact.submit([one for one, _ in fresh], now)
        self.virtual.submit([two for _, two in fresh], now)

    def advance(self, now: float) -> None:
        """Run both engines to `now`: the same sequences have news, in the same order."""
        news: list[Sequence] = []
        while self.exact.next_event is not None and self.exact.next_event <= now:
            for one in self.exact.advance(self.exact.next_event):
                if one.finished is None and id(one) in self.first:
                    continue
                self.first.add(id(one))
                if one not in news:
                    news.append(one)
        twins = [two for _, two in self.ones]
        partner = {id(one): number for number, (one, _) in enumerate(self.ones)}
        assert [twins.index(two) for two in self.virtual.advance(now)] == [partner[id(one)] for one in news]

    def compare(self) -> None:
        """Whatever can be read between two events is the same."""
        exact, virtual = self.exact, self.virtual
        stats = exact.stats
        assert (virtual.next_event is None) == (exact.next_event is None)
        assert virtual.busy_s == pytest.approx(stats.busy_s, rel=self.tolerance, abs=0)
        assert (virtual.running, virtual.waiting) == (stats.running, stats.waiting)
        assert virtual.cache_usage == stats.cache_usage
        assert virtual.preemptions == stats.preemptions
        assert virtual.prefilled_tokens == stats.prompt_tokens - stats.prompt_tokens_cached
        size = exact.settings.block_size
        for one, two in self.ones:
            hits = len(exact.pool.lookup(one.hashes, (one.prompt_tokens - 1) // size))
            assert virtual.cached_tokens(two.hashes, two.prompt_tokens) == hits * size

    def compare_fates(self) -> None:
        """Each sequence fared the same on both."""
        for one, two in self.ones:
            assert two.finished == one.finished == "length"
            assert (two.cached_tokens, two.preemptions, two.produced) == (
                one.cached_tokens,
                one.preemptions,
                one.produced,
            )
            for name in ("arrived_at", "admitted_at", "first_token_at", "finished_at"):
                assert getattr(two, name) == pytest.approx(getattr(one, name), rel=self.tolerance, abs=0), name
        assert self.virtual.pool.free == self.virtual.pool.usable


def replay(knobs: EngineSettings, rows: list[Row], tick: float, tolerance: float, *, look: bool) -> None:
    """Run `rows` on both engines, looking at them at every arrival or only at the end."""
    pair = Pair(knobs, tolerance)
    fitting = [(n, row) for n, row in enumerate(rows) if row.prompt + row.answer <= knobs.capacity_tokens]
    ticks = 0
    for number, row in fitting:
        ticks += row.gap
        pair.advance(ticks * tick)
        if look:
            pair.compare()
        pair.submit([(number, row)], ticks * tick)
    while pair.exact.next_event is not None:
        pair.advance(pair.exact.next_event + (0.0 if tick == TICK else 1e-9))
        if look:
            pair.compare()
    pair.compare()
    pair.compare_fates()


@settings(deadline=None, max_examples=300)
@given(SETTINGS, ROWS, st.booleans())
def test_every_event_is_that_of_the_exact_engine(knobs: dict[str, Any], rows: list[Row], look: bool) -> None:
    """Small and large caches, shared prefixes, bursts, pooling, long prompts: equal to the bit where times are exact.

    Times are powers of two, so arrivals that fall together with the end of a step are among the examples.
    """
    replay(replace(DYADIC, **knobs), rows, TICK, 0.0, look=look)


@settings(deadline=None, max_examples=100)
@given(SETTINGS, ROWS, st.booleans())
def test_times_that_round_agree_to_rounding(knobs: dict[str, Any], rows: list[Row], look: bool) -> None:
    """With any step lengths, times agree to 1e-9, and who hits, waits and is preempted is the same."""
    replay(replace(UNEVEN, **knobs), rows, UNEVEN_TICK, 1e-9, look=look)
