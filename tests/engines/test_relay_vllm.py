"""Real vLLM engines lost in the middle of a stream at temperature 0: another one goes on with the same text."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.engines import prometheus
from tests.acceptance.governance.relayed import CHAT, COMPLETIONS, RELAYED, Stream, counts
from tests.engines.gateway import REQUEST_TIMEOUT_S, Gateway, gateway, prose
from tests.engines.vllm_engine import VllmEngine, revive

pytestmark = pytest.mark.vllm

# Far more than are received before an engine is lost: it must not have ended by then.
TOKENS = 600
STALL_S = 3.0
TRIES = 4
"""On a busy machine the whole answer may be under way when the engine is stopped."""
EVERYWHERE = range(1, 21)
LONG = os.environ.get("WARMPATH_LONG", "") not in {"", "0"}
KILLS = [*((CHAT, position) for position in (EVERYWHERE if LONG else [3])), (COMPLETIONS, 11)]
"""Where an engine is killed. Each takes a start of vLLM: all of them a quarter of an hour, with `WARMPATH_LONG=1`."""
RESUMED = "warmpath_relay_resumed_total"
RELAYED_REQUESTS = "warmpath_relay_requests_total"

Lose = Callable[[VllmEngine], Awaitable[None]]


@pytest.fixture
async def relayed(engines: list[VllmEngine], model_name: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with a relay that waits three seconds for a byte."""
    relay = {"enabled": True, "stall_s": STALL_S}
    async with gateway(tmp_path, model_name, [engine.address for engine in engines], relay=relay) as running:
        yield running


def request(path: str, model: str, **fields: Any) -> dict[str, Any]:
    """A request for a stream of fixed length."""
    text = prose("relay", 300)
    content = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
    return {"model": model, "stream": True, "stream_options": {"include_usage": True}, **content, **greedy, **fields}


@contextlib.asynccontextmanager
async def streaming(through: Gateway, path: str, body: Mapping[str, Any]) -> AsyncIterator[Stream]:
    """Send a request through the relay and read its answer as it comes."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.post(f"{through.url}{path}", json=body, headers=RELAYED) as response,
    ):
        yield Stream(response)


async def whole(through: Gateway, path: str, body: Mapping[str, Any]) -> Stream:
    """An answer that nothing disturbs."""
    async with streaming(through, path, body) as stream:
        return await stream.rest()


async def lost_at(
    through: Gateway, engines: list[VllmEngine], path: str, body: Mapping[str, Any], position: int, lose: Lose
) -> tuple[Stream, VllmEngine]:
    """An answer whose engine is lost once so many tokens have come, and that engine."""
    async with streaming(through, path, body) as stream:
        picked = await through.picked(stream.response.headers["x-request-id"])
        await stream.tokens(position)
        await lose(engines[picked])
        return await stream.rest(), engines[picked]


def assert_same(seen: Stream, expected: Stream, path: str) -> None:
    """Text, usage and form are those of the undisturbed answer."""
    assert seen.text == expected.text
    assert seen.done
    assert [counts(one) for one in seen.usages] == [counts(one) for one in expected.usages]
    assert seen.form == (1, int(path == CHAT), ["length"])


@contextlib.contextmanager
def frozen(engine: VllmEngine) -> Iterator[None]:
    """Every process of an engine stands still for a while."""
    os.killpg(engine.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(engine.pid, signal.SIGCONT)


async def counted(through: Gateway, name: str, **labels: str) -> float:
    """A counter of the relay, summed over the labels that are not given."""
    async with aiohttp.ClientSession() as http, http.get(through.metrics_url) as page:
        samples = prometheus.read(await page.read(), (name,)).get(name, ())
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


async def continued_at(
    through: Gateway,
    engines: list[VllmEngine],
    asked: tuple[str, Mapping[str, Any], int],
    expected: Stream,
    lose: Lose,
    form: str = "ids",
) -> bool:
    """Lose the engine of a path's body at a position; whether another one went on. The text is always the same.

    False where the machine was so busy that nothing was lost: the whole answer was under way already, or Envoy, which
    saw no relay for a moment, had sent the request past it.
    """
    path, body, position = asked
    before, taken = await counted(through, RESUMED, form=form), await counted(through, RELAYED_REQUESTS)
    try:
        seen, _ = await lost_at(through, engines, path, body, position, lose)
    except TimeoutError:
        assert await counted(through, RELAYED_REQUESTS) == taken, "the relay had it, and did not notice"
        return False
    assert_same(seen, expected, path)
    return await counted(through, RESUMED, form=form) > before


@pytest.mark.parametrize(
    ("path", "fields", "form", "positions"),
    [
        (CHAT, {}, "ids", EVERYWHERE),
        (COMPLETIONS, {}, "ids", range(2, 21, 6)),
        # A stop text has the relay go by the text that was sent.
        (CHAT, {"stop": ["\u2603"]}, "text", range(3, 21, 6)),
        (COMPLETIONS, {"stop": ["\u2603"]}, "text", range(4, 21, 6)),
    ],
)
async def test_an_engine_that_stands_still_is_continued_by_another(
    relayed: Gateway,
    engines: list[VllmEngine],
    model_name: str,
    path: str,
    fields: dict[str, Any],
    form: str,
    positions: range,
) -> None:
    """At every one of twenty positions, by token ids; by text at some, where retokenizing gives the same tokens."""
    body = request(path, model_name, **fields)
    expected = await whole(relayed, path, body)
    assert counts(expected.usages[-1])["completion_tokens"] == TOKENS
    for position in positions:
        for _ in range(TRIES):
            with contextlib.ExitStack() as thaw:

                async def stop(engine: VllmEngine, thaw: contextlib.ExitStack = thaw) -> None:
                    thaw.enter_context(frozen(engine))

                if await continued_at(relayed, engines, (path, body, position), expected, stop, form):
                    break
        else:
            pytest.fail(f"at position {position} the engine was never stopped before it had answered")


@pytest.mark.parametrize(("path", "position"), KILLS)
async def test_an_engine_that_is_killed_is_continued_by_another(
    relayed: Gateway, engines: list[VllmEngine], model_name: str, path: str, position: int
) -> None:
    """SIGKILL of all its processes: its connections break."""
    body = request(path, model_name)
    expected = await whole(relayed, path, body)
    for _ in range(TRIES):
        if await continued_at(relayed, engines, (path, body, position), expected, kill):
            return
        await asyncio.to_thread(revive, engines)
    pytest.fail("the engine was never killed before it had answered")


async def kill(engine: VllmEngine) -> None:
    """SIGKILL all processes of an engine."""
    await asyncio.to_thread(engine.kill)


async def test_an_engine_whose_core_is_killed_is_continued_by_another(
    relayed: Gateway, engines: list[VllmEngine], model_name: str
) -> None:
    """Its server lives on and ends the stream with an error event and `[DONE]`, which the client never sees."""
    body = request(CHAT, model_name)
    expected = await whole(relayed, CHAT, body)
    seen, serving = await lost_at(relayed, engines, CHAT, body, 7, lambda one: asyncio.to_thread(one.kill_core))
    assert_same(seen, expected, CHAT)
    assert seen.error is None
    await asyncio.to_thread(serving.stop)
