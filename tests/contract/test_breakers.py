"""Breakers of endpoints: strikes in a row open them, one probe at a time closes them, on every store alike."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.govern.breaker import Verdict
from extproc.state.values import Breaker, BreakerRules
from tests.contract.conftest import MemoryWorld, RedisWorld, World, redis_world_on
from tests.valkey import Valkey

NEUTRAL: list[Verdict] = ["neutral"]
STRIKE: list[Verdict] = ["strike"]
RULES = BreakerRules(strikes=3, open_ms=5_000.0, max_open_ms=60_000.0)


async def judged(world: World, *verdicts: Verdict, endpoint: str = "a", rules: BreakerRules = RULES) -> Breaker:
    """What the breaker is after these answers, each told by another replica."""
    told = Breaker()
    for verdict in verdicts:
        told = await world.store().judge("p", endpoint, verdict, rules)
    return told


async def opened(world: World, endpoint: str = "a") -> Breaker:
    """A breaker that has just opened."""
    return await judged(world, "strike", "strike", "strike", endpoint=endpoint)


async def test_strikes_in_a_row_open_it(world: World) -> None:
    """The last of them opens it, whichever replicas saw them, and all see it open."""
    assert await judged(world, "strike", "strike") == Breaker("closed", 2)
    told = await judged(world, "strike")
    assert (told.state, told.strikes, told.openings) == ("open", 0, 1)
    assert 4_000 < told.left_ms <= 5_000
    seen = await world.store().breakers("p")
    assert seen["a"].state == "open"


async def test_a_good_answer_starts_the_count_anew(world: World) -> None:
    """Strikes count in a row only."""
    assert (await judged(world, "strike", "strike", "good", "strike", "strike")).state == "closed"


async def test_neutral_answers_neither_count_nor_clear(world: World) -> None:
    """A refused prompt says nothing of the engine."""
    told = await judged(world, "strike", "strike", *NEUTRAL * 100)
    assert told == Breaker("closed", 2)
    assert (await judged(world, "strike")).state == "open"


async def test_endpoints_and_pools_are_judged_apart(world: World) -> None:
    """A breaker is one endpoint's of one pool."""
    await opened(world)
    assert await judged(world, "strike", endpoint="b") == Breaker("closed", 1)
    assert await world.store().breakers("q") == {}


async def test_answers_of_requests_sent_before_it_opened_change_nothing(world: World) -> None:
    """An open breaker neither closes nor stays open longer."""
    await opened(world)
    assert (await judged(world, "good")).state == "open"
    told = await judged(world, *STRIKE * 10)
    assert (told.state, told.openings) == ("open", 1)
    assert told.left_ms <= 5_000


async def test_half_open_one_probe_at_a_time_may_pass(world: World) -> None:
    """Of all replicas that ask at once, one is allowed; the next one after its verdict, or its lease."""
    await opened(world)
    assert not await world.store().probe("p", "a", 1_000.0)
    world.age(5.1)
    assert (await world.store().breakers("p"))["a"].state == "half_open"
    allowed = await asyncio.gather(*(world.store().probe("p", "a", 1_000.0) for _ in range(8)))
    assert sum(allowed) == 1
    assert (await judged(world, "neutral")).state == "half_open"
    assert await world.store().probe("p", "a", 1_000.0)
    assert not await world.store().probe("p", "a", 1_000.0)
    world.age(1.1)
    assert await world.store().probe("p", "a", 1_000.0)


async def test_a_good_answer_closes_a_half_open_breaker(world: World) -> None:
    """Then all replicas see it closed."""
    await opened(world)
    world.age(5.1)
    assert (await judged(world, "good")).state == "closed"
    assert await world.store().breakers("p") == {}


async def test_each_relapse_doubles_the_time_it_stays_open(world: World) -> None:
    """5, 10, 20 and 40 seconds, then a minute at most."""
    await opened(world)
    for longest in (10_000, 20_000, 40_000, 60_000, 60_000):
        world.age(60.1)
        told = await judged(world, "strike")
        assert longest - 1_000 < told.left_ms <= longest


