"""Real failovers and moves under calls that never stop: each call ends at once, and all is well again by itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import redis
from extproc.errors import StoreError
from extproc.state.keys import Keys
from extproc.state.redis import RedisStore
from extproc.state.slots import slot_of
from extproc.state.trouble import AnsweredError, Trouble, UnreachableError, trouble_of
from tests.certificates import Authority, tls_arguments
from tests.cluster import ClusterFleet
from tests.sentinels import SentinelFleet
from tests.servers import Server, or_skip, redis7
from tests.verbs import every_verb
from tests.waiting import until, until_async

# The deadline of a call is tested elsewhere; here it is wide, so that no pause of the machine looks like a failure.
PATIENT_MS = 10_000.0


@pytest.fixture
def fleet() -> Iterator[SentinelFleet]:
    """A master with a password, a replica and three sentinels."""
    with SentinelFleet(password="to be %/@? escaped".replace(" ", "_")) as running:
        yield running


@pytest.fixture
async def store(fleet: SentinelFleet) -> AsyncIterator[RedisStore]:
    """A store that the sentinels lead to the master."""
    store = RedisStore(fleet.url, PATIENT_MS)
    await store.ping()
    yield store
    await store.close()


async def answers(store: RedisStore, pool: str = "p") -> bool:
    """Whether a write to this pool is carried out now."""
    try:
        await store.put_states(pool, {"a": b"x"})
    except StoreError:
        return False
    return True


async def test_all_verbs_work_by_sentinel(fleet: SentinelFleet, store: RedisStore) -> None:
    """The sentinels' word is enough: URL, name of the master, password; further connections go the same way."""
    assert await every_verb(store) == {}
    assert (await store.report()).role == "master"
    assert fleet.master().alive


async def test_a_killed_master_is_replaced_without_a_restart(fleet: SentinelFleet, store: RedisStore) -> None:
    """Between the death and the promotion every call fails at once; then the same store works, feed and all."""
    await store.append("p", b"before", 100)
    await until_async(lambda: replicated(fleet))
    reading = asyncio.create_task(store.read("p", (await store.read("p", "0", 0))[-1].id, 60_000))
    dead = fleet.master()
    dead.kill()
    with pytest.raises(StoreError):
        await reading
    with pytest.raises(UnreachableError) as caught:
        await store.loads("p")
    assert trouble_of(caught.value) is Trouble.GONE
    await until_async(lambda: answers(store))
    assert fleet.promoted(dead)
    assert await every_verb(store) == {}
    assert [entry.payload for entry in await store.read("p", "0", 0)][:1] == [b"before"]


async def replicated(fleet: SentinelFleet) -> bool:
    """Whether the replica has the feed."""
    with fleet.others()[0].client(password=fleet.password) as client:
        return bool(client.xlen("warmpath:{p}:feed"))


async def test_a_master_that_comes_back_as_a_replica_is_left_alone(fleet: SentinelFleet, store: RedisStore) -> None:
    """The sentinels make one of the two a replica again; whoever connects afterwards finds the other one."""
    old = fleet.master()
    old.kill()
    await until(lambda: fleet.promoted(old))
    old.start()
    # Mostly it is the old one; a sentinel that had not heard of the promotion yet may have begun another one.
    await until(lambda: sorted(role(each, fleet) for each in fleet.servers) == ["master", "slave"])
    await until_async(lambda: answers(store))
    fresh = RedisStore(fleet.url, PATIENT_MS)
    await fresh.ping()
    assert (await fresh.report()).role == "master"
    assert await every_verb(fresh) == {}
    await fresh.close()


async def test_a_frozen_master_is_replaced(fleet: SentinelFleet, store: RedisStore) -> None:
    """Nothing closes the connections of a machine that stands still: the store leaves it by itself."""
    frozen = fleet.master()
    frozen.freeze()
    pressed = asyncio.create_task(press(store))
    await until(lambda: fleet.promoted(frozen))
    await until_async(lambda: answers(store))
    frozen.thaw()
    pressed.cancel()
    await store.put_states("p", {"late": b"x"})
    with fleet.master().client(password=fleet.password) as client:
        assert client.hget("warmpath:{p}:states", "late") == b"x"


async def press(store: RedisStore) -> None:
    """Call on and on: what is never called is never found out to be frozen."""
    while True:
        await answers(store)
        await asyncio.sleep(0.01)


