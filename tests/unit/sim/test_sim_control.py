"""Faults on demand: what /sim/* makes an engine do."""

import asyncio
from typing import Any

import aiohttp
import pytest

from extproc.sim.fleet import SimFleet
from extproc.sim.settings import SimSettings
from tests.unit.sim.client import settled, state

BODY: dict[str, Any] = {"model": "sim", "prompt": "hello " * 50, "max_tokens": 10}


async def order(client: aiohttp.ClientSession, what: str, **body: Any) -> Any:
    """Give the engine an order."""
    async with client.post(f"/sim/{what}", json=body) as response:
        assert response.status == 200
        return await response.json()


async def status_of(client: aiohttp.ClientSession) -> int:
    """Ask for a completion; return the status."""
    async with client.post("/v1/completions", json=BODY) as response:
        await response.read()
        return response.status


async def test_without_the_switch_there_are_no_control_routes() -> None:
    """A simulated engine that strangers reach cannot be broken by them."""
    async with (
        SimFleet() as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
        client.post("/sim/restart", json={}) as response,
    ):
        assert response.status == 404


async def test_unknown_orders_and_bodies_are_refused(client: aiohttp.ClientSession) -> None:
    """404 for a route that is none, 400 for a body of another shape."""
    async with client.post("/sim/nothing", json={}) as response:
        assert response.status == 404
    async with client.post("/sim/slow", json={"factor": "very"}) as response:
        assert response.status == 400


async def test_the_next_requests_fail_with_a_status(client: aiohttp.ClientSession) -> None:
    """So many, then all is well."""
    await order(client, "fail", count=2, status=503)
    assert [await status_of(client) for _ in range(3)] == [503, 503, 200]


async def test_the_next_request_is_reset(client: aiohttp.ClientSession) -> None:
    """The connection breaks without an answer."""
    await order(client, "fail", mode="reset")
    with pytest.raises(aiohttp.ClientConnectionError):
        await status_of(client)
    assert await status_of(client) == 200


async def test_a_stream_fails_in_the_middle(client: aiohttp.ClientSession) -> None:
    """An error event inside status 200, then [DONE], as vLLM does when its core dies."""
    await order(client, "fail", mode="stream", after_tokens=3)
    async with client.post("/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.status == 200
        text = await response.text()
    assert text.count('"text"') < 10
    assert 'data: {"error":{"message":"EngineCore' in text
    assert text.endswith("data: [DONE]\n\n")
    assert (await settled(client, live=0))["blocks_free"] == 1024


async def test_a_stream_is_cut_in_the_middle(client: aiohttp.ClientSession) -> None:
    """The connection breaks after some tokens."""
    await order(client, "fail", mode="cut", after_tokens=3)
    async with client.post("/v1/completions", json=BODY | {"stream": True}) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_a_frozen_http_server_answers_nothing_until_it_thaws(client: aiohttp.ClientSession) -> None:
    """Health checks hang too."""
    await order(client, "freeze", scope="http")
    health = asyncio.create_task(client.get("/health"))
    await settled(client, held=1)
    assert not health.done()
    await order(client, "freeze", scope="http", frozen=False)
    assert (await health).status == 200


async def test_a_request_whose_client_left_a_frozen_server_is_forgotten(client: aiohttp.ClientSession) -> None:
    """Thawing must not start work that nobody waits for."""
    await order(client, "freeze", scope="http")
    gone = asyncio.create_task(status_of(client))
    await settled(client, held=1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await asyncio.sleep(0.05)
    await order(client, "freeze", scope="http", frozen=False)
    assert (await state(client))["live"] == 0


async def test_a_reset_cache_finds_nothing(client: aiohttp.ClientSession) -> None:
    """As vLLM's /reset_prefix_cache."""
    await status_of(client)
    assert (await state(client))["blocks_cached"] > 0
    assert await order(client, "reset_prefix_cache") == {"success": True}
    assert (await state(client))["blocks_cached"] == 0


async def test_a_slow_engine_takes_longer_in_its_own_time(client: aiohttp.ClientSession) -> None:
    """Busy engine seconds grow by the factor."""
    await status_of(client)
    healthy = (await state(client))["busy_s"]
    await order(client, "reset_prefix_cache")
    await order(client, "slow", factor=10.0)
    await status_of(client)
    assert (await state(client))["busy_s"] == pytest.approx(11 * healthy)


async def test_a_restart_drops_cache_and_connections_and_keeps_the_address(
    fleet: SimFleet, client: aiohttp.ClientSession
) -> None:
    """Streams break, connections are refused while it is down, then an empty engine with a new start time is back."""
    async with client.get("/metrics") as response:
        before = await response.text()
    await status_of(client)
    address = fleet.addresses[0]
    long = BODY | {"stream": True, "max_tokens": 4000, "ignore_eos": True}
    async with client.post("/v1/completions", json=long) as stream:
        await stream.content.readany()
        await order(client, "restart", down_s=0.1)
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream.read()
    with pytest.raises(aiohttp.ClientConnectionError):
        await client.get("/health")
    while True:
        try:
            async with client.get("/metrics") as response:
                after = await response.text()
            break
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.02)
    assert fleet.addresses == [address]
    assert (await state(client))["blocks_cached"] == 0
    started = [page.split("\nprocess_start_time_seconds ", 1)[1].split("\n")[0] for page in (before, after)]
    assert started[0] != started[1]


async def test_a_restart_forgets_slowness() -> None:
    """Only what belongs to the engine; how requests fail next stays ordered."""
    async with (
        SimFleet(1, SimSettings(control=True, time_factor=20.0)) as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
    ):
        await order(client, "slow", factor=50.0)
        await order(client, "fail", count=1, status=500)
        await order(client, "restart")
        await asyncio.sleep(0.05)
        assert fleet.endpoints[0].surface.pacer.engine.slowdown == 1.0
        assert [await status_of(client) for _ in range(2)] == [500, 200]
