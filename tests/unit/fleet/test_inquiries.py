"""What a keeper remembers of how endpoints are read, over real HTTP servers."""

import random
from collections.abc import AsyncIterator

import aiohttp
import pytest

from extproc.clock import ManualClock
from extproc.engines.adapter import Reading
from extproc.engines.detect import all_adapters
from extproc.fleet.asking import new_session
from extproc.fleet.inquiries import Inquiries, Key
from tests.unit.fleet.parts import Engine

KEY: Key = ("chat", "engine:80")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A keeper's client."""
    async with new_session("keeper") as made:
        yield made


@pytest.fixture
async def two() -> AsyncIterator[list[Engine]]:
    """A vLLM and an SGLang engine."""
    engines = [Engine(), Engine()]
    engines[1].page = b"sglang:num_running_reqs 5\n"
    for engine in engines:
        await engine.start()
    yield engines
    for engine in engines:
        await engine.stop()


async def test_behind_a_new_address_stands_another_engine(session: aiohttp.ClientSession, two: list[Engine]) -> None:
    """Nothing that was found out of the first is believed of the second."""
    clock = ManualClock()
    inquiries = Inquiries(all_adapters(), clock, random.Random(1))
    inquiries.apply({"chat": "auto"})
    kinds = []
    for engine in (two[0], two[1], two[1]):
        inquiries.ask(session, KEY, engine.address)
        assert KEY in inquiries
        (told,) = (await inquiries.loads(clock.monotonic() + 20.0)).values()
        assert isinstance(told.outcome, Reading)
        kinds.append(told.outcome.kind)
    assert kinds == ["vllm", "sglang", "sglang"]
    await inquiries.drop(inquiries.keys())


async def test_what_was_dropped_is_neither_awaited_nor_remembered(
    session: aiohttp.ClientSession, two: list[Engine]
) -> None:
    """Answers that are still out are given up."""
    two[0].gate.clear()
    inquiries = Inquiries(all_adapters(), ManualClock(), random.Random(1))
    inquiries.apply({"chat": "vllm"})
    inquiries.ask(session, KEY, two[0].address)
    await two[0].until(lambda: two[0].open == 1)
    assert inquiries.keys() == {KEY}
    await inquiries.drop({KEY, ("chat", "unknown:80")})
    assert inquiries.keys() == set()
    assert KEY not in inquiries
    await two[0].until(lambda: two[0].open == 0)
