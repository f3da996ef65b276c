"""What was measured of the present step of a rollout: each worker says it of its own requests, and the sum counts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from extproc.rollout import histogram, repeats
from extproc.rollout.groups import EventGroups, EventSums, RankGroups
from extproc.rollout.histogram import Histograms
from extproc.rollout.kinds import Measure, by_measure, rates
from extproc.rollout.repeats import UNITS, Repeats, Seen
from extproc.rollout.state import Rollout

WINDOWS: Final = 16
"""Windows of time that bets are kept apart by, so that a canary that was good for long can still fail soon."""
FORM: Final = 1
"""Number of the form of the bytes: parts of another one are left out."""
_EVEN: Final = 8
_LONGER: Final = 1.25
_SHORTEST_S: Final = 80.0
_BANDS: Final = 12
_BAND_TOKENS: Final = 128.0
"""Prompts of up to so many uncached tokens are one stratum, and those of each doubling another one."""
_MOST: Final = 1e9
"""Bounds what one part may say."""
_Count = Annotated[int, Meta(ge=0, le=1 << 48)]
_Log = Annotated[float, Meta(ge=-_MOST, le=_MOST)]
_Two = Annotated[list[_Count], Meta(min_length=2, max_length=2)]
_Four = Annotated[list[_Count], Meta(min_length=4, max_length=4)]
_T = TypeVar("_T")
_N = TypeVar("_N", int, float)


class Evidence(msgspec.Struct, array_like=True, kw_only=True):
    """What one worker or many measured of one epoch.

    Attributes:
        form: see `FORM`.
        parts: workers that it is of.
        unread: parts that were left out, as they cannot be read.
        answers: answers of the canary and of the baseline.
        logs: by gate and window: natural logs of what each bet won.
        risks: by rate: answers of the canary at risk, those with an event, and the same of the baseline.
        exposed: by rate and window: units of the canary at risk, those with an event.
        others: by rate: units of the baseline at risk, those with an event.
        values: by measure: histograms of the canary and of the baseline.
        counted: by rate and measure: how often single units count.
    """

    form: Annotated[int, Meta(ge=FORM, le=FORM)] = FORM
    parts: _Count = 0
    unread: _Count = 0
    answers: _Two = msgspec.field(default_factory=lambda: [0, 0])
    logs: dict[str, Annotated[list[list[_Log]], Meta(max_length=WINDOWS)]] = {}
    risks: dict[str, _Four] = {}
    exposed: dict[str, Annotated[list[_Two], Meta(max_length=WINDOWS)]] = {}
    others: dict[str, _Two] = {}
    values: dict[str, Histograms] = {}
    counted: dict[str, Repeats] = {}


_pack = msgspec.msgpack.Encoder().encode
_read = msgspec.msgpack.Decoder(Evidence).decode


def encode(evidence: Evidence) -> bytes:
    """Evidence as bytes of the store."""
    return _pack(evidence)


def merge(parts: Iterable[bytes]) -> Evidence:
    """The sum of what workers published. A part that cannot be read is left out and counted."""
    return reduce(combined, map(_part, parts), Evidence())


def _part(payload: bytes) -> Evidence:
    try:
        part = _read(payload)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return Evidence(unread=1)
    numbers = (log for windows in part.logs.values() for bets in windows for log in bets)
    # A bound compares, and no comparison finds what is not a number.
    return part if all(map(math.isfinite, numbers)) else Evidence(unread=1)


def combined(one: Evidence, other: Evidence) -> Evidence:
    """The sum of both; which comes first does not matter."""
    return Evidence(
        parts=one.parts + other.parts,
        unread=one.unread + other.unread,
        answers=_added(one.answers, other.answers),
        logs=_by_name(one.logs, other.logs, _added_windows),
        risks=_by_name(one.risks, other.risks, _added),
        exposed=_by_name(one.exposed, other.exposed, _added_windows),
        others=_by_name(one.others, other.others, _added),
        values=_by_name(one.values, other.values, _added_histograms),
        counted=_by_name(one.counted, other.counted, repeats.combined),
    )


def _by_name(one: Mapping[str, _T], other: Mapping[str, _T], add: Callable[[_T, _T], _T]) -> dict[str, _T]:
    return {**one, **other, **{name: add(one[name], other[name]) for name in one.keys() & other.keys()}}


def _added(one: Sequence[_N], other: Sequence[_N]) -> list[_N]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def _added_windows(one: Sequence[Sequence[_N]], other: Sequence[Sequence[_N]]) -> list[list[_N]]:
    return [_added(a, b) for a, b in zip_longest(one, other, fillvalue=())]


def _added_histograms(one: Histograms, other: Histograms) -> Histograms:
    return histogram.combined(one[0], other[0]), histogram.combined(one[1], other[1])


class Sample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One finished request of the present epoch, whose version was chosen by chance: no tester's.

    Attributes:
        version: version that served it.
        unit: what the version was chosen for, a session as a rule, as a number of [0, 1): `Choice.unit`.
        uncached_tokens: prompt tokens to prefill, as the decision expected: what the engine tells itself is an outcome
            of the version. -1 when unknown.
        streamed: whether the answer was a stream.
        ttft_s: seconds to the first token of a streamed answer; -1 without.
        tpot_s: seconds of each token after the first; -1 without.
        output_tokens: tokens of the answer; -1 when unknown.
        duration_s: seconds that the request took, from which its beginning is known.
        answered: the version began a good answer.
        failed: the version failed it: 5xx, a broken connection, a time limit.
        abandoned: the client left before the end.
        broken: a good answer that was empty or cut.
        continued: the conversation had begun before this request. Units that are first seen so are not compared:
            conversations from before a step stay where they were, so only those that begin in it are divided by chance.
    """

    version: str
    unit: float
    uncached_tokens: float
    streamed: bool
    ttft_s: float = -1.0
    tpot_s: float = -1.0
    output_tokens: float = -1.0
    duration_s: float = 0.0
    answered: bool
    failed: bool
    abandoned: bool
    broken: bool
    continued: bool = False


