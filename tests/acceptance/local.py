"""A local stack on real parts for acceptance tests: simulated engines, Valkey, the sidecar, Envoy, and their knobs."""

import asyncio
import contextlib
import io
import json
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from extproc.processes import Child
from extproc.stack import Stack, StackSettings
from extproc.state.redis import RedisStore
from extproc.state.values import Load
from tests.acceptance import processes
from tests.acceptance.journal import Journal
from tests.ports import free_port
from tests.waiting import until_async

MODEL = "sim"
POOL = "main"
CHAT = "/v1/chat/completions"
_PATIENT = aiohttp.ClientTimeout(total=60.0)


class Answer(msgspec.Struct, frozen=True):
    """One HTTP answer, read to its end; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body as JSON."""
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine says it had cached."""
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])


class Engine:
    """One simulated engine and its fault knobs."""

    def __init__(self, address: str, process: Child, http: aiohttp.ClientSession) -> None:
        self.address = address
        self.process = process
        self._http = http

    async def control(self, knob: str, **body: float | str | bool) -> dict[str, Any]:
        """Turn a knob under `/sim/`, or read `state`."""
        async with self._http.post(f"http://{self.address}/sim/{knob}", json=body) as answer:
            told: dict[str, Any] = await answer.json()
            return told

    @contextlib.asynccontextmanager
    async def frozen(self, scope: str) -> AsyncIterator[None]:
        """Stop the engine core (scope `engine`), or every answer of its server (`http`), for a while."""
        await self.control("freeze", frozen=True, scope=scope)
        try:
            yield
        finally:
            await self.control("freeze", frozen=False, scope=scope)

    async def prompt_tokens(self) -> int:
        """Prompt tokens of the requests it took."""
        return int((await self.control("state"))["prompt_tokens"])

    async def live(self) -> int:
        """Sequences it works on, or has waiting."""
        return int((await self.control("state"))["live"])


class Local:
    """A running stack.

    Attributes:
        stack: Valkey, sidecar and Envoy.
        engines: the simulated engines behind it.
        path: its configuration file.
        http: a client session.
        journal: what its children print.
    """

    def __init__(self, stack: Stack, engines: list[Engine], http: aiohttp.ClientSession, journal: Journal) -> None:
        self.stack = stack
        self.engines = engines
        self.http = http
        self.journal = journal
        self._redis = stack.config.redis

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return self.stack.url

    async def ask(
        self,
        path: str = CHAT,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> Answer:
        """Send one request through the gateway. Raises aiohttp.ClientError when there is no whole answer."""
        return await ask(self.http, f"{self.url}{path}", body, headers, method)

    async def chat(self, prompt: str, session: str = "", **fields: object) -> Answer:
        """Ask one question; `fields` are laid over the body."""
        return await self.ask(body=chat_body(prompt, **fields), headers={"x-session-id": session} if session else {})

    async def chat_served(self, prompt: str, session: str = "", **fields: object) -> tuple[Answer, Engine]:
        """Ask one question while nobody else asks; the answer, and the engine whose prompt tokens grew."""
        before = [await engine.prompt_tokens() for engine in self.engines]
        answer = await self.chat(prompt, session, **fields)
        after = [await engine.prompt_tokens() for engine in self.engines]
        served = [one for one, then, now in zip(self.engines, before, after, strict=True) if now > then]
        assert len(served) == 1, f"served by {[one.address for one in served]}: {answer.status} {answer.body[:200]!r}"
        return answer, served[0]

    def workers(self) -> list[int]:
        """Process ids of the workers that run now, by index."""
        return [one.pid for one in sorted(self._sidecar(), key=lambda one: one.command) if " worker " in one.command]

    def keeper(self) -> int:
        """Process id of the keeper. Raises IndexError while there is none."""
        return next(iter(one.pid for one in self._sidecar() if " keeper " in one.command))

    def _sidecar(self) -> list[processes.Process]:
        return processes.children(self.stack.children["sidecar"].pid)

    async def ready(self) -> Answer:
        """What the sidecar says of its readiness."""
        return await ask(self.http, self.stack.metrics_url.replace("/metrics", "/readyz"), method="GET")

    async def whole(self, workers: int) -> None:
        """Wait until all parts are well again."""

        async def well() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                components = (await self.ready()).json["components"]
                return set(components.values()) == {"ok"} and len(self.workers()) == workers
            return False

        await until_async(well)

    async def discovered(self) -> bool:
        """Whether Envoy knows every engine that the configuration names; on a busy machine it may listen earlier."""
        config = self.stack.config
        named = {address for pool in config.pools.values() for address in pool.endpoints}
        page = (await ask(self.http, f"http://{config.gateway.admin}/clusters", method="GET")).body.decode()
        return all(f"::{one.address}::" in page for one in self.engines if one.address in named)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of all samples of a metric with these labels."""
        return await metric(self.http, self.stack.metrics_url, name, labels)

    async def loads(self, pool: str = POOL) -> Mapping[str, Load]:
        """What the store says of the load of a pool's engines."""
        assert self._redis.url is not None
        store = RedisStore(self._redis.url, 2000, self._redis.key_prefix)
        try:
            await store.ping()
            return await store.loads(pool)
        finally:
            await store.close()

    async def in_flight(self) -> int:
        """Requests in flight, as the store has them."""
        return sum(load.running for load in (await self.loads()).values())


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
) -> Answer:
    """Send one request and read the answer to its end. Raises aiohttp.ClientError when it has none."""
    sent = {"content-type": "application/json", **(headers or {})}
    data = None if body is None else io.BytesIO(body)
    async with http.request(method, url, data=data, headers=sent) as answer:
        told = {name.lower(): value for name, value in answer.headers.items()}
        return Answer(answer.status, told, await answer.read())


