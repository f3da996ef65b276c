"""Another endpoint answers than the one that was picked, behind a real Envoy: everything follows the request."""

import asyncio
import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import SystemClock
from extproc.config import Config, Gateway, Model, Sidecar, Telemetry
from extproc.config import Pool as PoolSettings
from extproc.deciding import Outcome
from extproc.envoy.access_log import AccessLog
from extproc.envoy.discovery import Discovery, Member, Roster
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, stop
from extproc.gossip import Gossip
from extproc.learner import Learner
from extproc.router import Router, Surroundings
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.values import Load, Reservation
from extproc.telemetry.metrics import Metrics
from tests.ports import free_port
from tests.waiting import until, until_async
from tests.wire.envoy import running_envoy
from tests.wire.standins import Engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

PICKED, SERVING = "picked", "serving"
PROMPT = "A prompt of some length about a river and its bridges. " * 40


class Unheard:
    """Hears what a router records, and keeps nothing."""

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""


@dataclass
class Stack:
    """Envoy, one worker's router with its ledger, and two endpoints, of which decisions prefer `PICKED`."""

    url: str
    http: aiohttp.ClientSession
    around: Surroundings
    decided: list[str]
    log: AccessLog
    roster: Roster
    discovery: Discovery
    serving: Engine

    @property
    def known(self) -> PoolKnowledge:
        """What the worker knows of the pool."""
        return self.around.knowledge["main"]

    async def members(self, picked: str) -> None:
        """Let `picked` be the address of the preferred endpoint, with nothing learnt, and wait until Envoy has it."""
        endpoints = (Endpoint(PICKED, picked, 1e6), Endpoint(SERVING, self.serving.address, 1e4))
        self.around.fleet = Fleet({"main": Pool("main", "predicted_ttft", endpoints)}, {"m": "main"}, "main")
        self.known.retain(())
        acknowledged = self.discovery.counts.acknowledged
        self.roster.replace({"main": [Member(picked), Member(self.serving.address)]})
        await until(lambda: self.discovery.counts.acknowledged > acknowledged)

    async def chat(self, session: str, query: str = "") -> str:
        """Send one request of a session; the whole answer."""
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": PROMPT + session}]}
        url, headers = f"{self.url}/v1/chat/completions{query}", {"x-session-id": session}
        async with self.http.post(url, data=io.BytesIO(json.dumps(body).encode()), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.text()

    def last(self) -> Reservation:
        """What was decided last."""
        made = self.around.recent.find(self.decided[-1])
        assert made is not None
        return made.reservation

    async def running(self) -> dict[str, int]:
        """Requests in flight by endpoint."""
        loads = await self.around.store.loads("main")
        return {endpoint: load.running for endpoint, load in loads.items() if load.running}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """Everything but the endpoint that fails, on free ports and sockets of a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="wp-"))
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        serving = Engine()
        await serving.start()
        cleanup.push_async_callback(serving.stop)
        gateway = Gateway(
            listen=f"127.0.0.1:{free_port()}",
            admin=f"127.0.0.1:{free_port()}",
            sidecar=Sidecar(socket_dir=str(folder), workers=1),
        )
        config = Config(
            models={"m": Model(pool="main")},
            pools={"main": PoolSettings(endpoints=[serving.address])},
            gateway=gateway,
            telemetry=Telemetry(access_log_flush_ms=10),
        )
        store, decided = MemoryStore(SystemClock()), list[str]()

        def new_charge() -> str:
            decided.append(f"r1-{len(decided)}")
            return decided[-1]

        known = {"main": PoolKnowledge(Priors())}
        around = Surroundings(config, Fleet({}, {}, ""), known, store, "r1", new_charge)
        gossip = Gossip(store, known, "r1", 1000)
        processor = Processor(Router(around, gossip, Unheard(), SystemClock()), Limits())
        roster, health = Roster({"main": [Member(serving.address)]}), Health()
        log, discovery = AccessLog(Learner(around, gossip, Metrics())), Discovery(roster)
        for socket, services in (("worker-0", (processor, log, health)), ("keeper", (discovery, health))):
            server = make_server([service.handler() for service in services], max_body_bytes=gateway.max_body_bytes)
            bind(server, f"unix:{folder / socket}.sock")
            await server.start()
            busy = [processor] if processor in services else []
            cleanup.push_async_callback(stop, server, health, busy, [log, discovery], drain_s=5)
        health.set_ready(True)
        await cleanup.enter_async_context(running_envoy(config))
        http = await cleanup.enter_async_context(aiohttp.ClientSession())
        yield Stack(f"http://{gateway.listen}", http, around, decided, log, roster, discovery, serving)


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read the beginning of a request and reset the connection."""
    await reader.read(1)
    writer.transport.abort()


@contextlib.asynccontextmanager
async def failing(how: str) -> AsyncIterator[str]:
    """Address of an endpoint that gives no answer."""
    if how == "refuses":
        yield f"127.0.0.1:{free_port()}"
        return
    server = await asyncio.start_server(hang_up, "127.0.0.1", port := free_port())
    async with server:
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize("how", ["refuses", "resets"])
async def test_charge_profile_and_session_follow_the_request_while_it_runs(stack: Stack, how: str) -> None:
    """The next of the list answers: long before its end, ledger, profiles and pin are as if that had been picked."""
    async with failing(how) as picked:
        await stack.members(picked)
        answering = asyncio.create_task(stack.chat(how, "?stream=4"))

        async def moved() -> bool:
            return await stack.running() == {SERVING: 1}

        await until_async(moved)
        assert not answering.done()
        assert stack.known.held(PICKED) == 0
        assert stack.known.held(SERVING) > 0
        ended = stack.log.counts.entries
        assert "[DONE]" in await answering

        async def over() -> bool:
            return await stack.running() == {} and stack.log.counts.entries > ended

        await until_async(over)
        assert (await stack.around.store.loads("main")).get(PICKED, Load()).backlog_tokens == 0.0
        assert (stack.known.held(PICKED), stack.known.held(SERVING) > 0) == (0, True)
        assert "[DONE]" in await stack.chat(how, "?stream=0")
        last = stack.last()
        assert (last.endpoint, last.pinned) == (SERVING, True)


async def test_the_end_of_a_short_answer_moves_the_session(stack: Stack) -> None:
    """An answer that ends before Envoy has told of its second attempt: the entry at its end tells it."""
    async with failing("refuses") as picked:
        await stack.members(picked)
        ended, attempts = stack.log.counts.entries, stack.log.counts.intermediate
        await stack.chat("short", "?stream=0")
        await until(lambda: stack.log.counts.entries > ended)
        assert stack.log.counts.intermediate == attempts
        await until(lambda: stack.known.held(SERVING) > 0)
        assert stack.known.held(PICKED) == 0
        await stack.chat("short", "?stream=0")
        last = stack.last()
        assert (last.endpoint, last.pinned) == (SERVING, True)


async def test_a_request_that_its_pick_answers_is_told_of_once(stack: Stack) -> None:
    """Envoy looks at running requests, and writes nothing of those at their first attempt."""
    await stack.members(stack.serving.address)
    before = stack.log.counts.intermediate
    ended = stack.log.counts.entries
    await stack.chat("calm", "?stream=1.2")
    await until(lambda: stack.log.counts.entries > ended)
    assert stack.log.counts.intermediate == before