async def test_a_demoted_master_is_left(fleet: SentinelFleet, store: RedisStore) -> None:
    """In a planned failover the old master lives on as a replica: the store leaves it for the new one."""
    old = fleet.master()
    await until(lambda: failover_begins(fleet))
    await until(lambda: fleet.promoted(old))
    await until(lambda: role(old, fleet) == "slave")
    await until_async(lambda: answers(store))
    assert await every_verb(store) == {}


def failover_begins(fleet: SentinelFleet) -> bool:
    """Ask for a planned failover; False while the sentinel has no replica that it has heard of lately enough."""
    with fleet.sentinels[0].client() as client:
        try:
            client.execute_command("SENTINEL FAILOVER", "warm")
        except redis.ResponseError as error:
            if "NOGOODSLAVE" not in str(error):
                raise
            return False
    return True


async def test_a_lost_sentinel_is_passed_over(fleet: SentinelFleet) -> None:
    """The first sentinel of the URL is dead, the second one frozen: the third one is asked."""
    fleet.sentinels[0].kill()
    fleet.sentinels[1].freeze()
    store = RedisStore(fleet.url, PATIENT_MS)
    await until_async(lambda: answers(store))
    await store.close()


async def test_sentinels_that_know_no_such_master_say_so(fleet: SentinelFleet) -> None:
    """A wrong name is a mistake of the configuration, and the error names it."""
    store = RedisStore(fleet.url.replace("/warm/", "/cold/"), PATIENT_MS)
    await until_async(lambda: fails_with(store, "know no master of this name: correct it in redis.url"))
    await store.close()


async def fails_with(store: RedisStore, text: str) -> bool:
    """Whether a call fails for this reason."""
    try:
        await store.loads("p")
    except StoreError as error:
        return text in str(error)
    return False


async def test_sentinels_have_a_password_of_their_own() -> None:
    """Login at the sentinels by their own parameters; without it the error names them."""
    with SentinelFleet(sentinel_lines="requirepass theirs\n") as fleet:
        lacking = RedisStore(fleet.url, PATIENT_MS)
        await until_async(lambda: fails_with(lacking, "correct sentinel_username and sentinel_password"))
        await lacking.close()
        store = RedisStore(fleet.url + "?sentinel_password=theirs", PATIENT_MS)
        await store.ping()
        assert await every_verb(store) == {}
        await store.close()


def role(server: Server, fleet: SentinelFleet) -> str:
    """What a server says that it is; nothing while it drops its clients, as one does that is made a replica."""
    with contextlib.suppress(redis.RedisError), server.client(password=fleet.password) as client:
        return str(client.info("replication")["role"])
    return ""


@pytest.fixture
def cluster() -> Iterator[ClusterFleet]:
    """Three nodes without replicas."""
    with ClusterFleet() as running:
        yield running


async def connected(cluster: ClusterFleet, *pools: str) -> RedisStore:
    """A store with connections to the nodes of these pools."""
    store = RedisStore(cluster.url, PATIENT_MS)
    for pool in pools:
        await store.ping(pool)
    return store


async def test_a_slot_that_moved_is_followed_within_the_call(cluster: ClusterFleet) -> None:
    """MOVED costs the call that meets it one more round trip, and no later one; blocking reads follow too."""
    here, there = cluster.pools_apart()
    store = await connected(cluster, here, there)
    await store.append(here, b"kept", 100)
    first = (await store.read(here, "0", 0))[-1]
    cluster.move(here, cluster.owner(there))
    assert await every_verb(store, here) == {}
    assert (await store.read(here, "0", 0))[0] == first
    assert cluster.owner(here) is cluster.owner(there)
    await store.close()


async def test_a_slot_on_its_move_is_asked_for_where_it_goes(cluster: ClusterFleet) -> None:
    """While a slot is between two nodes, the old one answers ASK for what it has no longer: no call fails for it."""
    here, there = cluster.pools_apart()
    store = await connected(cluster, here, there)
    await store.put_states(here, {"a": b"x"})
    cluster.half_move(here, cluster.owner(there))
    assert await store.states(here) == {"a": b"x"}
    await store.put_states(here, {"b": b"y"})
    assert set(await store.states(here)) == {"a", "b"}
    await store.close()


