"""A keeper that reads real engines in the test's own process, without Envoy, and a client that asks them directly."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import count
from typing import Any

import aiohttp
import msgspec
import zmq

from extproc.block_extras import named
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
from extproc.state.exact_blocks import TokenPrompt, chain, chain_of, root
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


class Record:
    """All that an engine told of its cache, by its replay, taken in without the reader that is tested.

    Attributes:
        batches: payloads of the batches, in order.
        held: how many copies of each block the engine has, by its own hash.
    """

    def __init__(self, replay: str) -> None:
        """Know nothing yet.

        Args:
            replay: address of the engine's replay socket; empty for none.
        """
        self.batches: list[bytes] = []
        self.held: Counter[int] = Counter()
        self._ours: dict[int, int] = {}
        self._replay = replay
        self._context = zmq.Context()

    @property
    def blocks(self) -> set[int]:
        """What the engine has, by our hashes."""
        return {self._ours[block] for block in self.held}

    def catch_up(self) -> None:
        """Ask for what was published since; blocks up to a few tenths of a second, when the engine looks."""
        ended = False
        while not ended:
            with self._context.socket(zmq.DEALER) as dealer:
                dealer.linger, dealer.rcvhwm, dealer.rcvtimeo = 0, 0, 30_000
                dealer.connect(self._replay)
                dealer.send_multipart([b"", len(self.batches).to_bytes(8, "big")])
                ended = self._take(dealer)

    def _take(self, dealer: "zmq.Socket[bytes]") -> bool:
        """Take answers in up to the end, or up to one that the engine's router dropped; whether it was the end."""
        while True:
            *_, number, payload = dealer.recv_multipart()
            if number == b"\xff" * 8:
                return True
            if int.from_bytes(number, "big") != len(self.batches):
                return False
            self.batches.append(payload)
            for event in msgspec.msgpack.decode(payload)[1]:
                self._count(event)

    def _count(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                self.held.update(event["block_hashes"])
                parent = event["parent_block_hash"]
                before = root(event["lora_name"] or "") if parent is None else self._ours[parent]
                ours = chain(event["token_ids"], event["block_size"], before, extras_of(event))
                self._ours.update(zip(event["block_hashes"], ours, strict=True))
            case "BlockRemoved":
                self.held.subtract(event["block_hashes"])
                self.held = +self.held
            case "AllBlocksCleared":
                self.held.clear()

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


def extras_of(event: dict[str, Any]) -> list[bytes]:
    """What `exact_blocks.chain` takes for the extra keys of a `BlockStored` of vLLM 0.32, whose adapter is none."""
    adapter = event["lora_name"]
    keys = [[key for key in each or () if key != adapter] for each in event["extra_keys"]]
    return [named(each[0]) if each else b"" for each in keys]


class Keeping:
    """Scraper and reader of KV events over one engine, and a worker that hears of it.

    Attributes:
        worker: what a worker knows of the engine.
        scraper: knows the engine's state.
        record: what the engine told since it started, asked of it apart.
    """

    def __init__(self, address: str, seen_as: Callable[[EndpointState], EndpointState]) -> None:
        """Use `keeping()` instead."""
        clock, numbers = SystemClock(), count()
        self.worker = Worker(address)
        self.record = Record("")
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

    async def begin(self, http: aiohttp.ClientSession) -> None:
        """Wait until the worker has a profile of the engine that runs now."""
        ((_, settings),) = json.loads(await page(http, self._address, "/kv_event_sources")).items()
        self.record.close()
        self.record = Record(settings["replay_endpoint"])

        async def begun() -> bool:
            await self.listen()
            state = self.scraper.states().get(POOL, {}).get(self._address)
            if state is None or [source.replay for source in state.sources] != [settings["replay_endpoint"]]:
                return False
            return (self.worker.block_tokens, self.worker.started_at) == (BLOCK_SIZE, state.started_at)

        await until_async(begun)

    async def ask(self, http: aiohttp.ClientSession, prompt: TokenPrompt, model: str, max_tokens: int = 1) -> Seen:
        """Send a prompt to the engine, once the worker knows all that was told; nothing else may run meanwhile."""
        await self.settled()
        expected = await self.expected(prompt)
        return Seen(expected, await cached_tokens(http, self._address, prompt, model, max_tokens))

    async def settled(self) -> None:
        """Wait until the worker knows all that the engine told up to now."""
        await asyncio.to_thread(self.record.catch_up)

        async def same() -> bool:
            await self.listen()
            return self.worker.blocks == self.record.blocks

        await until_async(same)

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
        async with aiohttp.ClientSession() as http:
            await keeper.begin(http)
        yield keeper
    finally:
        keeper.record.close()
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
