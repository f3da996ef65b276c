"""Ways through the relay and past it: other engines, stalls, clients that leave, and the relay's own death."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from tests.acceptance import processes
from tests.acceptance.governance.relayed import (
    CHAT,
    COMPLETIONS,
    PATIENT,
    RELAYED,
    counts,
    request,
    server_of,
    streaming,
    undisturbed,
)
from tests.acceptance.journal import Journal
from tests.acceptance.local import MODEL, POOL, Engine, Local, ask, chat_body, configuration, running, simulated
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROFILES = {POOL: "vllm-0.33", "old": "vllm-0.11", "sglang": "sglang", "trt": "trtllm"}
TOKENS = 12
MIB = 1 << 20
RELAY = "warmpath_relay_requests_total"


class Site(NamedTuple):
    """A stack with a pool of two engines of each kind."""

    local: Local
    engines: dict[str, list[Engine]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(journal: Journal, folder: Path) -> AsyncIterator[Site]:
    """The stack; its relay gives an engine a second."""
    async with contextlib.AsyncExitStack() as stack:
        engines = {}
        for pool, profile in PROFILES.items():
            model = MODEL if pool == POOL else pool
            arguments = ("--profile", profile, "--model", model, "--step-ms", "5")
            engines[pool] = await stack.enter_async_context(simulated(journal, each=2, arguments=arguments))
        relay = {"enabled": True, "stall_s": 1.0, "paths": ["/always/v1"]}
        pools = {pool: [one.address for one in members] for pool, members in engines.items()}
        document = configuration(pools, relay=relay, **PATIENT)
        everyone = [one for members in engines.values() for one in members]
        local = await stack.enter_async_context(running(journal, folder / "warmpath.yaml", document, everyone))
        yield Site(local, engines)


def relay_pid(local: Local) -> int:
    """Process id of the relay."""
    [relay] = [one for one in processes.children(local.stack.children["sidecar"].pid) if " relay " in one.command]
    return relay.pid


async def cut_wherever_it_goes(site: Site, pool: str, tokens: int) -> None:
    """The engine that a session is pinned to cuts its next stream after so many tokens."""
    before = [await one.prompt_tokens() for one in site.engines[pool]]
    model = MODEL if pool == POOL else pool
    await site.local.chat("Who has this session?", session=pool, model=model)
    after = [await one.prompt_tokens() for one in site.engines[pool]]
    [pinned] = [one for one, was, now in zip(site.engines[pool], before, after, strict=True) if now > was]
    await pinned.control("fail", mode="cut", after_tokens=tokens + 1)


@pytest.mark.parametrize(
    ("pool", "path"),
    [("sglang", CHAT), ("sglang", COMPLETIONS), ("old", CHAT), ("old", COMPLETIONS), ("trt", COMPLETIONS)],
)
async def test_every_kind_of_engine_is_continued_in_its_way(site: Site, pool: str, path: str) -> None:
    """By token ids where the engine tells them, else by an open message, or behind the prompt; at any position."""
    # Four letters are one token: the prompt ends where a token does.
    body = request(path, "Tell me more of the ship.   ", pool, TOKENS)
    expected = await undisturbed(site.local, path, body)
    for position in range(1, TOKENS):
        await cut_wherever_it_goes(site, pool, position)
        async with streaming(site.local, path, body, RELAYED | {"x-session-id": pool}) as stream:
            await stream.rest()
        assert stream.text == expected.text, position
        assert stream.done
        assert [counts(one) for one in stream.usages] == [expected.usage]
        assert stream.form == (1, int(path == CHAT), ["length"])


async def test_a_chat_without_a_limit_is_continued(site: Site) -> None:
    """Its length is what the context holds, which the relay does not know: it goes on as an open message."""
    body = request(CHAT, "On and on.", MODEL, TOKENS)
    del body["max_tokens"]
    expected = await undisturbed(site.local, CHAT, body)
    await cut_wherever_it_goes(site, POOL, 30)
    async with streaming(site.local, CHAT, body, RELAYED | {"x-session-id": POOL}) as stream:
        await stream.rest()
    assert stream.text == expected.text
    assert stream.form == (1, 1, ["stop"])
    assert [counts(one) for one in stream.usages] == [expected.usage]


@pytest.mark.parametrize(
    ("pool", "fields"),
    [
        ("trt", {}),
        (POOL, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (POOL, {"n": 2}),
        (POOL, {"response_format": {"type": "json_object"}}),
        (POOL, {"logprobs": True}),
    ],
)
async def test_what_cannot_be_continued_says_so_in_the_stream(site: Site, pool: str, fields: dict[str, Any]) -> None:
    """Tokens were sent: the stream ends in an error, and not as if the answer were whole."""
    await cut_wherever_it_goes(site, pool, 4)
    body = request(CHAT, "More.", MODEL if pool == POOL else pool, TOKENS, **fields)
    async with streaming(site.local, CHAT, body, RELAYED | {"x-session-id": pool}) as stream:
        await stream.rest()
    assert stream.text
    assert stream.error is not None
    assert stream.error["code"] == 503
    assert not stream.done


async def test_an_engine_that_stands_still_is_left(site: Site) -> None:
    """No byte for `stall_s`: the answer goes on elsewhere, and the engine is rid of the request."""
    body = request(CHAT, "Stand still.", MODEL, 100)
    expected = await undisturbed(site.local, CHAT, body)
    async with streaming(site.local, CHAT, body) as stream:
        serving = await server_of(site.engines[POOL])
        await stream.tokens(5)
        async with serving.frozen("engine"):
            await stream.rest()
    assert stream.text == expected.text

    async def rid() -> bool:
        return await serving.live() == 0

    await until_async(rid)


async def test_an_engine_is_let_go_when_the_client_leaves(site: Site) -> None:
    """Through the relay as without it."""
    async with streaming(site.local, CHAT, request(CHAT, "Leave.", MODEL, 50_000)) as stream:
        serving = await server_of(site.engines[POOL])
        await stream.tokens(1)

    async def let_go() -> bool:
        return await serving.live() == 0 and await site.local.in_flight() == 0

    await until_async(let_go)


async def test_a_client_that_stops_reading_holds_nobody_up_and_loses_nothing(site: Site) -> None:
    """What waits for it is bounded, others are served, and when it reads on it finds the whole answer."""
    body = request(CHAT, "Read this later.", MODEL, 4000)
    expected = await undisturbed(site.local, CHAT, body)
    async with streaming(site.local, CHAT, body) as stream:
        await stream.tokens(1)
        for number in range(20):
            answer = await site.local.ask(body=chat_body(f"Am I served? {number}"), headers=RELAYED)
            assert answer.status == 200
        assert await site.local.metric("warmpath_relay_held_bytes") < 8 * MIB
        # Longer than an engine may be silent: it is the client that is, and the engine is not to blame.
        await asyncio.sleep(3.0)
        deaths = await site.local.metric("warmpath_relay_deaths_total")
        await stream.rest()
    assert stream.text == expected.text
    assert stream.done
    assert await site.local.metric("warmpath_relay_deaths_total") == deaths


async def test_what_the_sidecar_learns_is_what_it_learns_without_a_relay(site: Site) -> None:
    """Each try ends as an ordinary request does: answered, with the engine's own usage."""
    body = request(CHAT, "Learn.", MODEL, TOKENS)
    before: tuple[float, ...] = ()

    async def known() -> tuple[float, ...]:
        labels: list[dict[str, str]] = [{"outcome": "ok"}, {"outcome": "disconnected"}]
        requests = [await site.local.metric("warmpath_requests_total", pool=POOL, **one) for one in labels]
        return (*requests, await site.local.metric("warmpath_output_tokens_total", pool=POOL))

    async def settled() -> bool:
        nonlocal before
        last, before = before, await known()
        return last == before and await site.local.in_flight() == 0

    await until_async(settled)
    ok, left, tokens = before
    for _ in range(5):
        async with streaming(site.local, CHAT, body) as stream:
            await stream.rest()

    async def learnt() -> bool:
        return (await known())[0] == ok + 5

    await until_async(learnt)
    assert await known() == (ok + 5, left, tokens + 5 * TOKENS)


