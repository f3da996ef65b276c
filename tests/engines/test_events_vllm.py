"""KV events of a real vLLM through the keeper's own reader: what a worker's profile promises, and what vLLM reports."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec
import pytest

from extproc.engines.kv_decode import decode
from extproc.engines.kv_layout import Layout
from extproc.engines.kv_values import Removed, Stored, Tier
from extproc.state.endpoint import EndpointState, Source
from extproc.state.exact_blocks import TokenPrompt
from tests.chaos.wire import Wire
from tests.engines.gateway import Json
from tests.engines.keeping import Keeping, body_of, cached_tokens, extras_of, fresh, joined, keeping, page, post
from tests.engines.vllm_engine import ADAPTERS, BLOCK_SIZE, CACHE_BLOCKS, VllmEngine
from tests.waiting import until_async

pytestmark = pytest.mark.vllm

CUT_S = 2.0


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose connections close with the test."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def ask_all(
    keeper: Keeping, http: aiohttp.ClientSession, model: str, prompts: Sequence[TokenPrompt]
) -> list[int]:
    """Ask prompts one after another; what vLLM reported of each, which must be what the profile promised."""
    seen = [await keeper.ask(http, prompt, model) for prompt in prompts]
    assert [each.expected for each in seen] == [each.reported for each in seen]
    return [each.reported for each in seen]


async def test_every_event_is_decoded_to_what_msgpack_holds(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """Hashes, tokens, parent, size, tier, adapter and salt of each event in the engine's replay, field by field."""
    salt, plain = "decoded salt", fresh("decoded", 70)
    variants = [plain, *(msgspec.structs.replace(plain, adapter=each, salt=salt) for each in ("", ADAPTERS[0]))]
    async with keeping(engines[0].address) as keeper:
        for prompt in variants:
            assert await cached_tokens(http, engines[0].address, prompt, model_name, max_tokens=40) == 0
        await keeper.settled()
        batches = keeper.record.batches
    layout, met = Layout(), set()
    for payload in batches:
        raw, batch = msgspec.msgpack.decode(payload), decode(payload, layout)
        assert (batch.at, batch.rank, batch.skipped) == (raw[0], raw[2], 0)
        for told, event in zip(raw[1], batch.events, strict=True):
            met.add(told["type"])
            if isinstance(event, Stored):
                assert event == stored(told)
            elif isinstance(event, Removed):
                assert event == Removed(tuple(told["block_hashes"]), Tier.GPU)
            else:
                assert told["type"] == "AllBlocksCleared"
    assert "BlockStored" in met
    told = [event for payload in batches for event in msgspec.msgpack.decode(payload)[1]]
    assert any(each.get("lora_name") == ADAPTERS[0] and salt in each["extra_keys"][0] for each in told)
    assert any(each.get("parent_block_hash") for each in told), "no block was filled by what was generated"


def stored(told: Json) -> Stored:
    """What an event of vLLM 0.32 that blocks were stored stands for."""
    extras = extras_of(told)
    while extras and not extras[-1]:
        extras.pop()
    return Stored(
        tuple(told["block_hashes"]),
        told["parent_block_hash"],
        tuple(told["token_ids"]),
        told["block_size"],
        Tier.GPU,
        told["lora_name"] or "",
        tuple(extras),
    )


