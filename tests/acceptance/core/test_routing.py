"""Requests go where their cache is, and what one worker learns the other uses."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as stubs

from extproc.envoy.contract import DESTINATION, METADATA
from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Local, ask, chat_body, configuration, running, simulated
from tests.unit.envoy.gateway import BUFFERED, Gateway, body, connected, headers
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 2
ENGINES = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """Three engines behind two workers. The believed speed is half the true one, so that learning shows."""
    async with simulated(journal, each=ENGINES) as engines:
        document = configuration({POOL: [engine.address for engine in engines]})
        document["pools"][POOL]["prefill_tokens_per_s"] = 10_000
        document["gateway"]["sidecar"]["workers"] = WORKERS
        document["redis"] = {"timeout_ms": 2000}  # pins are what is tested, not a store that looks slow
        async with running(journal, folder / "warmpath.yaml", document, engines) as started:
            yield started


def prompts() -> Iterator[str]:
    """Long prompts that share no block."""
    return (f"question {number} of many, " * 300 for number in itertools.count())


NEW = prompts()


async def test_what_is_no_json_gets_the_engines_own_answer(local: Local) -> None:
    """The engine's 400 comes back as the engine wrote it."""
    answer = await local.ask(body=b"this is no JSON")
    assert answer.status == 400
    assert "JSON decode error" in answer.json["error"]["message"]
    assert "x-warmpath-reason" not in answer.headers


async def test_a_long_prompt_finds_its_cache_again(local: Local) -> None:
    """The second request of a prompt goes to the engine of the first, which says that it had it cached."""
    for _ in range(3):
        prompt = next(NEW)
        first, first_by = await local.chat_served(prompt)
        second, second_by = await local.chat_served(prompt)
        assert (first.status, second.status) == (200, 200)
        assert second_by is first_by
        assert first.cached_tokens < 64
        assert second.cached_tokens > 0.9 * second.json["usage"]["prompt_tokens"]


async def test_a_growing_conversation_stays_by_its_text_alone(local: Local) -> None:
    """Without any session id the next turn follows the history it repeats."""
    messages = [{"role": "user", "content": next(NEW)}]
    engines = set()
    for _ in range(4):
        answer, engine = await local.chat_served("", messages=messages)
        engines.add(engine.address)
        messages.append(answer.json["choices"][0]["message"])
        messages.append({"role": "user", "content": "go on, please, " * 20})
    assert len(engines) == 1


async def test_a_session_stays_although_its_text_is_cached_elsewhere(local: Local) -> None:
    """The header pins: by its text alone the prompt goes to the engine that holds it, in the session it does not."""
    for number in range(20):
        cached, session = next(NEW), f"session-{number}"
        _, holder = await local.chat_served(cached)
        _, home = await local.chat_served(next(NEW), session)
        if home is not holder:
            break
    _, by_text = await local.chat_served(cached + "and more")
    _, by_session = await local.chat_served(cached + "and more", session)
    assert home is not holder
    assert by_text is holder
    assert by_session is home
    assert await local.metric("warmpath_sessions_total", pool=POOL, outcome="pinned") > 0


async def test_what_one_worker_decided_the_other_knows(local: Local) -> None:
    """A prompt that only worker 0 has seen is, soon after, known to worker 1, which sends it to the same engine."""
    folder = local.stack.config.gateway.sidecar.socket_dir
    async with contextlib.AsyncExitStack() as cleanup:
        sockets = [f"unix:{folder}/worker-{index}.sock" for index in range(WORKERS)]
        channels = [await cleanup.enter_async_context(connected(socket)) for socket in sockets]
        first, second = (Gateway(stubs.ExternalProcessorStub(channel)) for channel in channels)

        async def follows() -> bool:
            # A prompt can be asked about once only: asking teaches.
            prompt = next(NEW)
            told, cached = await decision(first, prompt)
            assert cached == 0
            await asyncio.sleep(0.3)  # longer than a batch of deltas waits
            known, cached = await decision(second, prompt)
            return known == told and cached > 1000

        await until_async(follows)


async def decision(worker: Gateway, prompt: str) -> tuple[str, float]:
    """What a worker decides for a prompt: the endpoint, and the tokens it expects in that engine's cache."""
    stream = worker.open()
    await stream.ask(headers({"content-type": "application/json"}, mode=BUFFERED))
    reply = await stream.ask(body(chat_body(prompt), end=True))
    await stream.finish()
    fields = reply.dynamic_metadata.fields
    picked = fields["envoy.lb"].struct_value.fields[DESTINATION].string_value.partition(",")[0]
    own = fields[METADATA].struct_value.fields
    return picked, own["prompt_tokens"].number_value - own["uncached_tokens"].number_value


async def test_metrics_show_what_was_predicted_reported_and_learnt(local: Local) -> None:
    """One page: predicted and reported cached tokens, time to first token, and a rate that every worker learnt."""
    for _ in range(12):
        prompt = next(NEW)
        for _ in range(2):
            answer = await local.chat(prompt, stream=True, stream_options={"include_usage": True})
            assert answer.body.endswith(b"data: [DONE]\n\n")

    async def learnt() -> bool:
        rates = [
            await local.metric("warmpath_prefill_tokens_per_second", process=f"worker-{worker}", endpoint=one.address)
            for worker in range(WORKERS)
            for one in local.engines
        ]
        # The prior is 10,000; a rate that differs is learnt.
        return (
            all(rate > 0 for rate in rates)
            and any(abs(rate - 10_000) > 1 for rate in rates[:ENGINES])
            and any(abs(rate - 10_000) > 1 for rate in rates[ENGINES:])
        )

    async def told() -> bool:
        # Access-log entries come in batches.
        return await local.metric("warmpath_ttft_seconds_count", pool=POOL) >= 24

    await until_async(learnt)
    await until_async(told)
    assert await local.metric("warmpath_ttft_seconds_bucket", pool=POOL, le="+Inf") >= 24
    prompt_tokens = await local.metric("warmpath_prompt_tokens_total", pool=POOL)
    reported = await local.metric("warmpath_cached_tokens_total", pool=POOL)
    assert 0 < reported < prompt_tokens
    assert await local.metric("warmpath_uncached_tokens_total", pool=POOL) == prompt_tokens - reported
    assert await local.metric("warmpath_predicted_cached_tokens_total", pool=POOL) > 0
    assert await local.metric("warmpath_requests_total", pool=POOL, outcome="ok") >= 24
    assert await local.metric("warmpath_in_flight", pool=POOL) == 0


async def test_metrics_and_logs_hold_no_prompt_and_no_session(local: Local) -> None:
    """What a client wrote stands in no metric and in no line that a part printed."""
    words = "zebra-crossing-7431"
    answer = await local.chat(f"{words} " * 50, session=f"session-{words}")
    assert answer.status == 200
    page = await ask(local.http, local.stack.metrics_url, method="GET")
    assert words.encode() not in page.body
    assert not list(local.journal.containing(words))


async def test_models_are_listed(local: Local) -> None:
    """GET /v1/models names what clients may ask for, and no engine is asked."""
    answer = await local.ask("/v1/models", method="GET")
    told = [(one["id"], one["owned_by"]) for one in json.loads(answer.body)["data"]]
    assert (answer.status, told) == (200, [(name, "warmpath") for name in sorted(local.stack.config.models)])


async def test_no_decision_failed(local: Local) -> None:
    """A fault of a decision would have failed open, and nobody would have noticed."""
    for kind in ("failed_open", "unexpected", "unreadable"):
        assert await local.metric("warmpath_exchange_anomalies_total", kind=kind) == 0