async def metric(http: aiohttp.ClientSession, page_url: str, name: str, labels: Mapping[str, str]) -> float:
    """Sum of all samples of a metric with these labels on a metrics page."""
    page = (await ask(http, page_url, method="GET")).body.decode()
    return sum(_samples(page, name, labels))


def chat_body(prompt: str, **fields: object) -> bytes:
    """Body of a chat with one question."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 4, **fields}
    return json.dumps(body).encode()


def _samples(page: str, name: str, labels: Mapping[str, str]) -> list[float]:
    found = []
    for line in page.splitlines():
        match = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
        if match and all(f'{key}="{value}"' in match[1] for key, value in labels.items()):
            found.append(float(match[2]))
    return found


def configuration(pools: Mapping[str, Sequence[str]], /, **sections: object) -> dict[str, Any]:
    """A `warmpath.yaml` on free ports: a model of the same name for each pool, but `sim` for `main`.

    Args:
        pools: endpoints by pool, the default pool first.
        sections: laid over the sections of the same names, one level deep.
    """
    gateway = {
        "listen": f"127.0.0.1:{free_port()}",
        "admin": f"127.0.0.1:{free_port()}",
        "sidecar": {"admin": f"127.0.0.1:{free_port()}", "workers": 1},
    }
    document: dict[str, Any] = {
        "models": {MODEL if name == POOL else name: {"pool": name} for name in pools},
        "pools": {name: {"endpoints": list(at), "prefill_tokens_per_s": 20000} for name, at in pools.items()},
        "gateway": gateway,
    }
    for name, section in sections.items():
        base = document.setdefault(name, {})
        for key, value in dict(section).items():  # type: ignore[call-overload]
            base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return document


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a configuration in one step, as an editor does that does not want it read half-written."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(dict(document), sort_keys=False), encoding="utf-8")
    new.replace(path)


@contextlib.asynccontextmanager
async def simulated(
    journal: Journal, children: int = 1, each: int = 1, arguments: Sequence[str] = ()
) -> AsyncIterator[list[Engine]]:
    """Simulated engines: so many processes with so many engines each, stopped at the end."""
    async with contextlib.AsyncExitStack() as cleanup:
        http = await cleanup.enter_async_context(aiohttp.ClientSession(timeout=_PATIENT))
        started = []
        for number in range(children):
            told: asyncio.Queue[str] = asyncio.Queue()

            def note(name: str, line: str, told: asyncio.Queue[str] = told) -> None:
                if line.startswith('{"engine"'):
                    told.put_nowait(json.loads(line)["address"])
                journal.write(name, line)

            command = ["sim", "--engines", str(each), "--control", "--exit-with-parent", "--model", MODEL, *arguments]
            child = Child(f"engine-{number}", [sys.executable, "-m", "extproc", *command], note)
            cleanup.push_async_callback(child.stop)
            await child.start()
            started.append((child, told))
        async with asyncio.timeout(60):
            engines = [Engine(await told.get(), child, http) for child, told in started for _ in range(each)]
        yield engines


@contextlib.asynccontextmanager
async def running(
    journal: Journal, path: Path, document: Mapping[str, Any], engines: Sequence[Engine] = ()
) -> AsyncIterator[Local]:
    """A whole stack for a configuration, stopped at the end."""
    await asyncio.to_thread(write, path, document)
    async with (
        aiohttp.ClientSession(timeout=_PATIENT) as http,
        Stack(StackSettings(path=path), journal.write) as stack,
    ):
        local = Local(stack, list(engines), http, journal)
        await until_async(local.discovered)
        yield local
