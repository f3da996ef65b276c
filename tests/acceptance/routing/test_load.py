"""Load is spread by what engines really have to do: bursts, a hot prefix, several answers, long prompts in a cache."""

import asyncio
import contextlib
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.sim import load
from extproc.sim.load import LoadSettings
from extproc.sim.workload import Conversation, Message, Turn, text
from extproc.state.values import Load
from tests.acceptance.journal import Journal
from tests.acceptance.local import MODEL, POOL, Engine, Local, configuration, running, simulated
from tests.acceptance.routing.asking import at_workers, decide_chat
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES = 8
BLOCKS = 1537
"""24,576 tokens. Behind a prefix of 4,000 tokens 31 answers of 600 tokens and their questions fit beside each other,
each of which then takes 600 steps of 9.1 ms: one engine gives 5.7 such answers a second."""
HOT_PREFIX, ANSWER, HOT_RATE = 4000, 600, 11.4
HOT_S, WARM_S = 15.0, 5.0
"""Seconds for which requests are sent, and until the first are answered: before, nobody knows how long answers get."""
RNG = random.Random(11)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """Eight engines behind two workers that hear of them once a second."""
    async with simulated(
        journal, each=ENGINES, arguments=("--blocks", str(BLOCKS), "--answer-tokens", "600")
    ) as engines:
        document = configuration({POOL: [engine.address for engine in engines]}, telemetry={"scrape_ms": 1000})
        document["gateway"]["sidecar"]["workers"] = 2
        document["redis"] = {"timeout_ms": 2000}  # the ledger is what is tested, not a store that looks slow
        async with running(journal, folder / "warmpath.yaml", document, engines) as started:
            yield started


@contextlib.asynccontextmanager
async def all_frozen(engines: Sequence[Engine]) -> AsyncIterator[None]:
    """Nothing is computed for a while."""
    async with contextlib.AsyncExitStack() as frozen:
        for engine in engines:
            await frozen.enter_async_context(engine.frozen("engine"))
        yield


async def sequences(local: Local) -> list[int]:
    """Sequences in flight by engine, as the store has them; engines without any are left out."""
    return sorted(one.running for one in (await local.loads()).values() if one.running)


async def test_a_hot_prefix_is_spread_over_the_engines(local: Local, measured: list[str]) -> None:
    """Nine of ten requests begin with the same 4,000 tokens, at twice what one engine could serve: all engines share.

    In-flight tokens, sampled over the run once the first answers told how long they get: no engine has more than 1.5
    times the mean, by the ledger as by what the engines have.
    """
    sending = asyncio.create_task(load.run(local.url, hot(), LoadSettings(model=MODEL, limit_s=60)))
    await asyncio.sleep(WARM_S)
    samples: list[tuple[list[float], list[int]]] = []
    while not sending.done() and len(samples) < (HOT_S - WARM_S) / 0.2:
        loads = await local.loads()
        lives = [await engine.live() for engine in local.engines]
        samples.append(([in_flight(loads.get(engine.address, Load())) for engine in local.engines], lives))
        await asyncio.sleep(0.2)
    run = await sending
    assert not run.failed
    by_ledger = [statistics.mean(column) for column in zip(*(tokens for tokens, _ in samples), strict=True)]
    by_engine = [statistics.mean(column) for column in zip(*(lives for _, lives in samples), strict=True)]
    momentary = statistics.median(max(tokens) / statistics.mean(tokens) for tokens, _ in samples)
    measured.append(
        f"Hot prefix, in flight by engine (max/mean): {uneven(by_ledger):.2f} of tokens in the ledger, "
        f"{uneven(by_engine):.2f} of sequences in the engines, {momentary:.2f} in the median moment; "
        f"{sum(one.cached_tokens for one in run.outcomes) / sum(one.prompt_tokens for one in run.outcomes):.0%} cached"
    )
    assert uneven(by_ledger) <= 1.5, by_ledger
    assert uneven(by_engine) <= 1.5, by_engine
    assert momentary <= 1.5


