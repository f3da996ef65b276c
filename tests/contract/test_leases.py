"""Leases: the charges of a replica that died vanish, and one that comes back does no harm."""

from extproc.state.values import Beat, Move
from tests.contract.conftest import World
from tests.contract.test_reserve import ask, candidate, end

LEASE_MS = 15_000


async def test_a_heartbeat_keeps_long_requests(world: World) -> None:
    """A stream that lasts twenty minutes keeps its charge as long as its replica shows signs of life."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a")))
    for _ in range(120):
        world.age(10.0)
        assert (await store.heartbeat("p", "r1", LEASE_MS)).reaped == 0
    assert (await store.loads("p"))["a"].running == 1
    assert await store.settle(end("c1")) is True


async def test_a_dead_replicas_charges_vanish(world: World) -> None:
    """Fifty charges of a replica that was killed leave the counts with its lease; the others' stay."""
    store = world.store()
    for i in range(50):
        await store.reserve(ask(f"dead{i}", candidate("a"), candidate("b"), replica="dead", running_ms=1.0))
    world.age(10.0)
    await store.reserve(ask("c1", candidate("a"), replica="alive"))
    world.age(10.0)
    assert (await store.heartbeat("p", "alive", LEASE_MS)).reaped == 50
    loads = await store.loads("p")
    assert (loads["a"].running, loads["b"].running) == (1, 0)
    assert (await store.heartbeat("p", "alive", LEASE_MS)).reaped == 0


async def test_a_reaped_replica_settles_harmlessly(world: World) -> None:
    """Settling a reaped charge finds nothing; no count goes below zero, nobody else's charge is taken."""
    store = world.store()
    await store.reserve(ask("old", candidate("a"), replica="slow"))
    world.age(60.0)
    await store.heartbeat("p", "r1", LEASE_MS)
    await store.reserve(ask("c1", candidate("a")))
    assert await store.settle(end("old", replica="slow", refund=True)) is False
    assert (await store.loads("p"))["a"].running == 1


async def test_a_reaped_replica_starts_afresh(world: World) -> None:
    """A replica that was reaped reserves again, which renews its lease."""
    store = world.store()
    await store.reserve(ask("old", candidate("a"), replica="slow"))
    world.age(60.0)
    assert (await store.heartbeat("p", "r1", LEASE_MS)).reaped == 1
    await store.reserve(ask("new", candidate("a"), replica="slow"))
    assert (await store.heartbeat("p", "r1", LEASE_MS)).reaped == 0
    assert (await store.loads("p"))["a"].running == 1
    assert await store.settle(end("new", replica="slow")) is True
    world.age(60.0)
    assert (await store.loads("p"))["a"].running == 0


async def test_a_late_heartbeat_saves_what_was_not_reaped(world: World) -> None:
    """A replica whose lease ran out unnoticed takes it up again with its charges."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a")))
    world.age(20.0)
    assert (await store.heartbeat("p", "r1", LEASE_MS)).reaped == 0
    assert await store.settle(end("c1")) is True


async def test_release_gives_up_everything_at_once(world: World) -> None:
    """A clean shutdown needs no lease to run out, and takes only its own charges."""
    store = world.store()
    for i in range(3):
        await store.reserve(ask(f"c{i}", candidate("a")))
    await store.reserve(ask("other", candidate("a"), replica="r2"))
    await store.release("p", "r1")
    await store.release("p", "never-seen")
    assert (await store.loads("p"))["a"].running == 1
    assert await store.settle(end("c1")) is False


async def test_a_heartbeat_tells_how_many_of_the_replicas_charges_are_known(world: World) -> None:
    """Its own open charges, moved ones too; neither the others' nor those that ended."""
    store = world.store()
    assert await store.heartbeat("p", "r1", LEASE_MS) == Beat(0, 0)
    for number in range(3):
        await store.reserve(ask(f"c{number}", candidate("a")))
    await store.reserve(ask("other", candidate("a"), replica="r2"))
    await store.move(Move("p", "c0", "r1", "b", 1.0, 1.0))
    await store.settle(end("c2"))
    assert await store.heartbeat("p", "r1", LEASE_MS) == Beat(0, 2)
    assert await store.heartbeat("other", "r1", LEASE_MS) == Beat(0, 0)


async def test_a_replica_that_stood_still_learns_that_its_charges_are_gone(world: World) -> None:
    """Its first heartbeat after it was reaped finds none of them, so that they can be reserved again."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a"), replica="slow"))
    world.age(60.0)
    assert await store.heartbeat("p", "r1", LEASE_MS) == Beat(1, 0)
    assert await store.heartbeat("p", "slow", LEASE_MS) == Beat(0, 0)
    await store.reserve(ask("c1", candidate("a"), replica="slow"))
    assert await store.heartbeat("p", "slow", LEASE_MS) == Beat(0, 1)
