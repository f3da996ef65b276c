"""KV events over real sockets: a cut, a restart, a gap beyond the buffer, a slow reader, a store that goes away."""

import asyncio

import aiohttp
import pytest
import zmq

from extproc.clock import SystemClock
from extproc.config import EventSettings, ProfileMode
from extproc.fleet import kv_zmq
from extproc.fleet.asking import new_session
from extproc.state.endpoint import EndpointState, Source
from tests.chaos.kv_scene import AT, Begin, Scene, Shelf
from tests.chaos.wire import Wire
from tests.kv_events import BLOCK, Publisher, ours
from tests.ports import free_port
from tests.waiting import until_async


async def test_what_an_engine_told_before_it_was_read_is_replayed(begin: Begin) -> None:
    """The profile has it all: what came before the subscription, and what comes after."""
    with Publisher() as engine:
        for prompt in range(20):
            engine.store(prompt)
        engine.remove(0)
        scene = await begin(engine.source())
        known = set().union(*(ours(prompt, 2) for prompt in range(1, 20)))
        await scene.knows(known)
        engine.store(30, 5)
        await scene.knows(known | ours(30, 5))
        assert scene.worker.started_at == 100.0
        assert scene.faults() == {}


async def test_a_subscriber_that_was_cut_for_two_seconds_is_repaired_by_a_replay(begin: Begin) -> None:
    """What was missed, removals too, is made up for, and the profile never ends meanwhile."""
    with Publisher() as engine:
        wire = Wire(engine.port)
        await wire.mend()
        engine.store(1)
        engine.store(2)
        scene = await begin(engine.source(wire.port))
        engine.store(3)
        await scene.knows(ours(1, 2) | ours(2, 2) | ours(3, 2))
        await wire.cut()
        engine.store(4)
        engine.remove(1)
        await asyncio.sleep(2.0)
        engine.remove(2)
        await wire.mend()
        known = ours(3, 2) | ours(4, 2)
        for prompt in range(100, 160):
            # The subscription comes back at a moment of its own; from then on what is published shows the gap.
            engine.store(prompt)
            known |= ours(prompt, 2)
            await asyncio.sleep(0.05)
        await scene.knows(known)
        assert scene.worker.begun == 1
        await wire.cut()


async def test_a_restarted_publisher_begins_anew(begin: Begin) -> None:
    """Nothing of the life before stays, and the new life is known from its start."""
    with Publisher() as engine:
        scene = await begin(engine.source())
        engine.store(1)
        engine.store(2)
        await scene.knows(ours(1, 2) | ours(2, 2))
        engine.restart()
        engine.store(2)
        await asyncio.sleep(0.5)
        engine.store(3)
        for prompt in range(100, 140):
            engine.store(prompt)
            await asyncio.sleep(0.05)
        known = set().union(*(ours(prompt, 2) for prompt in (2, 3, *range(100, 140))))
        await scene.knows(known)
        assert scene.worker.begun == 2


async def test_a_new_start_empties_the_profile_before_any_event_comes(begin: Begin) -> None:
    """The scraper saw that the process is another one: what was told of the old one is over."""
    with Publisher() as engine:
        scene = await begin(engine.source())
        engine.store(1)
        await scene.knows(ours(1, 2))
        engine.restart()
        scene.state = EndpointState(AT, started_at=2e9, block_tokens=BLOCK, kv_blocks=1000, sources=scene.state.sources)
        await scene.knows(set())
        assert scene.worker.started_at == 2e9


@pytest.mark.parametrize("mode", ["precise", "auto"])
async def test_a_gap_beyond_the_replay_buffer_begins_anew(begin: Begin, mode: ProfileMode) -> None:
    """Removals may be lost: the exact profile ends. A precise one goes on with what can be had; an auto one waits."""
    with Publisher(buffer=10) as engine:
        wire = Wire(engine.port)
        await wire.mend()
        scene = await begin(engine.source(wire.port), mode=mode)
        engine.store(1)
        await scene.knows(ours(1, 2))
        await wire.cut()
        for prompt in range(2, 50):
            engine.store(prompt)
        await wire.mend()
        prompts = range(100, 160)
        for prompt in prompts:
            engine.store(prompt)
            await asyncio.sleep(0.05)
        if mode == "auto":
            await scene.hears(1, used=False)
            assert 'warmpath_kv_profile_used{endpoint="127.0.0.1:8000",pool="main"} 0.0' in scene.samples()
            for prompt in range(1000, 1600):
                engine.store(prompt)
            # As many blocks in a row as the cache has: now it is known again.
            await scene.hears(2, used=True)
        else:
            await scene.hears(2, used=True)
            assert 'warmpath_kv_profile_partial{endpoint="127.0.0.1:8000",pool="main"} 1.0' in scene.samples()
        assert ours(1, 2).isdisjoint(scene.worker.blocks)
        await wire.cut()


