"""A request that waits at a worker, behind a real Envoy: it is held, told of, let go, and forgotten when it leaves."""

import asyncio
import contextlib
import io
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import SystemClock
from extproc.config import Config
from extproc.deciding import Outcome
from extproc.envoy.access_log import AccessLog
from extproc.envoy.contract import Call, Decision
from extproc.envoy.discovery import Discovery, Member, Roster
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, stop
from extproc.gossip import Gossip
from extproc.learner import Learner
from extproc.overload import Overload
from extproc.router import Router, Surroundings
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.overload_metrics import OverloadMetrics
from tests.ports import free_port
from tests.waiting import until
from tests.wire.envoy import running_envoy
from tests.wire.standins import Engine

PATIENCE_MS = 400
"""How long Envoy waits for an answer of the worker that does not ask for more."""


class Unheard:
    """Hears what a router records, and keeps nothing."""

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""


class Stack:
    """Envoy, one worker with its queue, and an engine that by its page runs one request while another waits."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        self.url = f"http://{config.gateway.listen}"
        numbers = itertools.count()
        known = {pool: PoolKnowledge(Priors()) for pool in config.pools}
        store = MemoryStore(SystemClock())
        self.around = Surroundings(config, self._fleet(), known, store, "r1", lambda: f"r1-{next(numbers)}")
        self.metrics = Metrics()
        self.around.gate = self.gate = Overload(self.around, OverloadMetrics(self.metrics.families), SystemClock())
        gossip = Gossip(store, known, "r1", 1000)
        self.router = Router(self.around, gossip, Unheard(), SystemClock())
        self.processor = Processor(self.router, Limits(body_mode=config.gateway.body_mode, fail_open=False))
        self.log = AccessLog(Learner(self.around, gossip, self.metrics))

    def _fleet(self) -> Fleet:
        at = self.engine.address
        main = Pool("main", "least_tokens", (Endpoint("e", at, 1e9, running=1, waiting=1),))
        small = Pool("small", "least_tokens", (Endpoint("e", at, 1e9),))
        return Fleet({"main": main, "small": small}, {"m": "main", "s": "small"}, "main")

    def waiting(self) -> int:
        """How many wait."""
        return len(self.gate.lines["main"])

    async def fill(self) -> list[Decision]:
        """Decide on as many requests as the engine may have, past Envoy."""
        await until(lambda: self.gate.lines["main"].full.room.near)
        body = json.dumps(self.body("m")).encode()
        return [await self.router.decide(Call("POST", "/v1/chat/completions", {}, body)) for _ in range(2)]

    @staticmethod
    def body(model: str) -> Mapping[str, Any]:
        """A short chat."""
        return {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}

    async def chat(self, http: aiohttp.ClientSession, model: str = "m") -> tuple[int, Mapping[str, str], bytes]:
        """Send one request; status, headers and body of its answer."""
        data = io.BytesIO(json.dumps(self.body(model)).encode())
        sent = {"content-type": "application/json"}
        async with http.post(f"{self.url}/v1/chat/completions", data=data, headers=sent) as answer:
            return answer.status, {name.lower(): text for name, text in answer.headers.items()}, await answer.read()


@contextlib.asynccontextmanager
async def running(mode: str, **overload: Any) -> AsyncIterator[Stack]:
    """All of it, on free ports and sockets of a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="wp-"))
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        engine = Engine()
        await engine.start()
        cleanup.push_async_callback(engine.stop)
        plain = {
            "models": {"m": {"pool": "main"}, "s": {"pool": "small"}},
            "pools": {
                "main": {"endpoints": [engine.address], "overload": {"saturation": {"waiting": 1}, **overload}},
                "small": {"endpoints": [engine.address]},
            },
            "gateway": {
                "listen": f"127.0.0.1:{free_port()}",
                "admin": f"127.0.0.1:{free_port()}",
                "body_mode": mode,
                "fail_open": False,
                "message_timeout_ms": PATIENCE_MS,
                "sidecar": {"socket_dir": str(folder), "workers": 1},
            },
            "routing": {"policy": "least_tokens"},
            "telemetry": {"access_log_flush_ms": 10, "scrape_ms": 50},
        }
        stack = Stack(msgspec.convert(plain, Config), engine)
        members = [Member(engine.address)]
        discovery, health = Discovery(Roster({"main": members, "small": members})), Health()
        watch = asyncio.create_task(stack.gate.run())
        for socket, services in (("worker-0", (stack.processor, stack.log, health)), ("keeper", (discovery, health))):
            server = make_server([service.handler() for service in services], max_body_bytes=1 << 20)
            bind(server, f"unix:{folder / socket}.sock")
            await server.start()
            busy = [stack.processor] if stack.processor in services else []
            cleanup.push_async_callback(stop, server, health, busy, [stack.log, discovery], drain_s=5)
        health.set_ready(True)
        cleanup.callback(watch.cancel)
        cleanup.push_async_callback(stack.gate.close_after, 0.0)
        await cleanup.enter_async_context(running_envoy(stack.config))
        yield stack


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_a_request_waits_longer_than_envoy_waits_for_a_worker(mode: str) -> None:
    """Envoy is asked for patience: after four times its own limit the request is answered as if nothing had been."""
    async with running(mode, action="queue", queue={"max_wait_s": 20}) as stack, aiohttp.ClientSession() as http:
        held = await stack.fill()
        waiting = asyncio.create_task(stack.chat(http))
        await until(lambda: stack.waiting() == 1)
        await asyncio.sleep(4 * PATIENCE_MS / 1000)
        assert not waiting.done()
        await stack.router.settle(held[0])
        status, headers, _ = await waiting
        assert (status, "x-warmpath-fallback" in headers) == (200, False)


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_a_client_that_leaves_is_waited_for_no_more(mode: str) -> None:
    """It is out of the queue while the engine is still full, and the next in line has the place that gets free."""
    async with running(mode, action="queue") as stack, aiohttp.ClientSession() as http:
        held = await stack.fill()
        leaver = asyncio.create_task(stack.chat(http))
        await until(lambda: stack.waiting() == 1)
        stays = asyncio.create_task(stack.chat(http))
        await until(lambda: stack.waiting() == 2)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        await until(lambda: stack.waiting() == 1)
        await stack.router.settle(held[0])
        assert (await stays)[0] == 200
        assert stack.processor.counts.held_bytes == 0


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_a_wait_that_is_over_is_answered_503(mode: str) -> None:
    """With the reason, an OpenAI-shaped body, and no word on when to come again (D2)."""
    async with running(mode, action="queue", queue={"max_wait_s": 0.8}) as stack, aiohttp.ClientSession() as http:
        await stack.fill()
        status, headers, body = await stack.chat(http)
        assert (status, headers["x-warmpath-reason"], "retry-after" in headers) == (503, "queue_timeout", False)
        assert json.loads(body)["error"]["code"] == 503


async def test_a_refusal_says_when_to_come_again() -> None:
    """429 with whole seconds (D1, D2)."""
    async with running("buffered", action="reject") as stack, aiohttp.ClientSession() as http:
        await stack.fill()
        status, headers, body = await stack.chat(http)
        assert (status, headers["x-warmpath-reason"]) == (429, "overloaded")
        assert 1 <= int(headers["retry-after"]) <= 30
        assert json.loads(body)["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_an_answer_of_another_model_says_so(mode: str) -> None:
    """The engine gets that model's name, and the client hears it in a header; other answers have none."""
    async with running(mode, action="fallback", fallback="s") as stack, aiohttp.ClientSession() as http:
        own = await stack.chat(http)
        await until(lambda: stack.processor.counts.settled == 1)
        await stack.fill()
        status, headers, _ = await stack.chat(http)
        assert (status, headers.get("x-warmpath-fallback")) == (200, "s")
        assert (own[0], "x-warmpath-fallback" in own[1]) == (200, False)
        assert json.loads(stack.engine.last_body)["model"] == "s"
