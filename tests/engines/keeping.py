"""A keeper that reads real engines in the test's own process, without Envoy, and a client that asks them directly."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import count

import aiohttp
import msgspec

from extproc.clock import SystemClock
from extproc.config import Config, Model, Pool, Redis, Telemetry
from extproc.engines.detect import all_adapters
from extproc.fleet import kv_reader, scraper
from extproc.fleet.holding import Holding
from extproc.fleet.kv_reader import KvReader
from extproc.fleet.membership import Membership
from extproc.fleet.scraper import Scraper
from extproc.outbox import Outbox
from extproc.state.endpoint import EndpointState
from extproc.state.exact_blocks import TokenPrompt, chain_of
from extproc.state.memory import MemoryStore
from extproc.telemetry.metrics import Metrics
from tests.engines.gateway import Json
from tests.engines.vllm_engine import BLOCK_SIZE
from tests.kv_events import Worker
from tests.waiting import until_async

POOL = "main"

States = Mapping[str, Mapping[str, EndpointState]]

# Ordinary tokens of the tiny model: above its special tokens and single bytes, below the end of its vocabulary.
_TOKEN_IDS = range(300, 1500)


class Seen(msgspec.Struct, frozen=True):
    """One prompt that was asked.

    Attributes:
        expected: cached tokens that the profile promised before.
        reported: cached tokens that vLLM reported.
    """

    expected: int
    reported: int


class Keeping:
    """Scraper and reader of KV events over one engine, and a worker that hears of it.

    Attributes:
        worker: what a worker knows of the engine.
        scraper: knows the engine's state.
    """

    def __init__(self, address: str, seen_as: Callable[[EndpointState], EndpointState]) -> None:
        """Use `keeping()` instead."""
        clock, numbers = SystemClock(), count()
        self.worker = Worker(address)
        self._address = address
        self._store = MemoryStore(clock)
        self._membership, self._metrics = Membership(), Metrics()
        self.scraper = Scraper(
            self._membership,
            self._store,
            Holding(self._store, scraper.WORK, "keeper", clock),
            all_adapters(),
            self._metrics,
            clock,
            random.Random(1),
        )
        self._reader = KvReader(
            lambda: {
                pool: {name: seen_as(state) for name, state in states.items()}
                for pool, states in self.scraper.states().items()
            },
            self._store,
            Holding(self._store, kv_reader.WORK, "keeper", clock),
            lambda: Outbox(f"keeper-kv-{next(numbers)}"),
            self._metrics.kv,
            clock,
        )

    async def run(self) -> None:
        """Keep until cancelled."""
        config = Config(
            models={"m": Model(pool=POOL)},
            pools={POOL: Pool(endpoints=[self._address], profiles="precise")},
            telemetry=Telemetry(scrape_ms=250),
            redis=Redis(hold_ms=5000),
        )
        await self._membership.apply(config)
        self.scraper.apply(config)
        self._reader.apply(config)
        await asyncio.gather(self.scraper.run(), self._reader.run())

    @property
    def state(self) -> EndpointState:
        """What the scraper knows of the engine. Raises KeyError before the first scrape."""
        return self.scraper.states()[POOL][self._address]

    async def listen(self) -> None:
        """Have the worker take in what it was told since."""
        await self.worker.follow(self._store, POOL)

    async def expected(self, prompt: TokenPrompt) -> int:
        """Cached tokens that the worker's profile promises: leading blocks, but for the one with the last token."""
        await self.listen()
        most = (len(prompt.ids) - 1) // BLOCK_SIZE
        held = self.worker.blocks
        depth = 0
        for block in chain_of(prompt, BLOCK_SIZE)[:most]:
            if block not in held:
                break
            depth += 1
        return depth * BLOCK_SIZE

    async def in_use(self) -> None:
        """Wait until the worker has a profile of the engine that runs now."""

        async def begun() -> bool:
            await self.listen()
            return self.worker.block_tokens == BLOCK_SIZE

        await until_async(begun)

    async def holds(self, prompt: TokenPrompt) -> None:
        """Wait until the worker knows that every full block of a prompt is cached."""

        async def same() -> bool:
            await self.listen()
            return self.worker.blocks.issuperset(chain_of(prompt, BLOCK_SIZE))

        await until_async(same)

    async def ask(self, http: aiohttp.ClientSession, prompt: TokenPrompt, model: str) -> Seen:
        """Send a prompt to the engine, and wait until the worker knows it; nothing else may run meanwhile."""
        expected = await self.expected(prompt)
        reported = await cached_tokens(http, self._address, prompt, model)
        await self.holds(prompt)
        return Seen(expected, reported)

    def metric(self, name: str) -> float:
        """A metric of KV events, as of now, summed over its labels."""
        self._reader._show()
        lines = self._metrics.page().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@contextlib.asynccontextmanager
async def keeping(
    address: str, seen_as: Callable[[EndpointState], EndpointState] = lambda state: state
) -> AsyncIterator[Keeping]:
    """Read an engine while the block lasts.

    Args:
        address: the engine's.
        seen_as: what the reader of events is told of the engine's state.
    """
    keeper = Keeping(address, seen_as)
    task = asyncio.create_task(keeper.run())
    try:
        await keeper.in_use()
        yield keeper
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def fresh(name: str, tokens: int, *, adapter: str = "", salt: str = "") -> TokenPrompt:
    """A prompt of exactly so many token ids, which no other name shares even its first block with."""
    return TokenPrompt(random.Random(name).choices(_TOKEN_IDS, k=tokens), adapter, salt)


def joined(prompt: TokenPrompt, more: TokenPrompt) -> TokenPrompt:
    """A prompt that goes on with the tokens of another one."""
    return msgspec.structs.replace(prompt, ids=[*prompt.ids, *more.ids])


def body_of(prompt: TokenPrompt, model: str, max_tokens: int = 1) -> Json:
    """The completion that has this prompt."""
    body = {"model": prompt.adapter or model, "prompt": list(prompt.ids), "max_tokens": max_tokens, "ignore_eos": True}
    return body | ({"cache_salt": prompt.salt} if prompt.salt else {})


async def cached_tokens(
    http: aiohttp.ClientSession, address: str, prompt: TokenPrompt, model: str, max_tokens: int = 1
) -> int:
    """Send a prompt to an engine; how many of its tokens vLLM says it had."""
    told = await post(http, address, "/v1/completions", body_of(prompt, model, max_tokens))
    usage = told["usage"]
    assert usage["prompt_tokens"] == len(prompt.ids)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def post(http: aiohttp.ClientSession, address: str, path: str, body: Json | None = None) -> Json:
    """The JSON that an engine answers with; its status is 200."""
    async with http.post(f"http://{address}{path}", json=body or {}) as answer:
        assert answer.status == 200, await answer.text()
        told: Json = await answer.json(content_type=None)
        return told


async def page(http: aiohttp.ClientSession, address: str, path: str) -> bytes:
    """A page of an engine; its status is 200."""
    async with http.get(f"http://{address}{path}") as answer:
        assert answer.status == 200, path
        return await answer.read()


def exact(seen: Sequence[Seen]) -> bool:
    """Whether each was as promised."""
    return all(each.expected == each.reported for each in seen)