async def test_a_reader_that_does_not_keep_up_makes_up_for_it(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its queue had no room for is replayed, by an engine that drops answers too when they are not fetched."""
    monkeypatch.setattr(kv_zmq, "_REPLAYED", 100)
    with Publisher(hwm=100) as engine:
        scene = await begin(engine.source(), running=False)
        async with new_session("test") as session:
            engine.store(0)
            await _rounds_until(scene, session, ours(0, 2))
            for prompt in range(1, 4000):
                engine.store(prompt, padding=4000)
                engine.remove(prompt - 1)
            await _rounds_until(scene, session, ours(3999, 2))
        faults = scene.faults()
        # Nothing had to be forgotten, though it may have been put aside for a while.
        assert not faults.keys() & {"gap", "restart"}
        assert scene.worker.begun == 1 + faults.get("apart", 0)
        # Those that repaired it, whose end may be among the answers that were dropped.
        assert faults.get("replays", 0) + faults.get("unanswered", 0) >= 1


async def _rounds_until(scene: Scene, session: aiohttp.ClientSession, blocks: set[int]) -> None:
    async def same() -> bool:
        await scene.reader.round(session)
        await scene.worker.follow(scene.store, "main")
        return bool(scene.worker.block_tokens) and scene.worker.blocks == blocks

    await until_async(same)


async def test_a_store_that_was_gone_is_told_everything_anew(begin: Begin) -> None:
    """It may have lost what it took; and more happened than could wait."""
    with Publisher() as engine:
        scene = await begin(engine.source())
        engine.store(1)
        await scene.knows(ours(1, 2))
        scene.store.down = True
        engine.store(2)
        engine.remove(1)
        await asyncio.sleep(0.5)
        for prompt in range(3, 100):
            engine.store(prompt, 300)
            engine.remove(prompt, 300)
        await asyncio.sleep(0.5)
        scene.store.down = False
        await scene.knows(ours(2, 2))


async def test_another_keeper_takes_over(begin: Begin) -> None:
    """It reads from the beginning, and what it tells takes the place of what the first one told."""
    with Publisher() as engine:
        store = Shelf(SystemClock())
        first = await begin(engine.source(), store=store, running=False)
        async with new_session("test") as session:
            engine.store(1)
            engine.store(2)
            await _rounds_until(first, session, ours(1, 2) | ours(2, 2))
        await first.reader.close()
        engine.remove(1)
        second = await begin(engine.source(), store=store)
        await second.knows(ours(2, 2))
        assert second.worker.begun == 2


async def test_engines_may_connect_to_us(begin: Begin) -> None:
    """An address without a wildcard is ours to bind; engines that share it are told apart by their topics."""
    at = f"tcp://127.0.0.2:{free_port()}"
    with Publisher(connect=at, topic="kv@a") as engine, Publisher(connect=at, topic="kv@b") as other:
        scene = await begin(engine.source(), events=EventSettings(endpoint=at))
        known = set[int]()
        for prompt in range(40):
            engine.store(prompt)
            other.store(1000 + prompt)
            known |= ours(prompt, 2)
            await asyncio.sleep(0.02)
        # What was published before the connection came about was replayed.
        await scene.knows(known)


async def test_an_engine_that_names_another_host_is_not_followed_there(begin: Begin) -> None:
    """No port is bound for it and nobody is connected to: its profile stays estimated."""
    at, elsewhere = f"tcp://127.0.0.2:{free_port()}", f"tcp://127.0.0.2:{free_port()}"
    with zmq.Context() as context, context.socket(zmq.PULL) as here, context.socket(zmq.REP) as other:
        other.bind(elsewhere)
        with Publisher(connect=at) as engine:
            for source in (engine.source(), Source(endpoint="tcp://*:1", replay=elsewhere)):
                scene = await begin(source)
                for prompt in range(20):
                    engine.store(prompt)
                    await asyncio.sleep(0.02)
                await scene.hears(0, used=False)
            here.bind(at)
            assert not other.poll(100)