class Recorder:
    """What one worker measured of one epoch. It lasts as long as the epoch: a pause does not begin another one."""

    def __init__(self, rollout: Rollout) -> None:
        """Begins with nothing; the epoch is that of `rollout`."""
        self.epoch = rollout.epoch
        plan = rollout.plan
        self._canary = rollout.canary
        self._others = frozenset(name for name, weight in rollout.base.items() if weight > 0.0) - {rollout.canary}
        self._entered = rollout.entered
        self._settled = rollout.entered + plan.settle_s
        self._even_s = max(_SHORTEST_S, plan.hold_s) / _EVEN
        self._measured = by_measure(plan.gates)
        self._fresh, self._older = Seen(), Seen()
        self._ranked = {measure: Seen() for measure in self._measured}
        self._groups: dict[tuple[str, int], list[RankGroups]] = {}
        self._told = told = Evidence(parts=1)
        self._events: dict[str, EventGroups] = {}
        for name in rates(plan.gates):
            told.risks[name] = [0, 0, 0, 0]
            told.others[name], told.exposed[name], told.counted[name] = [0, 0], [], Repeats()
            sums = EventSums(told.exposed[name], told.others[name], told.counted[name])
            self._events[name] = EventGroups(name, rollout.share, sums, self._won)
        for measure in self._measured:
            told.values[measure], told.counted[measure] = ({}, {}), Repeats()

    def add(self, sample: Sample, now_s: float) -> None:
        """Count one request that ended at `now_s`, in seconds of the store's clock."""
        canary = sample.version == self._canary
        answered, failed, abandoned = sample.answered, sample.failed, sample.abandoned
        if not (canary or sample.version in self._others) or not (answered or failed or abandoned):
            return
        unit = int(sample.unit * UNITS)
        if not self._began_here(unit, sample.continued) or now_s - sample.duration_s < self._settled:
            return
        self._told.answers[not canary] += 1
        window = self._window(now_s)
        self._risk("errors", unit, canary, failed, (window, now_s))
        if not failed:
            self._risk("abandons", unit, canary, abandoned, (window, now_s))
            if not abandoned:
                self._risk("broken", unit, canary, sample.broken, (window, now_s))
        if not answered:
            return
        if sample.streamed and sample.ttft_s >= 0.0:
            self._rank("ttft", _band(sample.uncached_tokens), unit, sample.ttft_s, canary, window)
        if sample.tpot_s >= 0.0:
            self._rank("tpot", 0, unit, sample.tpot_s, canary, window)
        if sample.output_tokens >= 0.0 and not (failed or abandoned or sample.broken):
            self._rank("length", 0, unit, sample.output_tokens, canary, window)

    def encode(self) -> bytes:
        """All that was counted so far, a few KiB: who publishes it again loses nothing of before."""
        return encode(self._told)

    def _began_here(self, unit: int, continued: bool) -> bool:
        """Whether a unit began in this epoch, as far as this worker saw."""
        if unit in self._fresh:
            return True
        if continued or unit in self._older:
            self._older.add(unit)
            return False
        self._fresh.add(unit)
        return True

    def _window(self, now_s: float) -> int:
        """Number of the present window: eight even ones in the hold time, then each longer than the one before."""
        at = (now_s - self._entered) / self._even_s
        if at < _EVEN:
            return max(0, int(at))
        return min(WINDOWS - 1, _EVEN + int(math.log(at / _EVEN) / math.log(_LONGER)))

    def _risk(self, name: str, unit: int, canary: bool, event: bool, at: tuple[int, float]) -> None:
        groups = self._events.get(name)
        if groups is None:
            return
        risks, side = self._told.risks[name], 0 if canary else 2
        risks[side] += 1
        risks[side + 1] += event
        groups.add(unit, canary, event, at)

    def _rank(self, measure: Measure, stratum: int, unit: int, value: float, canary: bool, window: int) -> None:
        alike = self._measured.get(measure)
        if alike is None:
            return
        counts, bucket = self._told.values[measure][not canary], histogram.bucket(value)
        counts[bucket] = counts.get(bucket, 0) + 1
        seen, key = self._ranked[measure], unit + UNITS * (stratum + 1)
        if key in seen:
            return
        seen.add(key)
        self._told.counted[measure].add(unit)
        groups = self._groups.get((measure, stratum))
        if groups is None:
            groups = [RankGroups(gates, size, self._won) for size, gates in alike.items()]
            self._groups[measure, stratum] = groups
        for each in groups:
            each.add(value, canary, window)

    def _won(self, name: str, window: int, logs: Sequence[float]) -> None:
        windows = self._told.logs.setdefault(name, [])
        while len(windows) <= window:
            windows.append([0.0] * len(logs))
        windows[window] = _added(windows[window], logs)


def _band(uncached_tokens: float) -> int:
    """Stratum of a prompt; of one whose length nobody knows, or that is no number, a stratum of its own."""
    if not 0.0 <= uncached_tokens < math.inf:
        return -1
    return min(_BANDS, math.ceil(math.log2(max(uncached_tokens, _BAND_TOKENS) / _BAND_TOKENS)))