async def relayed(local: Local) -> float:
    """Requests that went through the relay."""
    return await local.metric(RELAY)


async def until_relaying(local: Local) -> None:
    """Wait until requests that ask for the relay go through it."""

    async def relays() -> bool:
        before = await relayed(local)
        await local.ask(body=chat_body("Back?"), headers=RELAYED)
        return await relayed(local) > before

    await until_async(relays)


@pytest.mark.parametrize(
    ("path", "headers", "through"),
    [
        (CHAT, {}, False),
        (CHAT, {"x-warmpath-relay": "1"}, True),
        (CHAT, {"x-warmpath-relay": "0"}, False),
        (CHAT, {"x-warmpath-relay": "yes"}, False),
        (f"/always{CHAT}", {}, True),
        (f"/always{CHAT}?q=1", {"x-warmpath-relay": "1"}, True),
        (f"/always{CHAT}", {"x-warmpath-relay": "0"}, False),
        ("/v1/embeddings", {"x-warmpath-relay": "1"}, False),
    ],
)
async def test_a_header_or_a_path_asks_for_the_relay(
    site: Site, path: str, headers: dict[str, str], through: bool
) -> None:
    """Chats and completions alone; on a configured path the header declines."""
    before = await relayed(site.local)
    body = b'{"model":"sim","input":"x"}' if "embeddings" in path else chat_body("Which way?")
    answer = await site.local.ask(path, body, headers)
    # The simulator serves no prefixes: its 404 has come the same way.
    assert answer.status == (404 if path.startswith("/always") else 200)
    assert await relayed(site.local) - before == through
    assert "x-warmpath-served" not in answer.headers


