"""What piles up for the feed during an outage, and reaches it afterwards."""

import redis
from extproc.gossip import Gossip
from extproc.state.feed import Held
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.resilient import ResilientStore
from tests.valkey import Valkey
from tests.waiting import until_async


async def test_what_piled_up_for_the_feed_opens_no_circuit(server: Valkey, store: ResilientStore) -> None:
    """After an outage 16 MB of deltas reach the feed, and decisions stay shared while they do."""
    gossip = Gossip(store, {"p": PoolKnowledge(Priors())}, "worker", cap=20_000)
    for number in range(4_000):
        gossip.publish("p", Held(f"e{number % 4}", bytes(4096)))
    assert gossip.counts.lost < 200
    await until_async(lambda: flushed(gossip, store))
    with redis.Redis(port=server.port) as raw:
        assert raw.memory_usage("warmpath:{p}:feed") < 32 * 1024 * 1024
    assert store.stats.opens == 0


async def flushed(gossip: Gossip, store: ResilientStore) -> bool:
    """Try again; whether nothing is left."""
    await gossip.flush()
    before = store.stats.calls
    await gossip.flush()
    return store.stats.calls == before
