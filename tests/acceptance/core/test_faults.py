"""Parts die and freeze while 50 requests a second flow: no request fails that the gateway could have saved."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from aiohttp import ClientPayloadError

from extproc.sim import load
from extproc.sim.client import Failure
from extproc.sim.load import LoadSettings, Outcome
from extproc.sim.workload import Conversation, Message, steady, text
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Answer, Engine, Local, chat_body, configuration, running, simulated
from tests.acceptance.phases import Fault, said, table
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 2
ENGINES = 4
RATE = 50.0
CALM_S = 3.0
AFTER_S = 3.0
STREAMS = 24
SYSTEM_PROMPTS = 24
CACHE = ("--blocks", "801")
"""12,800 tokens: about half of the shared system prompts fit one engine, so that hits depend on the choice."""
LASTING = {"store killed": 2.0, "store frozen": 3.0, "workers frozen": 3.0}
"""Seconds for which a part is gone, where nobody but the test brings it back."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """Four engines, each a process of its own, behind two workers."""
    async with simulated(journal, children=ENGINES, arguments=CACHE) as engines:
        document = configuration({POOL: [engine.address for engine in engines]})
        document["gateway"]["sidecar"]["workers"] = WORKERS
        document["redis"] = {"lease_ms": 3000}  # what a killed worker had charged ends with its lease
        async with running(journal, folder / "warmpath.yaml", document, engines) as started:
            yield started


@pytest.fixture(scope="module")
def costs(measured: list[str]) -> Iterator[list[Fault]]:
    """Every fault of this module; what each cost is printed at the end."""
    faults: list[Fault] = []
    yield faults
    measured.append("What each fault cost under 50 requests a second (milliseconds):\n" + table(faults))


def workload(seconds: float, seed: int) -> list[Conversation]:
    """Questions behind a few shared system prompts, half of them streamed, some in sessions."""
    rng = random.Random(7)  # the same prompts for every fault
    systems = [Message("system", text(rng, 1000)) for _ in range(SYSTEM_PROMPTS)]
    questions = steady(RATE, seconds, seed, stream_share=0.5, prompt_tokens=60, max_tokens=24, sessions=20)
    return [msgspec.structs.replace(one, opening=(rng.choice(systems),)) for one in questions]


async def under_load(
    local: Local,
    name: str,
    strike: Callable[[], Awaitable[None]],
    mend: Callable[[], Awaitable[None]] | None = None,
) -> Fault:
    """Send load, strike in its midst, mend what does not mend itself, and wait for the last answer."""
    lasting_s = LASTING.get(name, 3.0)
    conversations = workload(CALM_S + lasting_s + AFTER_S, seed=len(name))
    sending = asyncio.create_task(load.run(local.url, conversations, LoadSettings(timeout_s=30.0, limit_s=90.0)))
    await asyncio.sleep(CALM_S)
    struck_s = time.monotonic()
    await strike()
    began_s = time.monotonic()
    await asyncio.sleep(lasting_s)
    if mend is not None:
        await mend()
    ended_s = time.monotonic()
    return Fault(name, struck_s, began_s, ended_s, await sending)


def nothing_failed(fault: Fault) -> None:
    """No request failed, streamed or not."""
    assert len(fault.run.outcomes) >= RATE * (CALM_S + AFTER_S)
    assert {one.stream for one in fault.run.outcomes} == {True, False}
    assert not fault.run.failed, said(fault.run.failed, fault.began_s)


async def books_are_empty(local: Local) -> None:
    """What was charged before, during and after the fault has all been settled, or ended with its lease."""

    async def empty() -> bool:
        return await local.in_flight() == 0

    await until_async(empty)


def kill(*pids: int) -> Callable[[], Awaitable[None]]:
    """Something that sends SIGKILL."""

    async def strike() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    return strike


def send(number: signal.Signals, pids: Sequence[int]) -> Callable[[], Awaitable[None]]:
    """Something that sends a signal."""

    async def strike() -> None:
        for pid in pids:
            os.kill(pid, number)

    return strike


async def test_a_killed_worker_costs_no_request(local: Local, costs: list[Fault]) -> None:
    """SIGKILL of one worker of two: the other takes over, a new one is started."""
    await local.whole(WORKERS)
    before = local.workers()
    costs.append(await under_load(local, "one worker killed", kill(before[0])))
    nothing_failed(costs[-1])
    await local.whole(WORKERS)
    assert local.workers()[1] == before[1]
    assert local.workers()[0] != before[0]
    await books_are_empty(local)


async def test_all_workers_killed_cost_no_request(local: Local, costs: list[Fault]) -> None:
    """SIGKILL of every worker: Envoy picks by itself until they are back."""
    await local.whole(WORKERS)
    before = local.workers()
    costs.append(await under_load(local, "all workers killed", kill(*before)))
    nothing_failed(costs[-1])
    await local.whole(WORKERS)
    assert not set(local.workers()) & set(before)
    await books_are_empty(local)


async def test_a_killed_keeper_costs_no_request(local: Local, costs: list[Fault]) -> None:
    """SIGKILL of the keeper: Envoy keeps its endpoints, workers decide on what they know."""
    await local.whole(WORKERS)
    before = local.keeper()
    costs.append(await under_load(local, "keeper killed", kill(before)))
    nothing_failed(costs[-1])
    await local.whole(WORKERS)
    assert local.keeper() != before


async def test_a_store_killed_and_started_again_costs_no_request(local: Local, costs: list[Fault]) -> None:
    """SIGKILL of Valkey, which then comes back empty: workers decide on their own ledgers, and return to it."""
    await local.whole(WORKERS)
    decisions = await local.metric("warmpath_decisions_total", pool=POOL)
    store = local.stack.children["valkey"]
    fault = await under_load(local, "store killed", kill(store.pid), local.stack.restart_store)
    costs.append(fault)
    nothing_failed(fault)
    assert await local.metric("warmpath_decisions_total", pool=POOL) >= decisions + 0.9 * len(fault.run.outcomes)
    assert await local.metric("warmpath_fallbacks_total", rung="local_ledger") > 0
    await local.whole(WORKERS)
    await books_are_empty(local)
    assert await local.metric("warmpath_store_degraded") == 0


async def test_a_frozen_store_costs_no_decision(local: Local, costs: list[Fault]) -> None:
    """SIGSTOP of Valkey: connections stay open and nothing answers; decisions go on without it."""
    await local.whole(WORKERS)
    decisions = await local.metric("warmpath_decisions_total", pool=POOL)
    pids = [local.stack.children["valkey"].pid]
    strike, mend = send(signal.SIGSTOP, pids), send(signal.SIGCONT, pids)
    try:
        fault = await under_load(local, "store frozen", strike, mend)
    finally:
        await mend()
    costs.append(fault)
    nothing_failed(fault)
    assert await local.metric("warmpath_decisions_total", pool=POOL) >= decisions + 0.9 * len(fault.run.outcomes)
    await local.whole(WORKERS)
    await books_are_empty(local)


async def test_frozen_workers_cost_no_request(local: Local, costs: list[Fault]) -> None:
    """SIGSTOP of every worker: Envoy waits its message timeout, then sends requests on without a pick."""
    await local.whole(WORKERS)
    pids = local.workers()
    strike, mend = send(signal.SIGSTOP, pids), send(signal.SIGCONT, pids)
    try:
        fault = await under_load(local, "workers frozen", strike, mend)
    finally:
        await mend()
    costs.append(fault)
    nothing_failed(fault)
    await local.whole(WORKERS)
    assert local.workers() == pids
    await books_are_empty(local)


async def test_a_killed_engine_costs_only_the_streams_that_ran_on_it(local: Local, costs: list[Fault]) -> None:
    """SIGKILL of one engine of four. Bytes that a client has cannot be sent again: only those streams end early."""
    await local.whole(WORKERS)
    engine = local.engines[0]
    fault = await under_load(local, "one engine of four killed", lambda: gone(engine))
    costs.append(fault)
    # A stream's 200 comes before its first token, so one that was lost need not have had a byte of its body.
    lost = [one for one in fault.run.failed if one.stream and one.status == 200 and _open_at(one, fault)]
    others = [one for one in fault.run.failed if one not in lost]
    assert not others, said(others, fault.began_s)
    assert {one.failure for one in lost} <= {Failure.BROKEN, Failure.NO_DONE}

    async def known() -> bool:
        return await local.metric("warmpath_endpoint_up", endpoint=engine.address) == 0

    await until_async(known)
    await books_are_empty(local)


async def test_a_killed_engine_cuts_no_stream_of_another(local: Local) -> None:
    """As many streams are cut as the killed engine had; every other one comes to its end."""
    body = chat_body("tell me a long story", stream=True, max_tokens=50, ignore_eos=True)
    alive = [engine for engine in local.engines if engine.process.running]
    doomed, *others = alive
    async with contextlib.AsyncExitStack() as frozen:
        for engine in others:
            await frozen.enter_async_context(engine.frozen("engine"))
        await doomed.control("freeze", frozen=True)
        streams = [asyncio.create_task(local.ask(CHAT, body)) for _ in range(STREAMS)]

        async def all_open() -> bool:
            return sum([await engine.live() for engine in alive]) == STREAMS

        await until_async(all_open)
        held = await doomed.live()
        await gone(doomed)
    ends = await asyncio.gather(*streams, return_exceptions=True)
    cut = [end for end in ends if isinstance(end, ClientPayloadError)]
    complete = [end for end in ends if isinstance(end, Answer) and end.body.endswith(b"data: [DONE]\n\n")]
    assert held > 0
    assert (len(cut), len(complete)) == (held, STREAMS - held), ends
    await books_are_empty(local)


def _open_at(one: Outcome, fault: Fault) -> bool:
    """Whether a request was under way in the moment of the fault."""
    return one.sent_s < fault.began_s and one.end_s >= fault.struck_s


async def gone(engine: Engine) -> None:
    """Kill an engine at work, and return when it is no more: what begins after this cannot have begun on it."""

    async def at_work() -> bool:
        return await engine.live() > 0

    await until_async(at_work)
    engine.process.send(signal.SIGKILL)
    await engine.process.wait()
