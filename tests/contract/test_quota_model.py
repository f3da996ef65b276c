"""Limits under any history: a store agrees with the other form of the algorithm, kept in whole numbers.

I.371 defines the generic cell rate algorithm twice, as a leaky bucket (which the stores have) and as virtual scheduling
(which this model has): a limit of `most` with one unit in `STEP_S` allows what comes no earlier than its theoretical
time less `most - amount` steps.
"""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from extproc.govern.quotas import Correction, Draw, Take
from tests.contract.conftest import RedisWorld, World
from tests.contract.test_ledger import CLIENTS, Replicas, histories

STEP_S = 2048
"""One unit drains in so long: what the test itself takes means nothing, and a power of two rounds nothing."""
BUCKETS = {"a": ("p", 3), "b": ("p", 8), "c": ("q", 5)}


class Scheduled(msgspec.Struct):
    """One limit: theoretical time of the next unit in steps, and the verb that found it reached last."""

    theoretical: int = 0
    empty_at: int = 0


class Model:
    """All limits, and what steps of time have passed; `verb` numbers verbs, which follow each other within a step."""

    def __init__(self) -> None:
        self.now = self.verb = 0
        self.limits = {name: Scheduled() for name in BUCKETS}

    def look(self) -> None:
        """Time has passed: limits whose theoretical time is over are as if nobody had used them."""
        self.verb += 1
        for limit in self.limits.values():
            if limit.theoretical <= self.now:
                limit.theoretical, limit.empty_at = self.now, self.verb

    def take(self, amounts: dict[str, int]) -> bool:
        """All, or none when one would come too early."""
        self.look()
        if any(self.limits[name].theoretical + n - BUCKETS[name][1] > self.now for name, n in amounts.items()):
            return False
        for name, amount in amounts.items():
            self.limits[name].theoretical += amount
        return True

    def correct(self, names: Sequence[str], difference: int, at: int) -> None:
        """What the verb `at` took differs."""
        self.look()
        for limit in (self.limits[name] for name in names):
            if difference > 0 or limit.empty_at <= at:
                limit.theoretical = max(self.now, limit.theoretical + difference)

    def levels(self, names: Sequence[str]) -> list[int]:
        """Units in use."""
        return [self.limits[name].theoretical - self.now for name in names]


def draw(name: str, amount: int) -> Draw:
    """A draw as the stores take it. Half a unit more is allowed: steps take a little longer on a real clock."""
    shard, most = BUCKETS[name]
    return Draw(shard, name, "tokens", "minute", most + 0.5, 1 / STEP_S, float(amount))


class Limits(Replicas):
    """Drives the replicas and the model side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.begun: list[tuple[list[str], int, float]] = []
        self.aged = 0.0

    @rule(
        client=st.sampled_from(CLIENTS),
        amounts=st.dictionaries(st.sampled_from(sorted(BUCKETS)), st.integers(1, 6), min_size=1),
    )
    def takes(self, client: int, amounts: dict[str, int]) -> None:
        """Some of the limits, in any order."""
        allowed = self.model.take(amounts)
        got = self.run(self.stores[client].take(Take([draw(name, amount) for name, amount in amounts.items()])))
        assert got.allowed == allowed
        assert list(got.levels) == pytest.approx(self.model.levels(list(amounts)), abs=0.2)
        self.moment()
        if allowed:
            self.begun.append((list(amounts), self.model.verb, got.at + self.aged))

    @precondition(lambda self: self.begun)
    @rule(client=st.sampled_from(CLIENTS), difference=st.integers(-6, 6), data=st.data())
    def corrects(self, client: int, difference: int, data: st.DataObject) -> None:
        """What one of the requests so far took of its limits."""
        names, verb, at = data.draw(st.sampled_from(self.begun))
        self.model.correct(names, difference, verb)
        # A server ages by moving what it has into the past, and a request that began moves with it.
        at -= self.aged if isinstance(self.world, RedisWorld) else 0.0
        self.run(self.stores[client].correct(Correction(at, [draw(name, difference) for name in names])))
        self.moment()

    def moment(self) -> None:
        """No two verbs come at one moment; a clock that stands still is told so."""
        if not isinstance(self.world, RedisWorld):
            self.world.age(2.0**-10)

    @rule(steps=st.integers(1, 4))
    def waits(self, steps: int) -> None:
        """Time passes."""
        self.model.now += steps
        self.world.age(float(steps * STEP_S))
        if isinstance(self.world, RedisWorld):
            self.aged += steps * STEP_S


async def test_every_history_of_limits_is_the_models(world: World) -> None:
    """Whatever is taken, corrected and waited for, and from whichever replica, both forms allow the same."""
    await histories(Limits, world)
