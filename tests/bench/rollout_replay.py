"""Rollouts on a virtual clock: what real versions answered, replayed in its order with versions drawn anew."""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from extproc.rollout.advance import advance, begin
from extproc.rollout.evidence import Recorder, Sample, merge
from extproc.rollout.gates import judge
from extproc.rollout.split import of_weights, share_of
from extproc.rollout.state import Plan, weights
from tests.acceptance.rollouts.people import Got
from tests.acceptance.rollouts.stand import MODEL, NEW, OLD

WORKERS = 2
LOOK_S = 1.0
"""Virtual seconds between two looks of the controller."""
LONGEST_S = 24 * 3600.0

Change = Callable[[Sample, random.Random], Sample]
"""What is wrong with an answer of the canary."""


class Went(msgspec.Struct, frozen=True):
    """How a rollout went.

    Attributes:
        phase: how it ended; `promoted` where it came to 100 % and stayed.
        gate: gate that failed.
        took_s: virtual seconds.
        touched: share of the sessions since its start that had the canary.
        requests: requests that the canary answered.
    """

    phase: str
    gate: str
    took_s: float
    touched: float
    requests: int


def same(sample: Sample, _rng: random.Random) -> Sample:
    """Nothing is wrong."""
    return sample


def sessions_of(got: Sequence[Got]) -> tuple[list[list[Got]], float]:
    """What was recorded, session by session in the order of their beginnings, and how many seconds it is long."""
    found: dict[str, list[Got]] = {}
    for one in sorted(got, key=lambda one: one.sent_s):
        found.setdefault(one.session, []).append(one)
    sessions = sorted(found.values(), key=lambda turns: turns[0].sent_s)
    return sessions, sessions[-1][0].sent_s - sessions[0][0].sent_s


def replayed(sessions: Sequence[list[Got]], length_s: float, plan: Plan, change: Change, seed: int) -> Went:
    """One rollout from its start to its end; the recording is repeated for as long as it takes."""
    return _Replay(plan, change, seed).run(sessions, length_s)


class _Request(msgspec.Struct, frozen=True, order=True):
    """One request that was recorded, with the version that it gets now, in the order of ends."""

    ended_s: float
    number: int
    one: Got
    unit: float
    version: str
    epoch: str


class _Replay:
    """One rollout."""

    def __init__(self, plan: Plan, change: Change, seed: int) -> None:
        self._rng = random.Random(seed)
        self._change = change
        self._rollout, _ = begin(f"r{seed}", MODEL, NEW, {OLD: 1.0, NEW: 0.0}, plan, (0.0, "bench"))
        self._recorders = [Recorder(self._rollout) for _ in range(WORKERS)]
        self._looked_s = 0.0

    def run(self, sessions: Sequence[list[Got]], length_s: float) -> Went:
        met = everyone = requests = 0
        for request in self._requests(sessions, length_s):
            while self._looked_s + LOOK_S <= request.ended_s and self._rollout.phase == "running":
                self._look()
            if self._rollout.phase != "running" or request.ended_s > LONGEST_S:
                break
            canary = request.version == NEW
            everyone += not request.one.turn
            met += canary and not request.one.turn
            requests += canary
            if request.epoch == self._rollout.epoch:
                sample = _sample(request)
                sample = self._change(sample, self._rng) if canary else sample
                self._rng.choice(self._recorders).add(sample, request.ended_s)
        rollout = self._rollout
        return Went(rollout.phase, rollout.gate, self._looked_s, met / max(1, everyone), requests)

    def _look(self) -> None:
        """What a controller does."""
        self._looked_s += LOOK_S
        evidence = merge(each.encode() for each in self._recorders)
        further = advance(self._rollout, judge(evidence, self._rollout), self._looked_s)
        if further is not None:
            self._rollout = further[0]
            self._recorders = [Recorder(self._rollout) for _ in range(WORKERS)]

    def _requests(self, sessions: Sequence[list[Got]], length_s: float) -> Iterator[_Request]:
        """Without end. The version is drawn when a session begins, by the weights of then."""
        origin, numbers, running = sessions[0][0].sent_s, itertools.count(), list[_Request]()
        for lap in itertools.count():
            shift = lap * length_s - origin
            for turns in sessions:
                while running and running[0].ended_s <= turns[0].sent_s + shift:
                    yield heapq.heappop(running)
                unit, rollout = self._rng.randbytes(16), self._rollout
                version = of_weights(weights(rollout, rollout.share), unit)
                for one in turns:
                    ended_s, number = one.ended_s + shift, next(numbers)
                    request = _Request(ended_s, number, one, share_of(unit), version, rollout.epoch)
                    heapq.heappush(running, request)


def _sample(request: _Request) -> Sample:
    one = request.one
    first = one.first_s - one.sent_s
    told = one.tokens >= 2 and one.stream
    return Sample(
        version=request.version,
        unit=request.unit,
        uncached_tokens=float(one.question_tokens),
        streamed=one.stream,
        ttft_s=first if one.stream and one.first_s else -1.0,
        tpot_s=(one.ended_s - one.first_s) / (one.tokens - 1) if told else -1.0,
        output_tokens=float(one.tokens) if one.stream else -1.0,
        duration_s=one.ended_s - one.sent_s,
        answered=not one.failure,
        failed=bool(one.failure),
        abandoned=False,
        broken=False,
        continued=one.turn > 0,
    )