async def test_a_dead_node_disturbs_no_other_pool(cluster: ClusterFleet) -> None:
    """Pools on living nodes are served without one failure while another node is dead, and it comes back by itself."""
    here, there = cluster.pools_apart()
    store = await connected(cluster, here, there)
    dead = cluster.owner(here)
    dead.kill()
    failures: list[StoreError] = []
    for _ in range(200):
        assert await answers(store, there)
        try:
            await store.loads(here)
        except StoreError as error:
            failures.append(error)
        await asyncio.sleep(0.01)
    assert len(failures) == 200
    assert {trouble_of(error) for error in failures} <= {Trouble.GONE, Trouble.CLUSTER_DOWN}
    # Errors of a store that does not answer, not refusals: what watches it may stop asking.
    assert not any(isinstance(error, AnsweredError) for error in failures)
    with pytest.raises(StoreError):
        await store.ping(here)
    await store.ping(there)
    await store.ping()
    await store.close()


async def test_a_slot_that_nobody_has_is_no_refusal(cluster: ClusterFleet) -> None:
    """CLUSTERDOWN means that the store does not answer for this pool, which may change, not that a call was wrong."""
    here, there = cluster.pools_apart()
    store = await connected(cluster, here, there)
    with cluster.owner(here).client() as client:
        client.execute_command("CLUSTER DELSLOTS", slot_of(Keys().pool(here).load))
    with pytest.raises(UnreachableError) as caught:
        await store.states(here)
    assert caught.value.trouble is Trouble.CLUSTER_DOWN
    assert await answers(store, there)
    await store.close()


async def test_a_replica_takes_over_its_slots() -> None:
    """The owner of a pool dies, its replica is promoted, and the same store works again, the feed with its entries."""
    with ClusterFleet(replicas=1) as cluster:
        here, there = cluster.pools_apart()
        store = await connected(cluster, here, there)
        await store.append(here, b"before", 100)
        dead = cluster.owner(here)
        with dead.client() as client:
            assert client.wait(1, 10_000) == 1
        dead.kill()
        assert not await answers(store, here)
        await until_async(lambda: answers(store, here))
        assert cluster.owner(here) is not dead
        assert await every_verb(store, here) == {}
        assert (await store.read(here, "0", 0))[0].payload == b"before"
        await store.close()


async def test_one_node_of_the_url_is_enough(cluster: ClusterFleet) -> None:
    """The nodes that are named need not be all, nor all be there: the map of slots comes from any that answers."""
    here, there = cluster.pools_apart()
    gone = next(node for node in cluster.nodes if node not in {cluster.owner(here), cluster.owner(there)})
    gone.kill()
    store = RedisStore(f"redis+cluster://127.0.0.1:{gone.port},127.0.0.1:{cluster.owner(here).port}", PATIENT_MS)
    for pool in (here, there):
        await until_async(lambda pool=pool: answers(store, pool))  # type: ignore[misc]
    await store.close()


async def test_what_is_no_cluster_is_told_apart() -> None:
    """A cluster's URL for a single server fails with the form that would be right."""
    with SentinelFleet() as fleet:
        store = RedisStore(f"redis+cluster://127.0.0.1:{fleet.servers[0].port}", PATIENT_MS)
        await until_async(lambda: fails_with(store, "write redis:// in redis.url for what is no cluster"))
        await store.close()


async def test_a_cluster_speaks_tls(tmp_path: Path) -> None:
    """Every node is verified by the same authority, and the map of slots names the ports for TLS."""
    authority = Authority(tmp_path)
    tls = tls_arguments(authority, authority.issue("127.0.0.1"))
    with ClusterFleet(program=or_skip(redis7), tls=tls) as cluster:
        store = RedisStore(f"{cluster.url}?ssl_ca_certs={authority.file}", PATIENT_MS)
        for pool in cluster.pools_apart():
            await store.ping(pool)
            assert await every_verb(store, pool) == {}
        await store.close()


async def test_sentinels_speak_tls(tmp_path: Path) -> None:
    """Sentinels and servers are verified by the same authority, before and after a failover."""
    authority = Authority(tmp_path)
    tls = tls_arguments(authority, authority.issue("127.0.0.1"))
    with SentinelFleet(password="pw", program=or_skip(redis7), tls=tls) as fleet:
        store = RedisStore(f"{fleet.url}?ssl_ca_certs={authority.file}", PATIENT_MS)
        await store.ping()
        dead = fleet.master()
        dead.kill()
        await until_async(lambda: answers(store))
        assert fleet.promoted(dead)
        assert await every_verb(store) == {}
        await store.close()