async def test_one_that_relapses_after_it_closed_stays_open_longer_too(world: World) -> None:
    """Unless it was closed for as long as the longest opening."""
    await opened(world)
    world.age(5.1)
    await judged(world, "good")
    assert (await opened(world)).left_ms > 9_000
    world.age(10.1)
    await judged(world, "good")
    world.age(61.0)
    assert (await opened(world)).left_ms <= 5_000


async def test_a_breaker_of_an_endpoint_that_left_is_forgotten(world: World) -> None:
    """Whoever comes to the address later begins anew."""
    await opened(world)
    await world.store().drop_breakers("p", ["a", "never there"])
    await world.store().drop_breakers("p", [])
    assert await world.store().breakers("p") == {}
    assert await judged(world, "strike") == Breaker("closed", 1)


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x95\xa1x\xa1x\xa1x\xa1x\xa1x", b"\x91\x01", b"\x80"])
async def test_a_damaged_breaker_counts_as_closed(redis_world: RedisWorld, damage: bytes) -> None:
    """What cannot be read never keeps an endpoint out."""
    key = f"{redis_world.prefix}:{{p}}:breakers"
    redis_world.raw.hset(key, "a", damage)
    assert await redis_world.store().breakers("p") == {}
    assert await judged(redis_world, "strike") == Breaker("closed", 1)


async def test_a_key_of_another_type_is_replaced(redis_world: RedisWorld) -> None:
    """As everywhere: damage costs what was stored, and no call fails."""
    redis_world.raw.set(f"{redis_world.prefix}:{{p}}:breakers", "no hash")
    assert await judged(redis_world, "strike") == Breaker("closed", 1)


async def test_a_time_far_ahead_is_not_believed(redis_world: RedisWorld) -> None:
    """Redis' clock was set back by a day: an endpoint is not left alone for a day."""
    await opened(redis_world)
    redis_world.age(-86_400.0)
    assert await redis_world.store().breakers("p") == {}


class Model:
    """The rule written down a second time, with time as a number."""

    def __init__(self) -> None:
        self.now = 0.0
        self.row = 0
        self.openings = 0
        self.open_until: float | None = None
        self.closed_since = -1e9

    def judge(self, verdict: Verdict) -> str:
        """Take in a verdict; returns the state afterwards."""
        before = self.state()
        if before == "open" or verdict == "neutral":
            return before
        if verdict == "good":
            if before == "half_open":
                self.open_until, self.closed_since = None, self.now
            self.row = 0
            return "closed"
        self.row += 1
        if before == "half_open" or self.row >= 3:
            soon = before == "half_open" or self.now - self.closed_since < 60.0
            self.openings = self.openings + 1 if soon else 1
            self.open_until = self.now + min(60.0, 5.0 * 2.0 ** (self.openings - 1))
            self.row = 0
        return self.state()

    def state(self) -> str:
        """Where it stands."""
        if self.open_until is None:
            return "closed"
        return "open" if self.now < self.open_until else "half_open"


STEPS = st.lists(st.one_of(st.sampled_from(["good", "strike", "strike", "neutral"]), st.sampled_from([4, 6, 11, 61])))


async def follow(world: World, steps: Sequence[str | int]) -> None:
    """Walk the store and the model through the same answers and pauses."""
    model, store = Model(), world.store()
    await store.drop_breakers("p", ["a"])
    for step in steps:
        if isinstance(step, int):
            world.age(float(step))
            model.now += step
        else:
            verdict: Verdict = step  # type: ignore[assignment]
            assert (await store.judge("p", "a", verdict, RULES)).state == model.judge(verdict)
        seen = (await store.breakers("p")).get("a", Breaker())
        assert (seen.state, seen.strikes) == (model.state(), model.row if model.state() == "closed" else 0)


@given(steps=STEPS)
@settings(max_examples=100, deadline=None)
def test_memory_follows_the_rule(steps: Sequence[str | int]) -> None:
    """Any answers, any pauses: the states are the model's."""
    asyncio.run(follow(MemoryWorld(), steps))


@given(steps=STEPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_redis_follows_the_rule(valkey: Valkey, steps: Sequence[str | int]) -> None:
    """The script says what memory says."""

    async def run() -> None:
        async with redis_world_on(valkey) as world:
            await follow(world, steps)

    asyncio.run(run())
