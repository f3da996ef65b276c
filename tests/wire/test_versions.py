"""Versions of a model behind a real Envoy: what engines get of the request, and what the client is told."""

import contextlib
import io
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from extproc.clock import SystemClock
from extproc.config import Config
from extproc.envoy.access_log import AccessLog
from extproc.envoy.contract import Attempt, Served
from extproc.envoy.discovery import Discovery, Member, Roster
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, stop
from extproc.model_list import ModelList
from extproc.router import Router, Surroundings
from extproc.snapshot import build
from extproc.splits import with_splits
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from tests.ports import free_port
from tests.unit.router.versions import Notes
from tests.unit.top.test_splits import rollout
from tests.waiting import until
from tests.wire.envoy import running_envoy
from tests.wire.standins import Engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOLS = ("old", "new", "alone")
HEADER = "x-warmpath-version"


class Seen:
    """Keeps what the access log tells."""

    def __init__(self) -> None:
        self.served: list[Served] = []

    def observe(self, served: Served) -> None:
        """See `contract.Observer`."""
        self.served.append(served)

    def attempt_failed(self, attempt: Attempt) -> None:
        """See `contract.Observer`."""

    def tried_again(self, served: Served) -> None:
        """See `contract.Observer`."""


class Answer(msgspec.Struct):
    """What a client got, and what the engine got for it."""

    status: int
    version: str | None
    json: dict[str, Any]

    @property
    def sent(self) -> dict[str, str]:
        """Headers that the engine got, names in lower case."""
        return {name.lower(): value for name, value in self.json["headers"].items()}


class Stack:
    """Envoy, one worker, and one engine for each pool."""

    def __init__(self, config: Config, engines: dict[str, Engine], http: aiohttp.ClientSession) -> None:
        self.engines = engines
        self.seen = Seen()
        self._http = http
        self._url = f"http://{config.gateway.listen}"
        numbers, clock = itertools.count(), SystemClock()
        known = {pool: PoolKnowledge(Priors()) for pool in POOLS}
        members = {pool: {"e": engine.address} for pool, engine in engines.items()}
        fleet = build(config, members, {}, known, clock.monotonic())
        self._around = Surroundings(config, fleet, known, MemoryStore(clock), "r1", lambda: f"r1-{next(numbers)}")
        router = Router(self._around, Notes(), Notes(), clock)
        self.processor = Processor(
            ModelList(router, lambda: config), Limits(body_mode=config.gateway.body_mode, fail_open=False)
        )
        self.log = AccessLog(self.seen)

    def share(self, share: float, step: int = 0) -> None:
        """The canary's share from now on, and the step of its rollout."""
        self._around.fleet = with_splits(self._around.fleet, self._around.config, rollout(share, step=step))

    async def chat(self, model: str = "m", **headers: str) -> Answer:
        """A short chat; underscores of header names stand for dashes."""
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}]}).encode()
        sent = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        url = f"{self._url}/v1/chat/completions"
        async with self._http.post(url, data=io.BytesIO(body), headers=sent) as answer:
            return Answer(answer.status, answer.headers.get(HEADER), await answer.json())

    async def models(self) -> list[str]:
        """Names that `/v1/models` lists."""
        async with self._http.get(f"{self._url}/v1/models") as answer:
            return [each["id"] for each in (await answer.json())["data"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "duplex"])
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """One stack in each body mode, on free ports and sockets of a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="wp-"))
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        engines = {pool: Engine() for pool in POOLS}
        for engine in engines.values():
            await engine.start()
            cleanup.push_async_callback(engine.stop)
        versions = {
            "old": {"pool": "old", "weight": 1, "served_as": "org/m-1"},
            "new": {"pool": "new", "served_as": "org/m-2", "adapter": {"name": "tuned"}},
        }
        plain = {
            "models": {"m": {"versions": versions, "aliases": ["gpt"]}, "one": {"pool": "alone", "aliases": ["uno"]}},
            "pools": {pool: {"endpoints": [engine.address]} for pool, engine in engines.items()},
            "gateway": {
                "listen": f"127.0.0.1:{free_port()}",
                "admin": f"127.0.0.1:{free_port()}",
                "body_mode": request.param,
                "fail_open": False,
                "sidecar": {"socket_dir": str(folder), "workers": 1},
            },
            "rollouts": {"testers": ["*"]},
            "telemetry": {"access_log_flush_ms": 10},
        }
        config = msgspec.convert(plain, Config)
        http = await cleanup.enter_async_context(aiohttp.ClientSession())
        running, health = Stack(config, engines, http), Health()
        discovery = Discovery(Roster({pool: [Member(engine.address)] for pool, engine in engines.items()}))
        for socket, services in (
            ("worker-0", (running.processor, running.log, health)),
            ("keeper", (discovery, health)),
        ):
            server = make_server([service.handler() for service in services], max_body_bytes=1 << 20)
            bind(server, f"unix:{folder / socket}.sock")
            await server.start()
            busy = [running.processor] if running.processor in services else []
            cleanup.push_async_callback(stop, server, health, busy, [running.log, discovery], drain_s=5)
        health.set_ready(True)
        await cleanup.enter_async_context(running_envoy(config))
        yield running


def told(engine: Engine) -> dict[str, Any]:
    """The last body that an engine got."""
    found: dict[str, Any] = json.loads(engine.last_body)
    return found


@pytest.mark.parametrize("model", ["m", "gpt"])
@pytest.mark.parametrize(("share", "version", "served"), [(0.0, "old", "org/m-1"), (1.0, "new", "tuned")])
async def test_the_versions_engine_gets_its_own_name_and_the_client_hears_which_one(
    stack: Stack, model: str, share: float, version: str, served: str
) -> None:
    """By the model's name and by its alias: body rewritten for the version, and `x-warmpath-version` on the answer."""
    stack.share(share)
    answer = await stack.chat(model)
    assert (answer.status, answer.version) == (200, version)
    assert answer.json["endpoint"] == stack.engines[version].address
    assert told(stack.engines[version])["model"] == served


