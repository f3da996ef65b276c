"""What many replicas know and decide together is what one alone would: they share one truth."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import aiohttp
import pytest
import pytest_asyncio

from extproc.config import Config
from extproc.sim.workload import text
from tests.acceptance.journal import Journal
from tests.acceptance.local import MODEL, Answer, Engine, chat_body, simulated
from tests.acceptance.state.books import Books
from tests.acceptance.state.size import LONG
from tests.acceptance.state.together import ENGINES, Member, members, sharing
from tests.valkey import Valkey

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTS = (1, 2, 4, 8)
POINTS = 0.02
"""How far the share of cached tokens may be from that of one replica."""
PREFIXES = 150
ROUNDS = 20 if LONG else 8
CONVERSATIONS, TURNS = (160, 10) if LONG else (48, 6)
AT_ONCE = 48
CROWD = 16


class Place:
    """Eight engines and a store."""

    def __init__(self, store: Valkey, engines: list[Engine]) -> None:
        self.store = store
        self.engines = engines
        self.used = 0

    def configs(self, count: int, *, apart: bool = False) -> list[Config]:
        """As many replicas, of a store of their own, or of one each."""
        self.used += 1
        return [sharing(self.store, self.engines, f"n{self.used}{f'-{at}' if apart else ''}") for at in range(count)]

    async def emptied(self) -> None:
        """Empty every engine's cache."""
        for engine in self.engines:
            assert (await engine.control("reset_prefix_cache"))["success"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(journal: Journal) -> AsyncIterator[Place]:
    """Engines whose caches together hold all prefixes once, and not twice."""
    async with simulated(journal, each=8, arguments=ENGINES) as engines:
        with Valkey() as store:
            yield Place(store, engines)


Work = Callable[[Sequence[Member], aiohttp.ClientSession], Awaitable[list[Answer]]]


async def cached_share(place: Place, work: Work, count: int, *, apart: bool = False) -> float:
    """Share of all prompt tokens that engines had cached, as they report it, when so many replicas did the work."""
    await place.emptied()
    # Engines close idle connections after five seconds, and a kept one may be used in that very moment.
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        members(*place.configs(count, apart=apart)) as replicas,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        answers = await work(replicas, http)
        assert not any(one.parts.store.stats.opens for one in replicas), "the store looked slow"
    prompt = sum(int(one.json["usage"]["prompt_tokens"]) for one in answers)
    return sum(one.cached_tokens for one in answers) / prompt


async def measure(place: Place, work: Work, name: str, measured: list[str]) -> None:
    """Hold every number of replicas against one, and against replicas that share nothing, which must do worse."""
    shares = {count: await cached_share(place, work, count) for count in COUNTS}
    apart = await cached_share(place, work, COUNTS[-1], apart=True)
    told = ", ".join(f"{count}: {share:.1%}" for count, share in shares.items())
    measured.append(
        f"Cached share of {name} by number of replicas: {told}; {COUNTS[-1]} that share nothing: {apart:.1%}"
    )
    assert all(abs(share - shares[1]) <= POINTS for share in shares.values()), told
    assert apart < shares[1] - 2 * POINTS, "the workload does not need sharing"


async def test_shared_prefixes_are_found_whoever_decides(place: Place, measured: list[str]) -> None:
    """Requests behind 150 prefixes, in turn at 1, 2, 4 and 8 replicas: the cached share is that of one replica."""
    rng = random.Random(11)
    prefixes = [text(rng, 1200) for _ in range(PREFIXES)]
    rounds = [rng.sample(prefixes, PREFIXES) for _ in range(ROUNDS)]
    bodies = [chat_body(f"{prefix} {text(rng, 30)}") for one in rounds for prefix in one]

    async def work(replicas: Sequence[Member], http: aiohttp.ClientSession) -> list[Answer]:
        waiting = iter(enumerate(bodies))

        async def client() -> list[Answer]:
            return [await replicas[at % len(replicas)].serve(http, body) for at, body in waiting]

        return [answer for one in await asyncio.gather(*(client() for _ in range(AT_ONCE))) for answer in one]

    await measure(place, work, f"{PREFIXES} prefixes", measured)


async def test_conversations_find_their_cache_whoever_decides(place: Place, measured: list[str]) -> None:
    """Every turn of a conversation meets another replica; half of them name their session, half are recognised."""
    rng = random.Random(12)
    plans = [[text(rng, rng.randint(150, 350)) for _ in range(TURNS)] for _ in range(CONVERSATIONS)]

    async def work(replicas: Sequence[Member], http: aiohttp.ClientSession) -> list[Answer]:
        waiting = iter(enumerate(plans))

        async def client() -> list[Answer]:
            answers = []
            for number, questions in waiting:
                headers = {"x-session-id": f"s{number}"} if number % 2 else {}
                messages: list[dict[str, str]] = []
                for turn, question in enumerate(questions):
                    messages.append({"role": "user", "content": question})
                    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 16}).encode()
                    answers.append(await replicas[(number + turn) % len(replicas)].serve(http, body, headers))
                    messages.append(
                        {"role": "assistant", "content": answers[-1].json["choices"][0]["message"]["content"]}
                    )
            return answers

        return [answer for one in await asyncio.gather(*(client() for _ in range(AT_ONCE))) for answer in one]

    await measure(place, work, f"{CONVERSATIONS} conversations", measured)


@pytest.mark.parametrize("alike", [True, False], ids=["one prompt", "different prompts"])
async def test_replicas_that_decide_at_once_do_not_herd(place: Place, alike: bool) -> None:
    """Sixteen replicas get a request each at one moment, for eight idle engines: none gets more than four.

    All of them are on the books while they run, and off them afterwards.
    """
    async with contextlib.AsyncExitStack() as cleanup:
        configs = place.configs(CROWD)
        replicas = await cleanup.enter_async_context(members(*configs))
        books = Books(place.store.url, configs[0].redis.key_prefix)
        cleanup.push_async_callback(books.close)
        rng = random.Random(13)
        prompts = [text(rng, 2000)] * CROWD if alike else [text(rng, 2000) for _ in range(CROWD)]
        asked = (one.decide(chat_body(prompt)) for one, prompt in zip(replicas, prompts, strict=True))
        decisions = await asyncio.gather(*asked)
        picks = Counter(decision.destinations[0] for decision in decisions)
        assert max(picks.values()) <= 4, picks
        assert len(picks) > CROWD // 4, picks
        loads = await books.loads()
        assert {name: load.running for name, load in loads.items()} == picks
        assert await books.in_flight() == CROWD
        for one, decision in zip(replicas, decisions, strict=True):
            await one.settle(decision)
        assert await books.in_flight() == 0
