"""Policies that never look at a prompt do not read it, and a pool changes its policy without a restart."""

import copy
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, MODEL, POOL, Local, configuration, running, simulated
from tests.acceptance.routing.asking import seen, use

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES = 3
MILLION = 1_000_000
RNG = random.Random(29)
# Engines that take a prompt of a megabyte, and are done with it at once.
ARGUMENTS = ("--blocks", "30000", "--max-model-len", "400000", "--token-budget", "400000")
FAST = ("--prefill-tokens-per-s", "50000000")


class Light(msgspec.Struct, frozen=True):
    """A stack with one pool, and the document its configuration was written from."""

    local: Local
    document: dict[str, Any]
    path: Path

    async def policy(self, name: str) -> None:
        """Give the pool a policy, and wait until the worker has taken it in."""
        document = copy.deepcopy(self.document)
        document["pools"][POOL]["policy"] = name
        await use(self.local, self.path, document)

    async def unread(self) -> float:
        """Bodies that were found flawed so far."""
        return await self.local.metric("warmpath_fallbacks_total", rung="load_only")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def light(journal: Journal, folder: Path) -> AsyncIterator[Light]:
    """Three engines behind one worker, which rotates."""
    async with simulated(journal, each=ENGINES, arguments=(*ARGUMENTS, *FAST)) as engines:
        document = configuration({POOL: [one.address for one in engines]}, telemetry={"access_log_flush_ms": 10})
        document["pools"][POOL]["policy"] = "round_robin"
        document["redis"] = {"timeout_ms": 2000}  # policies are what is tested, not a store that looks slow
        path = folder / "warmpath.yaml"
        async with running(journal, path, document, engines) as local:
            yield Light(local, document, path)


def large(filler: str) -> bytes:
    """A chat of a megabyte whose last part no prompt can be read from; the engine takes it for some picture."""
    parts = [{"type": "text", "text": filler}, {"type": "text", "text": None}]
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
    return json.dumps(body).encode()


async def test_a_rotating_policy_reads_no_prompt(light: Light) -> None:
    """A megabyte is answered and its flaw goes unseen: it was not parsed; a policy that looks at prompts sees it."""
    filler = text(RNG, MILLION // 4)
    unread = await light.unread()
    for _ in range(3):
        answer = await light.local.ask(CHAT, large(filler))
        assert answer.status == 200, answer.body[:300]
        assert answer.json["usage"]["prompt_tokens"] >= MILLION / 4
    assert await light.unread() == unread
    await light.policy("predicted_ttft")
    try:
        assert (await light.local.ask(CHAT, large(filler))).status == 200
        assert await light.unread() == unread + 1
    finally:
        await light.policy("round_robin")
    assert (await light.local.ask(CHAT, large(filler))).status == 200
    assert await light.unread() == unread + 1


async def test_a_pool_changes_its_policy_without_a_restart(light: Light) -> None:
    """One prompt rotates over all engines, then stays at its cache, then rotates again, in the same processes."""
    local = light.local
    processes = [*local.workers(), local.keeper(), *(child.pid for child in local.stack.children.values())]
    prompt = text(RNG, 1000)
    rotated = Counter([(await seen(local, prompt)).engine.address for _ in range(2 * ENGINES)])
    assert set(rotated.values()) == {2}
    await light.policy("predicted_ttft")
    new = text(RNG, 1000)
    stayed = [await seen(local, new) for _ in range(2 * ENGINES)]
    assert len({one.engine.address for one in stayed}) == 1
    assert [one.predicted > 900 for one in stayed] == [False] + [True] * (2 * ENGINES - 1)
    await light.policy("round_robin")
    again = Counter([(await seen(local, new)).engine.address for _ in range(2 * ENGINES)])
    assert set(again.values()) == {2}
    assert processes == [*local.workers(), local.keeper(), *(child.pid for child in local.stack.children.values())]
    for name in ("round_robin", "predicted_ttft"):
        assert await local.metric("warmpath_decisions_total", pool=POOL, policy=name) >= 2 * ENGINES


async def test_a_session_policy_reads_no_prompt_where_the_client_names_its_session(light: Light) -> None:
    """Placed by the header alone, a megabyte goes where the session is; without a name the prompt has to place it."""
    filler = text(RNG, MILLION // 4)
    await light.policy("session_hash")
    try:
        unread = await light.unread()
        for session in ("a", "b"):
            before = [await engine.prompt_tokens() for engine in light.local.engines]
            for _ in range(2):
                answer = await light.local.ask(CHAT, large(filler), {"x-session-id": session})
                assert answer.status == 200
            after = [await engine.prompt_tokens() for engine in light.local.engines]
            assert sum(now > then for then, now in zip(before, after, strict=True)) == 1
        assert await light.unread() == unread
        assert (await light.local.ask(CHAT, large(filler))).status == 200
        assert await light.unread() == unread + 1
    finally:
        await light.policy("round_robin")
