"""Engines whose KV events have no end or make no sense: estimated profiles, counted, in bounded time and memory."""

import asyncio
import itertools
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import getpagesize

import msgspec
import pytest
import zmq

from extproc.fleet import kv_order
from tests.chaos.kv_scene import Begin, Scene
from tests.kv_events import Publisher, ours
from tests.waiting import until_async

_SEQ = struct.Struct(">q")
_EMPTY = msgspec.msgpack.encode([0.0, [], 0])

Answers = Callable[[int], Iterator[tuple[int, bytes]]]


class Hostile(Publisher):
    """An engine whose replay socket answers as it likes, without ever an end.

    Attributes:
        questions: how often it was asked.
        answered: batches that a connected keeper took.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.questions = 0
        self.answered = 0
        super().__init__()

    def _serve(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        # Its own queue stays short, as its memory is measured with the keeper's; who is gone is told from who is slow.
        router.setsockopt(zmq.SNDHWM, 4)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._bind(router, self.replay_port)
        left: Iterator[list[bytes]] = iter(())
        due: list[bytes] | None = None
        while not self._ended.is_set():
            if router.poll(1 if due is None or self.answered % 1000 == 0 else 0):
                client, _, start = router.recv_multipart()
                self.questions += 1
                left = self._messages(client, _SEQ.unpack(start)[0])
                due = next(left, None)
            if due is None:
                continue
            try:
                router.send_multipart(due, zmq.NOBLOCK)
            except zmq.Again:
                self._ended.wait(0.001)
            except zmq.ZMQError:  # no such client any more
                left, due = iter(()), None
            else:
                self.answered += 1
                due = next(left, None)
        router.close(linger=0)

    def _messages(self, client: bytes, start: int) -> Iterator[list[bytes]]:
        return ([client, b"", b"", _SEQ.pack(seq), payload] for seq, payload in self._answers(start))


def silence(_: int) -> Iterator[tuple[int, bytes]]:
    """It takes the question, and hangs."""
    return iter(())


def the_same(start: int) -> Iterator[tuple[int, bytes]]:
    """One batch over and over."""
    return itertools.repeat((start, _EMPTY))


def always_new(start: int) -> Iterator[tuple[int, bytes]]:
    """Millions of batches, each with the next number."""
    return ((seq, _EMPTY) for seq in itertools.count(start))


def long_ones(start: int) -> Iterator[tuple[int, bytes]]:
    """Each as long as a batch may be."""
    payload = msgspec.msgpack.encode([0.0, [], 0, bytes(8_000_000)])
    return ((seq, payload) for seq in itertools.count(start))


def nonsense(_: int) -> Iterator[tuple[int, bytes]]:
    """Numbers of any size, in no order."""
    chance = random.Random(1)
    return ((chance.randrange(1 << 62), _EMPTY) for _ in itertools.count())


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience is short, so that the tests are."""
    for name, seconds in (("LONGEST_S", 2.0), ("REPLAY_S", 0.5), ("NEXT_S", 0.5), ("REST_S", 600.0)):
        monkeypatch.setattr(kv_order, name, seconds)


@pytest.mark.parametrize("answers", [silence, the_same, always_new, long_ones, nonsense])
@pytest.mark.usefixtures("hasty")
async def test_a_replay_without_an_end_is_given_up(begin: Begin, answers: Answers) -> None:
    """It is counted, and asked for no more for a while; what is published is read without it."""
    with Hostile(answers) as engine:
        before = resident_mb()
        scene = await begin(engine.source())

        async def given_up() -> bool:
            faults = scene.faults()
            return faults.get("endless", 0) + faults.get("unanswered", 0) >= 1

        await until_async(given_up)
        await begins_anew(scene, engine)
        questions = engine.questions
        assert questions <= 2 * (kv_order.TRIES + 1)
        assert resident_mb() - before < 400
        answered = engine.answered
        await asyncio.sleep(1.0)
        # Nobody takes the answers any more.
        assert (engine.questions, engine.answered) == (questions, answered)


@pytest.mark.usefixtures("hasty")
async def test_numbers_that_jump_for_ever_end_the_profile(begin: Begin) -> None:
    """Back and forth: workers are told so a few times, and use the estimated profile then."""
    with Publisher() as engine:
        scene = await begin(engine.source())
        engine.store(1)
        await scene.knows(ours(1, 2))

        async def senseless() -> bool:
            for seq in (5, 3, 9, 2**40, 1):
                engine._seq = seq
                engine.store(seq % 1000)
            await scene.worker.follow(scene.store, "main")
            return scene.faults().get("senseless", 0) >= 1 and not scene.worker.block_tokens

        await until_async(senseless)
        begun = scene.worker.begun
        assert begun <= 1 + kv_order.TRIES + 5
        for _ in range(20):
            await senseless()
            await asyncio.sleep(0.02)
        assert (scene.worker.begun, scene.worker.block_tokens) == (begun, 0)


async def begins_anew(scene: Scene, engine: Publisher) -> None:
    """Wait until what the engine publishes now is known to the workers, or was left alone for good."""
    numbers = itertools.count(1)

    async def known() -> bool:
        number = next(numbers)
        engine.store(number)
        await scene.worker.follow(scene.store, "main")
        return scene.worker.blocks >= ours(number - 1, 2) or "senseless" in scene.faults()

    await until_async(known)


def resident_mb() -> float:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * getpagesize() / 1e6