async def test_a_testers_header_ends_at_the_gateway(stack: Stack) -> None:
    """It chooses, and no engine sees it; whoever chooses nothing gets what the weights give."""
    stack.share(0.0)
    answer = await stack.chat(x_warmpath_version="new", x_other="kept")
    assert (answer.status, answer.version) == (200, "new")
    assert answer.json["endpoint"] == stack.engines["new"].address
    assert HEADER not in answer.sent
    assert answer.sent["x-other"] == "kept"
    assert (await stack.chat()).version == "old"


async def test_a_version_that_there_is_not_is_refused_with_the_names(stack: Stack) -> None:
    """400 in OpenAI's shape."""
    answer = await stack.chat(x_warmpath_version="newer")
    assert (answer.status, answer.json["error"]["code"]) == (400, 400)
    assert "`old`, `new`" in answer.json["error"]["message"]


@pytest.mark.parametrize("model", ["one", "uno"])
async def test_a_model_with_one_version_says_nothing_of_versions(stack: Stack, model: str) -> None:
    """No header on the answer, whatever the client sent; the alias is rewritten there too."""
    answer = await stack.chat(model, x_warmpath_version="anything")
    assert (answer.status, answer.version) == (200, None)
    assert HEADER not in answer.sent
    assert told(stack.engines["alone"])["model"] == "one"


async def test_the_access_log_brings_back_what_was_chosen(stack: Stack) -> None:
    """Model, version, unit and epoch: what a rollout is judged by."""
    stack.share(1.0, step=2)
    await stack.chat("gpt", x_session_id="s")

    def measured() -> list[dict[str, str | float]]:
        return [dict(each.metadata) for each in stack.seen.served if each.metadata.get("epoch") == "r1-2"]

    await until(lambda: bool(measured()))
    metadata = measured()[-1]
    assert (metadata["model"], metadata["version"]) == ("m", "new")
    assert 0.0 < float(metadata["unit"]) < 1.0


async def test_aliases_are_listed(stack: Stack) -> None:
    """Clients that ask which models there are find each by all its names."""
    assert await stack.models() == ["gpt", "m", "one", "uno"]