async def test_one_who_joins_late_knows_what_was_stored_before(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """The replay brings all that the engine told since its start: nothing is partial, every prompt is as promised."""
    prompts = [fresh(f"late {number}", 50 + 37 * number) for number in range(6)]
    prompts += [joined(prompts[5], fresh("late more", 90))]
    before = [await cached_tokens(http, engines[0].address, prompt, model_name) for prompt in prompts]
    assert before == [0, 0, 0, 0, 0, 0, 224]
    async with keeping(engines[0].address) as keeper:
        found = await ask_all(keeper, http, model_name, prompts)
        assert found == [(len(prompt.ids) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
        assert keeper.metric("warmpath_kv_profile_partial{") == 0


async def test_a_turn_that_goes_on_from_an_answer_is_promised_it(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """Blocks that generated tokens filled are in the profile, as the engine finds them for the next turn."""
    prompt = fresh("answered", 2 * BLOCK_SIZE + 5)
    async with keeping(engines[0].address) as keeper:
        body = body_of(prompt, model_name, 60) | {"return_token_ids": True}
        told = await post(http, engines[0].address, "/v1/completions", body)
        answer = TokenPrompt(told["choices"][0]["token_ids"])
        next_turn = joined(joined(prompt, answer), fresh("goes on", 30))
        # The last token that was generated was never computed.
        assert await ask_all(keeper, http, model_name, [next_turn]) == [(69 + 60 - 1) // BLOCK_SIZE * BLOCK_SIZE]


async def test_adapters_and_salts_are_kept_apart(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """One prompt under two adapters, two salts, both and neither shares nothing, in the profile as in the engine."""
    plain = fresh("apart", 100)
    variants = [
        msgspec.structs.replace(plain, adapter=adapter, salt=salt)
        for adapter in ("", *ADAPTERS)
        for salt in ("", "tenant a", "tenant b")
    ]
    async with keeping(engines[0].address) as keeper:
        assert await ask_all(keeper, http, model_name, variants) == [0] * 9
        assert await ask_all(keeper, http, model_name, variants[::-1]) == [96] * 9


async def test_copies_of_a_block_and_evictions_are_followed(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """A block is gone with its last copy, not its first, and all else as the engine evicts it.

    A prompt that is all whole blocks has its last one computed anew, beside the cached one, each time it is asked.
    """
    whole = fresh("copied", 4 * BLOCK_SIZE)
    longer = joined(whole, fresh("behind the copies", 20))
    used = [longer, fresh("used now and then", 300)]
    async with keeping(engines[0].address) as keeper:
        assert await ask_all(keeper, http, model_name, [whole] * 3) == [0, 96, 96]
        await keeper.settled()
        assert max(keeper.record.held.values()) > 1, "the engine made no copies"
        gone = await fill(keeper, http, model_name, used)
        copied = [count for count in keeper.record.held.values() if count > 1]
        assert await ask_all(keeper, http, model_name, gone[:1]) == [0], "nothing was evicted"
        assert await ask_all(keeper, http, model_name, [longer]) == [128]
    assert not copied, "no copy was evicted while another one stayed"


async def fill(
    keeper: Keeping, http: aiohttp.ClientSession, model: str, used: Sequence[TokenPrompt]
) -> list[TokenPrompt]:
    """Fill the whole cache and more with prompts that are used once, while others are used again and again."""
    fillers = [fresh(f"filler {number}", 1500) for number in range(CACHE_BLOCKS * BLOCK_SIZE // 1500 + 2)]
    for filler in fillers:
        await ask_all(keeper, http, model, [filler, *used])
    return fillers


async def test_a_subscriber_cut_for_two_seconds_is_exact_again(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """What was stored and evicted meanwhile is made up for by a replay, and the profile never ends."""
    wires: dict[str, Wire] = {}

    def through_wires(state: EndpointState) -> EndpointState:
        sources = (rewired(source, wires) for source in state.sources)
        return msgspec.structs.replace(state, sources=tuple(sources))

    address = engines[0].address
    ((_, told),) = msgspec.json.decode(await page(http, address, "/kv_event_sources")).items()
    for at in (told["endpoint"], told["replay_endpoint"]):
        wires[at] = Wire(int(at.rpartition(":")[2]))
        await wires[at].mend()
    prompts = [fresh(f"cut {number}", 400) for number in range(12)]
    async with keeping(address, through_wires) as keeper:
        await ask_all(keeper, http, model_name, prompts[:4])
        await keeper.settled()
        begun, replays = keeper.worker.begun, keeper.metric('warmpath_kv_event_faults_total{kind="replays"')
        for wire in wires.values():
            await wire.cut()
        missed = [*prompts[2:8], *(fresh(f"cut filler {number}", 1500) for number in range(8))]
        cut_until = asyncio.get_running_loop().time() + CUT_S
        for prompt in missed:
            await cached_tokens(http, address, prompt, model_name)
        await asyncio.sleep(max(0.0, cut_until - asyncio.get_running_loop().time()))
        await keeper.listen()
        await asyncio.to_thread(keeper.record.catch_up)
        assert keeper.worker.blocks - keeper.record.blocks, "no eviction was missed"
        assert keeper.record.blocks - keeper.worker.blocks, "nothing new was missed"
        for wire in wires.values():
            await wire.mend()
        await ask_all(keeper, http, model_name, [*prompts, *prompts])
        assert keeper.worker.begun == begun
        assert keeper.metric('warmpath_kv_event_faults_total{kind="replays"') > replays
        for wire in wires.values():
            await wire.cut()


def rewired(source: Source, wires: dict[str, Wire]) -> Source:
    """A source whose sockets are reached through wires."""
    return msgspec.structs.replace(
        source,
        endpoint=f"tcp://*:{wires[source.endpoint].port}",
        replay=f"tcp://*:{wires[source.replay].port}",
    )


async def test_a_cache_that_is_reset_is_empty_with_the_next_batch(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """A reset is told with the next step's events; from then on nothing of before is promised."""
    prompts = [fresh(f"reset {number}", 200) for number in range(3)]
    async with keeping(engines[0].address) as keeper:
        await ask_all(keeper, http, model_name, prompts)
        assert await ask_all(keeper, http, model_name, prompts) == [192] * 3
        await post(http, engines[0].address, "/reset_prefix_cache")
        assert await cached_tokens(http, engines[0].address, fresh("after the reset", 200), model_name) == 0
        await keeper.settled()
        assert len(keeper.worker.blocks) == 200 // BLOCK_SIZE
        assert await ask_all(keeper, http, model_name, [*prompts, *prompts]) == [0] * 3 + [192] * 3


async def test_a_restarted_engine_is_known_as_empty_within_one_scrape(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """The first scrape of the new process shows its start, the profile is told anew with nothing in it, then exact."""
    engine, prompts = engines[1], [fresh(f"restarted {number}", 200) for number in range(3)]
    async with keeping(engine.address) as keeper:
        await ask_all(keeper, http, model_name, prompts)
        await keeper.settled()
        before = keeper.state
        await asyncio.to_thread(engine.stop)
        # A page that the old process wrote last may be taken in a moment later; the new one takes many seconds.
        stopped_at = time.time() + 1.0
        engine.start()
        ready = asyncio.create_task(asyncio.to_thread(engine.wait_ready))
        scrapes = {}

        async def scraped() -> bool:
            scrapes[keeper.state.scraped_at] = keeper.state.started_at
            return ready.done() and keeper.state.started_at != before.started_at

        await until_async(scraped, patience_s=300)
        await ready
        await keeper.begin(http)
        assert keeper.worker.started_at == keeper.state.started_at > before.started_at
        assert keeper.worker.blocks == set()
        assert await ask_all(keeper, http, model_name, [*prompts, *prompts]) == [0] * 3 + [192] * 3
    # By the time of the scrape: no scrape of the new process was taken for one of the old.
    assert {start for at, start in scrapes.items() if at > stopped_at} == {keeper.state.started_at}
