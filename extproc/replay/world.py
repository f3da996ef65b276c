"""One replay: rows arrive, a chooser picks, virtual engines answer, all on one virtual clock and in one process.

Events at the same moment happen in a fixed order (engines, then access-log entries, scrapes, arrivals; those of one
kind as they were foreseen), so that a run is a function of its trace, its settings and nothing else.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from extproc.replay.rows import Row, Trace
from extproc.sim.sequence import Sequence as Job
from extproc.sim.virtual import VirtualEngine

_JUDGED = 4
_ENGINE, _LOG, _TICK, _ARRIVAL = range(4)
"""Kinds of events; those at one moment happen in this order."""
_SETTLES_S = 600.0
"""Idle time after which scrapes become rare: learnt rates have relaxed dozens of times by then, and at the usual
`profile_ttl_s` the last uses are on record, to be forgotten when their time is over."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The world around the decisions.

    Attributes:
        scrape_s: how often the engines' gauges are read.
        log_s: how long an access-log entry takes to come back.
    """

    scrape_s: float = 0.25
    log_s: float = 0.05


class Picked(msgspec.Struct, frozen=True, gc=False):
    """Where a row went and what was expected of it.

    Attributes:
        engine: index of the engine.
        token: whatever the chooser wants back when the row is over.
        cached_tokens: predicted; -1 when the chooser predicts nothing.
        ttft_ms: predicted; -1 when the chooser predicts nothing.
        moved: a session's pin was given up.
        precise: what the engine itself had told was what the prediction went by.
    """

    engine: int
    token: object = None
    cached_tokens: float = -1.0
    ttft_ms: float = -1.0
    moved: bool = False
    precise: bool = False


class Ended(msgspec.Struct, gc=False):
    """One row that was answered; times in seconds of the virtual clock.

    Attributes:
        row: the row.
        picked: the decision.
        jobs: its sequences on the engine, one for each answer.
        at_s: when it arrived.
        regret_ms: how much sooner another engine would have given the first token, as the truth stood then; None
            when nobody asked; one row in four is asked about, since looking at all engines costs a third of a decision.
    """

    row: Row
    picked: Picked
    jobs: Sequence[Job]
    at_s: float
    regret_ms: float | None

    @property
    def ttft_s(self) -> float:
        """Time to the first token of the first answer."""
        return min(job.first_token_at for job in self.jobs) - self.at_s

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine found cached for the first answer."""
        return max(0, self.jobs[0].cached_tokens)

    @property
    def finished_s(self) -> float:
        """When the last answer ended."""
        return max(job.finished_at for job in self.jobs)


class Chooser(Protocol):
    """Who picks an engine. Called with the time of the virtual clock, which the engines have reached too."""

    def choose(self, row: Row, now: float, /) -> Picked:
        """Pick an engine for a row that arrives now."""
        ...

    def settled(self, picked: Picked, now: float, /) -> None:
        """A row was answered: its stream ended."""
        ...

    def learn(self, ended: Ended, now: float, /) -> None:
        """The access log tells of an answered row."""
        ...

    def scrape(self, engines: Sequence[VirtualEngine], now: float, /) -> None:
        """The engines' gauges were read."""
        ...


class Result(msgspec.Struct):
    """What a replay came to.

    Attributes:
        ended: answered rows, in the order in which they ended.
        engines: the engines as they were left.
        refused: rows that no engine could take: longer than a whole cache.
        seconds: virtual time from the first arrival to the last token.
    """

    ended: list[Ended]
    engines: Sequence[VirtualEngine]
    refused: int
    seconds: float


Regret = Callable[[Row, int], float]
"""How many ms sooner the best engine would give the first token than the picked one, given (row, picked)."""