async def test_pages_of_the_relay_are_not_public(site: Site) -> None:
    """Only requests for an answer reach it from outside."""
    for page in ("/metrics", "/healthz"):
        answer = await site.local.ask(page, headers=RELAYED, method="GET")
        assert b"warmpath_relay" not in answer.body


async def test_a_client_cannot_choose_by_avoiding(site: Site) -> None:
    """The header that leaves endpoints out is the relay's alone."""
    await site.local.chat("Stay.", session="avoid")
    _, pinned = await site.local.chat_served("Stay.", session="avoid")
    headers = {"x-session-id": "avoid", "x-warmpath-avoid": pinned.address}
    before = await pinned.prompt_tokens()
    assert (await site.local.ask(body=chat_body("Stay."), headers=headers)).status == 200
    assert await pinned.prompt_tokens() > before


async def test_requests_go_straight_to_engines_while_the_relay_is_dead(site: Site) -> None:
    """Its own streams are cut; nobody else notices, before Envoy has found out and after. It comes back by itself."""
    local = site.local
    async with streaming(local, CHAT, request(CHAT, "Cut short.", MODEL, 50_000)) as stream:
        await stream.tokens(1)
        pid = relay_pid(local)
        os.kill(pid, signal.SIGSTOP)  # it must not be back before anybody was without it
        os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*(local.ask(body=chat_body(f"{n}"), headers=RELAYED) for n in range(20)))
        assert [one.status for one in answers] == [200] * 20
        with pytest.raises(aiohttp.ClientError):
            await stream.rest()

    await until_relaying(local)
    assert (await local.ready()).json["components"]["relay"] == "ok"


async def test_requests_that_a_hanging_relay_has_taken_are_answered_without_it(site: Site) -> None:
    """Those that come before Envoy has found out wait no longer than that takes, and then go straight to engines."""
    local = site.local
    await until_relaying(local)
    pid = relay_pid(local)
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(local.ask(body=chat_body(f"{n}"), headers=RELAYED) for n in range(20)))
        assert [one.status for one in answers] == [200] * 20
        async with streaming(local, CHAT, request(CHAT, "Straight.", MODEL, TOKENS)) as stream:
            await stream.rest()
        assert stream.done
    finally:
        with contextlib.suppress(ProcessLookupError):  # it is ended once it has hung for long
            os.kill(pid, signal.SIGCONT)
    await until_relaying(local)


async def test_requests_go_straight_to_engines_while_the_relay_hangs(site: Site) -> None:
    """Envoy's health checks find a frozen relay within seconds; its connections are then given up."""
    local, pid = site.local, relay_pid(site.local)
    os.kill(pid, signal.SIGSTOP)
    try:

        async def straight() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    return (await local.ask(body=chat_body("Anybody?"), headers=RELAYED)).status == 200
            return False

        await until_async(straight)
        page = await ask(local.http, f"http://{local.stack.config.gateway.admin}/clusters", method="GET")
        states = [line for line in page.body.decode().splitlines() if "relay.sock::health_flags" in line]
        assert "failed_active_hc" in states[0]
    finally:
        with contextlib.suppress(ProcessLookupError):  # it is ended once it has hung for long
            os.kill(pid, signal.SIGCONT)
