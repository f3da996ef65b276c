"""Token ids fail in every way there is: each request is routed all the same, and each time is counted."""

import contextlib
import random
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest

from extproc.state.exact_blocks import TokenPrompt, chain_of
from extproc.state.feed import Cached, Exact, pack
from extproc.tokens.patience import STRIKES
from extproc.tokens.tokenizing import Engines
from tests.unit.router.parts import Bench
from tests.unit.tokens.parts import Counted, Server, config_of, pool_of, rendered, serving, tokenizing

RENDER = "/v1/chat/completions/render"
BLOCK_TOKENS = 16
IDS = array("I", random.Random(1).choices(range(30_000), k=3200))
REQUESTS = STRIKES + 4


@contextlib.asynccontextmanager
async def routed(server: Server, budget_ms: float) -> AsyncIterator[tuple[Bench, Counted]]:
    """A router whose endpoint `b` tells that it has the prompt of `IDS`, and whose ids come from the server."""
    bench = Bench()
    settings = {"source": "render", "url": f"http://{server.at}", "budget_ms": budget_ms}
    bench.around.config = config_of({"main": pool_of(settings)}, {"m": {"pool": "main"}})
    known = bench.around.knowledge["main"]
    for endpoint in "abc":
        known.apply(Exact(endpoint, 0, BLOCK_TOKENS))
    known.apply(Cached("b", 0, 0, pack(chain_of(TokenPrompt(IDS), BLOCK_TOKENS))))
    async with tokenizing(bench.around.config, Engines(lambda _: []), bench.clock) as (room, counted):
        bench.around.tokens = room
        yield bench, counted


async def test_with_token_ids_the_engine_that_has_the_prompt_is_picked() -> None:
    """What the tests below do without."""
    async with serving({RENDER: rendered(*IDS)}) as server, routed(server, 10_000.0) as (bench, counted):
        for number in range(REQUESTS):
            decision = await bench.chat(f"text {number}")
            assert list(decision.destinations[:1]) == bench.destination("b")
            assert bench.notes.outcomes[-1].cached_tokens >= len(IDS) - BLOCK_TOKENS
            await bench.router.settle(decision)
    assert counted.outcomes == {"ok": REQUESTS}


@pytest.mark.parametrize(
    ("answer", "outcomes"),
    [
        ((500, {}), {"failed": STRIKES, "resting": REQUESTS - STRIKES}),
        ((404, {}), {"failed": STRIKES, "resting": REQUESTS - STRIKES}),
        ((200, {"token_ids": "x"}), {"failed": STRIKES, "resting": REQUESTS - STRIKES}),
        ((400, {}), {"refused": REQUESTS}),
        (rendered(1, features={"mm_hashes": {}}), {"failed": STRIKES, "resting": REQUESTS - STRIKES}),
    ],
    ids=["broken", "missing", "nonsense", "refusing", "half of images"],
)
async def test_a_tokenizer_that_fails_fails_no_request(answer: tuple[int, Any], outcomes: dict[str, int]) -> None:
    """Each is sent to an endpoint, with all others to fall back to, and counted by its reason."""
    async with serving({RENDER: answer}) as server, routed(server, 10_000.0) as (bench, counted):
        for number in range(REQUESTS):
            decision = await bench.chat(f"text {number}")
            assert len(decision.destinations) == 3
            assert decision.charge_id
            await bench.router.settle(decision)
    assert counted.outcomes == outcomes


async def test_a_tokenizer_that_sleeps_fails_no_request() -> None:
    """It costs a few requests their budget, and none anything more."""
    async with serving({RENDER: rendered(*IDS)}) as server, routed(server, 5.0) as (bench, counted):
        server.delay_s = 60.0
        for number in range(REQUESTS):
            decision = await bench.chat(f"text {number}")
            assert len(decision.destinations) == 3
            await bench.router.settle(decision)
    assert counted.outcomes == {"late": STRIKES, "resting": REQUESTS - STRIKES}


async def test_a_tokenizer_that_broke_is_used_again_when_it_is_mended() -> None:
    """At the first try after its rest."""
    async with serving({RENDER: (500, {})}) as server, routed(server, 10_000.0) as (bench, counted):
        for number in range(STRIKES):
            assert (await bench.chat(f"text {number}")).destinations
        server.answers[RENDER] = rendered(*IDS)
        assert (await bench.chat("too soon")).destinations
        bench.clock.advance(60.0)
        assert list((await bench.chat("mended")).destinations[:1]) == bench.destination("b")
    assert counted.outcomes == {"failed": STRIKES, "resting": 1, "ok": 1}
