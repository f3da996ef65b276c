"""Wall time to engine time: wakes an engine core when its step ends and passes on what came of it."""

import asyncio
import math
from collections.abc import Callable, Iterable

from extproc.sim.engine import Engine
from extproc.sim.sequence import Sequence

TIMER_S = 0.001
"""Resolution of the event loops' timers (libuv and epoll both count in milliseconds)."""

Schedule = Callable[[float, Callable[[], None]], asyncio.Handle]
"""`loop.call_later`, or its like in tests: wall seconds from now, what to call."""


class Pacer:
    """Runs one engine at `factor` engine seconds in a wall second.

    Steps begin and end at exact engine times however late the process wakes: a late wake runs all steps that
    are over, so order, hits and engine-time latencies do not depend on the machine or on the factor. Only the
    moment at which tokens go out is late, by up to one timer tick (1 ms of wall time).
    """

    def __init__(self, engine: Engine, clock: Callable[[], float], schedule: Schedule, factor: float = 1.0) -> None:
        self.engine = engine
        self._clock = clock
        self._schedule = schedule
        self._factor = factor
        self._origin = clock()
        self._frozen_at: float | None = None
        self._delivering_at: float | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_for = -1.0

    def now(self) -> float:
        """Return the engine's time in seconds since it started; stands still while frozen."""
        if self._frozen_at is not None:
            return self._frozen_at
        return (self._clock() - self._origin) * self._factor

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Hand `sequences`, the choices of one request, to the engine now; their listener hears of tokens."""
        now = self._catch_up()
        self.engine.submit(sequences, now)
        self._arm(now)

    def abort(self, sequence: Sequence) -> None:
        """Drop `sequence`; its listener hears no more of it."""
        sequence.listener = None
        now = self._catch_up()
        self.engine.abort(sequence, now)
        self._arm(now)

    def drop_all(self) -> None:
        """End every sequence as "abort" now, in mid-step if need be; their listeners are told."""
        now = self._catch_up()
        self.stop()
        for sequence in self.engine.drop_all(now):
            if sequence.listener is not None:
                sequence.listener.progress(sequence)

    def freeze(self) -> None:
        """Stop engine time: steps end no more, requests are accepted and hang."""
        if self._frozen_at is None:
            self._frozen_at = self._catch_up()
            self.stop()

    def thaw(self) -> None:
        """Let engine time go on from where it stood."""
        if self._frozen_at is not None:
            self._origin = self._clock() - self._frozen_at / self._factor
            self._frozen_at = None
            self._arm(self.now())

    def stop(self) -> None:
        """Cancel the timer; nothing happens any more unless something is submitted."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_for = None, -1.0

    def _catch_up(self) -> float:
        if self._delivering_at is not None:
            return self._delivering_at  # a listener aborts while it is being told: no news within news
        now = self.now()
        event = self.engine.next_event
        if event is not None and event <= now and self._frozen_at is None:
            self._delivering_at = now
            for sequence in self.engine.advance(now):
                if sequence.listener is not None:
                    sequence.listener.progress(sequence)
            self._delivering_at = None
        return now

    def _wake(self) -> None:
        self._timer, self._timer_for = None, -1.0
        self._arm(self._catch_up())

    def _arm(self, now: float) -> None:
        event = self.engine.next_event
        if event is None or event == self._timer_for or self._frozen_at is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        # uvloop rounds a delay to the nearest millisecond; waking early would spin until the step is over.
        ticks = max(1, math.ceil((event - now) / self._factor / TIMER_S))
        self._timer_for = event
        self._timer = self._schedule(ticks * TIMER_S, self._wake)