class World:
    """Runs one trace under one chooser."""

    def __init__(self, trace: Trace, settings: Settings, engines: Sequence[VirtualEngine], chooser: Chooser) -> None:
        """The engines are fresh and all alike."""
        self._rows = trace.rows
        self._settings = settings
        self._engines = engines
        self._chooser = chooser
        self._capacity = engines[0].settings.capacity_tokens
        self._events: list[tuple[float, int, int, Any]] = []
        self._number = 0
        self._followers: dict[int, list[int]] = {}
        self._open: dict[Job, tuple[int, Ended]] = {}
        self._ended: list[Ended] = []
        self._refused = 0
        self._left = len(trace.rows)
        self._last = 0.0

    def run(self, regret: Regret | None = None) -> Result:
        """Replay all rows to their ends; with `regret`, one decision in four is held against what the truth offered."""
        for index, row in enumerate(self._rows):
            if row.after < 0:
                self._push(row.at_s, _ARRIVAL, index)
            else:
                self._followers.setdefault(row.after, []).append(index)
        began = self._last = self._events[0][0] if self._events else 0.0
        self._push(began, _TICK, None)
        while self._left:
            now, kind, _, what = heapq.heappop(self._events)
            if kind == _ENGINE:
                self._advance(what, now)
            elif kind == _LOG:
                self._chooser.learn(what, now)
            elif kind == _TICK:
                self._tell_time(now)
                self._chooser.scrape(self._engines, now)
                self._push(self._next_scrape(now), _TICK, None)
            else:
                self._arrive(what, now, regret)
        return Result(self._ended, self._engines, self._refused, self._last - began)

    def _push(self, at: float, kind: int, what: object) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, kind, self._number, what))

    def _next_scrape(self, now: float) -> float:
        """When the gauges are read again: one interval from now; in a long idle time, some intervals at once.

        Gauges of idle engines stay as they are; what silence itself teaches has been learnt after the first minutes.
        From then on each pause is as long as the idle time before it, and the next arrival is not passed.
        """
        interval = self._settings.scrape_s
        idle_s = now - self._last
        if idle_s < _SETTLES_S or self._open or not self._events or self._events[0][1] != _ARRIVAL:
            return now + interval
        pause_s = min(idle_s, self._events[0][0] - now)
        return now + max(1, int(pause_s / interval)) * interval

    def _arrive(self, index: int, now: float, regret: Regret | None) -> None:
        row = self._rows[index]
        if row.prompt_tokens + row.output_tokens > self._capacity:
            self._refused += 1
            self._over(index, now)
            return
        self._tell_time(now)
        picked = self._chooser.choose(row, now)
        lost = regret(row, picked.engine) if regret and index % _JUDGED == 0 else None
        hashes = [*row.blocks, *row.answer_blocks] if row.answer_blocks else row.blocks
        jobs = [Job(row.prompt_tokens, row.output_tokens, hashes) for _ in range(row.n)]
        ended = Ended(row, picked, jobs, now, lost)
        self._open.update((job, (index, ended)) for job in jobs)
        self._engines[picked.engine].submit(jobs, now)
        self._wake(picked.engine)

    def _tell_time(self, now: float) -> None:
        """Let the engines know the time, so that they can be looked at. Whatever was due by now has happened."""
        for engine in self._engines:
            engine.advance(now)

    def _wake(self, which: int) -> None:
        at = self._engines[which].next_event
        if at is not None:
            self._push(at, _ENGINE, which)

    def _advance(self, which: int, now: float) -> None:
        engine = self._engines[which]
        # An arrival may have cut the run that this event stood for.
        if engine.next_event is not None and engine.next_event <= now:
            self._report(engine.advance(now), now)
            self._wake(which)

    def _report(self, changed: Sequence[Job], now: float) -> None:
        for job in changed:
            if job.finished is None:
                continue
            index, ended = self._open.pop(job)
            # Several answers may end in one step: the row is over with the last one that is reported.
            if any(one in self._open for one in ended.jobs):
                continue
            self._chooser.settled(ended.picked, now)
            self._ended.append(ended)
            self._last = now
            self._push(now + self._settings.log_s, _LOG, ended)
            self._over(index, now)

    def _over(self, index: int, now: float) -> None:
        """A row is over, and those that waited for it think about their next turn."""
        self._left -= 1
        for follower in self._followers.pop(index, ()):
            self._push(now + self._rows[follower].at_s, _ARRIVAL, follower)