async def test_a_burst_between_two_scrapes_is_spread_evenly(local: Local) -> None:
    """A hundred equal prompts within 200 ms, while the last scrape says that all engines idle: even within two."""
    tokens, answers = 400, 100
    before = [await engine.prompt_tokens() for engine in local.engines]

    async def ask(number: int) -> int:
        await asyncio.sleep(number * 0.002)
        answer = await local.chat(prompts[number], max_tokens=60)
        return int(answer.json["usage"]["prompt_tokens"])

    prompts = [text(RNG, tokens) for _ in range(answers)]
    sizes = await asyncio.gather(*(ask(number) for number in range(answers)))
    assert len(set(sizes)) == 1
    after = [await engine.prompt_tokens() for engine in local.engines]
    served = [(now - then) // sizes[0] for then, now in zip(before, after, strict=True)]
    assert sum(served) == answers
    assert all(abs(one - answers / ENGINES) <= 2 for one in served), served


async def test_eight_answers_are_charged_as_eight_and_released_once(local: Local) -> None:
    """`n: 8` counts eight sequences and eight times the output of one; its end takes away these eight and no more."""
    async with all_frozen(local.engines):
        one = asyncio.create_task(local.chat(text(RNG, 300), "family", max_tokens=ANSWER, ignore_eos=True))
        name, alone = await changed(local, 0)
        eight = asyncio.create_task(local.chat(text(RNG, 300), "family", max_tokens=40, ignore_eos=True, n=8))
        there, both = await changed(local, 1)
        engine = next(one for one in local.engines if one.address == name)
        await engine.control("slow", factor=5.0)  # so that the one answer outlasts the eight by far
    answer = await eight
    _, left = await changed(local, 9)
    await asyncio.sleep(0.5)  # a second release would come now
    still = await sequences(local)
    await engine.control("slow", factor=1.0)
    assert (alone.running, both.running, left.running, still) == (1, 9, 1, [1])
    assert there == name
    assert len(answer.json["choices"]) == 8
    assert both.output_tokens == pytest.approx(alone.output_tokens + 8 * 40)
    assert left.output_tokens == pytest.approx(alone.output_tokens)
    assert (await one).status == 200
    await until_async(lambda: holds(local, []))


async def changed(local: Local, running: int) -> tuple[str, Load]:
    """Wait until another number of sequences than `running` is in flight; the first engine that has any, and its load.

    The first other number is what counts: counts that are wrong are put right within a third of a lease.
    """

    async def read() -> list[tuple[str, Load]]:
        return [(name, load) for name, load in (await local.loads()).items() if load.running]

    found = await read()
    async with asyncio.timeout(60):
        while sum(load.running for _, load in found) == running:
            await asyncio.sleep(0.01)
            found = await read()
    return found[0] if found else ("", Load())


async def holds(local: Local, wanted: Sequence[int]) -> bool:
    """Whether so many sequences are in flight at engines that have any."""
    return await sequences(local) == list(wanted)


async def drained(local: Local) -> bool:
    """Whether nothing is in flight, and what was charged for prefill would be done."""
    return not await local.loads()


async def test_a_long_prompt_that_is_cached_costs_only_what_is_not(local: Local) -> None:
    """It goes where it is cached, past idle engines, and charges its new part; as long and cold, it goes elsewhere."""
    tokens, new = 10_000, 200
    prompt = text(RNG, tokens)
    first, holder = await local.chat_served(prompt)
    assert first.cached_tokens == 0
    await until_async(lambda: drained(local))
    async with all_frozen(local.engines), at_workers(local) as workers:
        waiting = asyncio.create_task(local.chat(prompt + text(RNG, 40), max_tokens=16))
        await until_async(lambda: holds(local, [1]))
        for worker in workers:
            warm = await decide_chat(worker, prompt + text(RNG, new), max_tokens=16)
            after = await decide_chat(worker, prompt + text(RNG, new), max_tokens=16)
            cold = await decide_chat(worker, text(RNG, tokens + new), max_tokens=16)
            assert warm.endpoint == after.endpoint == holder.address
            assert warm.prompt_tokens == pytest.approx(tokens + new, rel=0.05)
            assert warm.uncached_tokens <= new + 100
            # Four cached prompts were charged by then; one as if it were new would be ten thousand.
            assert after.backlog_tokens <= 4 * (new + 100)
            assert cold.endpoint != holder.address
            assert cold.uncached_tokens == pytest.approx(tokens + new, rel=0.05)
    assert (await waiting).cached_tokens >= tokens - 100


def hot() -> list[Conversation]:
    """Single questions at a steady rate, nine of ten behind one system prompt, the tenth behind none."""
    prefix = (Message("system", text(RNG, HOT_PREFIX)),)
    questions = []
    for number in itertools.takewhile(lambda number: number / HOT_RATE < HOT_S, itertools.count()):
        opening, question = ((), text(RNG, 400)) if number % 10 == 9 else (prefix, text(RNG, 50))
        turn = Turn(question, ANSWER, stream=False)
        questions.append(Conversation(number / HOT_RATE, "steady", "", opening, (turn,)))
    return questions


def in_flight(one: Load) -> float:
    """Tokens of an engine that are still to be prefilled or generated, as its charges have them."""
    return one.backlog_tokens + one.output_tokens


def uneven(values: Sequence[float]) -> float:
    """The largest value over the mean."""
    return max(values) / statistics.mean(values)
