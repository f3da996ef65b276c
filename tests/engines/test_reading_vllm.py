"""What the adapter reads of a real vLLM, against the same pages read by readers that are not ours."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from extproc.engines.adapter import About, Reading
from extproc.engines.vllm import VllmAdapter
from tests.engines.keeping import body_of, cached_tokens, fresh, keeping, page, post
from tests.engines.vllm_engine import ADAPTERS, BLOCK_SIZE, CACHE_BLOCKS, MAX_RUNNING, VllmEngine
from tests.waiting import until_async

pytestmark = pytest.mark.vllm

ADAPTER = VllmAdapter()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose connections close with the test."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


class Page:
    """A metrics page as `prometheus_client` reads it."""

    def __init__(self, text: bytes) -> None:
        families = text_string_to_metric_families(text.decode())
        self._samples = [sample for family in families for sample in family.samples]

    def all(self, name: str) -> list[Sample]:
        """Every sample of this name."""
        return [sample for sample in self._samples if sample.name == name]

    def one(self, name: str, **labels: str) -> Sample:
        """The one sample of this name that has these labels."""
        (found,) = [each for each in self.all(name) if labels.items() <= each.labels.items()]
        return found


async def read(http: aiohttp.ClientSession, engine: VllmEngine) -> tuple[Reading, Page]:
    """One metrics page, as the adapter reads it and as `prometheus_client` does."""
    (path,) = ADAPTER.load_pages
    text = await page(http, engine.address, path)
    return ADAPTER.read(path, text), Page(text)


def same(reading: Reading, told: Page) -> None:
    """Every field of a reading is what stands on the page."""
    cache = told.one("vllm:cache_config_info").labels
    lora = max(told.all("vllm:lora_requests_info"), key=lambda sample: sample.value, default=None)
    with_requests = lora.labels["running_lora_adapters"] if lora else ""
    tokens = told.one("vllm:prompt_tokens_total").value + told.one("vllm:generation_tokens_total").value
    assert reading == Reading(
        running=round(told.one("vllm:num_requests_running").value),
        waiting=round(told.one("vllm:num_requests_waiting").value),
        kv_usage=told.one("vllm:kv_cache_usage_perc").value,
        block_tokens=int(cache["block_size"]),
        kv_blocks=int(cache["num_gpu_blocks"]),
        started_at=told.one("process_start_time_seconds").value,
        asleep=told.one("vllm:engine_sleep_state", sleep_state="awake").value == 0,
        prefix_queries=told.one("vllm:prefix_cache_queries_total").value,
        prefix_hits=told.one("vllm:prefix_cache_hits_total").value,
        prefix_caching=cache["enable_prefix_caching"] == "True",
        tokens=tokens,
        ranks=1,
        active_adapters=tuple(sorted(filter(None, with_requests.split(",")))),
        max_adapters=int(lora.labels["max_lora"]) if lora else 0,
        hash_algo=cache["prefix_caching_hash_algo"],
    )


def process_start(pid: int) -> float:
    """When a process began, seconds since the epoch: the kernel counts hundredths of a second from the boot."""
    boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime")
    return boot + int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / 100


async def test_an_idle_engine_is_read_as_it_is(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """Every field of a reading is what `prometheus_client` finds on the page, and what the engine was started with."""
    prompt = fresh("read idle", 100, adapter=ADAPTERS[0])
    for _ in range(2):
        await cached_tokens(http, engines[0].address, prompt, model_name)
    reading, told = await read(http, engines[0])
    same(reading, told)
    assert (reading.running, reading.waiting, reading.kv_usage) == (0, 0, 0.0)
    assert (reading.block_tokens, reading.kv_blocks) == (BLOCK_SIZE, CACHE_BLOCKS)
    assert (reading.max_adapters, reading.prefix_caching, reading.asleep) == (2, True, False)
    assert reading.hash_algo
    assert reading.prefix_queries >= reading.prefix_hits >= 96
    assert reading.started_at == pytest.approx(process_start(engines[0].pid), abs=2.0)


async def test_a_busy_engine_is_read_as_it_is(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """With a full batch, a queue and a used cache each page says the same to both readers; then all of it ends.

    Adapters with requests are told apart from those that are only loaded.
    """
    before, _ = await read(http, engines[0])
    prompts = [fresh(f"read busy {number}", 200) for number in range(MAX_RUNNING + 4)]
    prompts[0] = fresh("read busy adapter", 200, adapter=ADAPTERS[1])
    work = [
        asyncio.create_task(cached_tokens(http, engines[0].address, prompt, model_name, max_tokens=96))
        for prompt in prompts
    ]
    readings = []
    while not all(each.done() for each in work):
        reading, told = await read(http, engines[0])
        same(reading, told)
        readings.append(reading)
    await asyncio.gather(*work)
    assert any(reading.running == MAX_RUNNING and reading.waiting == 4 for reading in readings)
    # Sixteen requests of seven blocks and more each.
    assert max(reading.kv_usage for reading in readings) > MAX_RUNNING * 7 / CACHE_BLOCKS * 0.9
    assert any(reading.active_adapters == (ADAPTERS[1],) for reading in readings)
    after, _ = await read(http, engines[0])
    assert (after.running, after.waiting, after.kv_usage) == (0, 0, 0.0)
    assert after.tokens - before.tokens == len(prompts) * (200 + 96)
    assert after.prefix_queries - before.prefix_queries == len(prompts) * 200


async def test_slow_pages_are_read_as_they_are(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """Models, adapters, version and event sources: what plain JSON says, page by page, and that all pages are there."""
    abouts = {}
    pages = {}
    for (path,) in ADAPTER.about_pages:
        text = await page(http, engines[0].address, path)
        abouts[path], pages[path] = ADAPTER.about(path, text), json.loads(text)
    cards = pages["/v1/models"]["data"]
    assert abouts["/v1/models"] == About(
        models=tuple(card["id"] for card in cards if card["parent"] is None),
        adapters=tuple(card["id"] for card in cards if card["parent"] is not None),
    )
    assert (abouts["/v1/models"].models, abouts["/v1/models"].adapters) == ((model_name,), ADAPTERS)
    assert abouts["/version"] == About(version=pages["/version"]["version"])
    ((rank, settings),) = pages["/kv_event_sources"].items()
    (source,) = abouts["/kv_event_sources"].sources or ()
    assert (str(source.rank), source.way, source.topic) == (rank, "zmq", settings["topic"])
    assert (source.endpoint, source.replay) == (settings["endpoint"], settings["replay_endpoint"])
    assert not source.endpoint.endswith(":0")


async def test_the_scraper_knows_all_that_the_pages_tell(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """The state that is published has what was read of every page, and the kind of engine found out by itself."""
    async with keeping(engines[0].address) as keeper:
        version = json.loads(await page(http, engines[0].address, "/version"))["version"]
        reading, _ = await read(http, engines[0])
        state = keeper.state
    assert (state.kind, state.page, state.version) == ("vllm", "/metrics", version)
    assert (state.models, state.adapters) == ((model_name,), ADAPTERS)
    assert (state.reachable, state.asleep, state.stale, state.stalled_s) == (True, False, False, 0.0)
    names = ("block_tokens", "kv_blocks", "started_at", "prefix_caching", "max_adapters", "ranks", "hash_algo")
    assert [getattr(state, name) for name in names] == [getattr(reading, name) for name in names]


async def test_a_sleeping_engine_is_read_as_asleep(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """`/sleep` shows in the reading and in the scraper's state within a scrape, and so does `/wake_up`.

    On a CPU vLLM keeps its memory while it sleeps; what it tells, and that requests hang, is as on a GPU.
    """
    async with keeping(engines[0].address) as keeper:

        async def asleep() -> bool:
            return keeper.state.asleep

        async def awake() -> bool:
            return not keeper.state.asleep

        hanging = None
        try:
            await post(http, engines[0].address, "/sleep?level=1")
            same(*await read(http, engines[0]))
            await until_async(asleep)
            body = body_of(fresh("asleep", 40), model_name)
            hanging = asyncio.create_task(post(http, engines[0].address, "/v1/completions", body))
            done, _ = await asyncio.wait({hanging}, timeout=1.0)
            assert not done
        finally:
            await post(http, engines[0].address, "/wake_up")
        await until_async(awake)
        same(*await read(http, engines[0]))
        await hanging
