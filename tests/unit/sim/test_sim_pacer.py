"""Wall time to engine time: the factor changes when things happen on the wall, and nothing else."""

import asyncio
import heapq
import random
from collections.abc import Callable

import pytest

from extproc.clock import ManualClock
from extproc.sim.engine import Engine
from extproc.sim.pacer import Pacer
from extproc.sim.sequence import Sequence
from extproc.sim.settings import EngineSettings
from extproc.sim.tokens import block_hashes

SMALL = EngineSettings(blocks=200, token_budget=512)


class Timers:
    """An event loop's timers over a manual clock; each may come late."""

    def __init__(self, lateness: random.Random | None = None) -> None:
        self.clock = ManualClock(0.0)
        self._due: list[tuple[float, int, asyncio.Handle]] = []
        self._count = 0
        self._lateness = lateness
        self._loop = asyncio.new_event_loop()
        self._loop.close()

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.Handle:
        """Call back `delay` seconds from now, or a little later."""
        handle = asyncio.Handle(callback, (), self._loop)
        late = self._lateness.random() * 0.05 if self._lateness else 0.0
        self._count += 1
        heapq.heappush(self._due, (self.clock.now + delay + late, self._count, handle))
        return handle

    def run_until(self, when: float) -> None:
        """Let time pass until `when`, calling what is due."""
        while self._due and self._due[0][0] <= when:
            due, _, handle = heapq.heappop(self._due)
            if not handle.cancelled():
                self.clock.now = max(self.clock.now, due)
                handle._run()
        self.clock.now = when

    def run_out(self) -> None:
        """Let time pass until nothing is due any more."""
        while self._due:
            self.run_until(max(self._due[0][0], self.clock.now))


class Note:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, str | None]] = []

    def progress(self, sequence: Sequence) -> None:
        """Write it down."""
        self.heard.append((sequence.produced, sequence.finished))


def outcome(factor: float, lateness: random.Random | None = None) -> list[tuple[float, float, float, int]]:
    """Run one busy workload at `factor`; return each sequence's engine times and cached tokens."""
    timers = Timers(lateness)
    engine = Engine(SMALL)
    pacer = Pacer(engine, timers.clock.monotonic, timers.call_later, factor)
    rng = random.Random(7)
    ones: list[Sequence] = []
    arrival = 0.0
    for _ in range(120):
        arrival += rng.randrange(1, 64) / 1024  # dyadic, so that engine times are the same numbers at any factor
        prompt, said = rng.randrange(16, 900), rng.randrange(1, 40)
        hashes = block_hashes(rng.randrange(4).to_bytes(4, "little") * (prompt + said), 16)
        timers.run_until(arrival / factor)
        ones.append(Sequence(prompt, said, hashes, listener=Note()))
        pacer.submit(ones[-1:])
    timers.run_out()
    return [(one.admitted_at, one.first_token_at, one.finished_at, one.cached_tokens) for one in ones]


def test_engine_time_results_do_not_depend_on_the_factor() -> None:
    """Ten times faster on the wall (8 and 0.5 too): the same times, order and hits, to the last bit."""
    assert outcome(1.0) == outcome(8.0) == outcome(0.5)
    assert len({cached for *_, cached in outcome(1.0)}) > 1


def test_engine_time_results_do_not_depend_on_late_timers() -> None:
    """A process that wakes up to 50 ms late catches up on the exact steps."""
    assert outcome(1.0, random.Random(3)) == outcome(1.0)


def test_ten_times_as_fast() -> None:
    """A factor that is no power of two rounds in the last digits only."""
    for slow, fast in zip(outcome(1.0), outcome(10.0), strict=True):
        assert fast == pytest.approx(slow, abs=1e-6)


def busy_pacer() -> tuple[Timers, Pacer, Sequence, Note]:
    """Return an engine that has just been given a sequence of 100 + 5 tokens."""
    timers = Timers()
    pacer = Pacer(Engine(SMALL), timers.clock.monotonic, timers.call_later)
    note = Note()
    one = Sequence(100, 5, block_hashes(b"abcd" * 105, 16), listener=note)
    pacer.submit([one])
    return timers, pacer, one, note


def test_tokens_of_one_wake_come_together() -> None:
    """A late wake tells a listener once, of all that happened."""
    timers, pacer, _, note = busy_pacer()
    timers.clock.now = 1.0
    pacer.submit([])
    assert note.heard == [(5, "length")]


def test_a_frozen_engine_hangs_and_goes_on_where_it_stood() -> None:
    """Engine time stands still; nothing is lost."""
    timers, pacer, one, note = busy_pacer()
    pacer.freeze()
    timers.run_until(100.0)
    assert note.heard == []
    stood_at = pacer.now()
    pacer.thaw()
    assert pacer.now() == pytest.approx(stood_at)
    timers.run_out()
    assert note.heard[-1] == (5, "length")
    assert one.finished_at < 1.0


def test_an_idle_engine_sets_no_timer() -> None:
    """No work a step when there is none."""
    timers, pacer, one, _ = busy_pacer()
    timers.run_out()
    assert one.finished == "length"
    assert pacer.engine.next_event is None
    assert not timers._due


def test_a_listener_may_abort_while_it_is_told() -> None:
    """It hears no more, and others hear everything once, even if steps ended while news was passed on."""
    timers = Timers()
    pacer = Pacer(Engine(SMALL), timers.clock.monotonic, timers.call_later)
    other = Note()

    class Leaver:
        heard = 0

        def progress(self, sequence: Sequence) -> None:
            """Leave at the first news, but slowly."""
            self.heard += 1
            timers.clock.advance(0.05)
            pacer.abort(sequence)

    leaver = Leaver()
    hashes = block_hashes(b"abcd" * 30, 16)
    pacer.submit([Sequence(20, 10, hashes, listener=leaver), Sequence(20, 10, hashes, listener=other)])
    timers.run_out()
    assert leaver.heard == 1
    produced = [tokens for tokens, _ in other.heard]
    assert produced == sorted(set(produced))
    assert [reason for _, reason in other.heard if reason] == ["length"]
    assert other.heard[-1] == (10, "length")
    assert pacer.engine.pool.free == pacer.engine.pool.usable
