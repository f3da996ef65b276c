"""Warmpath with its real Envoy in front of engines that already run, and a client that talks to it as users do."""

import json
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from pydoc_data import topics
from typing import Any

import aiohttp
import msgspec

from extproc.choose.explain import Explanation
from extproc.engines import prometheus
from extproc.stack import Stack, StackSettings
from tests.ports import free_port
from tests.waiting import until_async

Json = dict[str, Any]
Messages = list[dict[str, str]]

# The prior of the tests' pool, about what one core of this machine does with the tiny model.
PREFILL_TOKENS_PER_S = 2500

# Whatever a busy machine makes a real engine take.
REQUEST_TIMEOUT_S = 120.0

DECISIONS = "warmpath_decisions_total"
SESSIONS = "warmpath_sessions_total"
PREDICTED = "warmpath_predicted_cached_tokens_total"
REQUESTS = "warmpath_requests_total"
IN_FLIGHT = "warmpath_in_flight"
LOG_ENTRIES = "warmpath_access_log_entries_total"
PROMPT = "warmpath_prompt_tokens_total"
CACHED = "warmpath_cached_tokens_total"
OUTPUT = "warmpath_output_tokens_total"
TTFT_SUM = "warmpath_ttft_seconds_sum"
TTFT_COUNT = "warmpath_ttft_seconds_count"

# Grows by a prompt's tokens when the engine takes the prompt up.
ENGINE_PROMPT = "vllm:prefix_cache_queries_total"
ENGINE_RUNNING = "vllm:num_requests_running"

_NAMES = (
    DECISIONS, SESSIONS, PREDICTED, REQUESTS, IN_FLIGHT, LOG_ENTRIES, PROMPT, CACHED, OUTPUT, TTFT_SUM, TTFT_COUNT,
)  # fmt: skip
_LINES = [line.strip() for topic in topics.topics.values() for line in topic.splitlines() if line.strip()]

_OK = 200


class Totals(msgspec.Struct, frozen=True):
    """Warmpath's own metrics at one moment.

    Attributes:
        values: by metric name, summed over the labels; by `name{label value}`, summed over the others.
    """

    values: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def __sub__(self, earlier: "Totals") -> "Totals":
        return Totals({name: value - earlier[name] for name, value in self.values.items()})


class Answer(msgspec.Struct, frozen=True):
    """What the client saw of one request.

    Attributes:
        text: what the engine wrote.
        usage: the `usage` object; None when the answer had none.
        request_id: `x-request-id`, which names the decision.
        headers_s: seconds until the response headers.
        first_byte_s: seconds until the first byte of the body.
    """

    text: str
    usage: Json | None
    request_id: str
    headers_s: float
    first_byte_s: float

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens as the engine counted them. Raises TypeError when the answer had no usage."""
        return int(_told(self.usage)["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        """How many of them the engine found in its cache. Raises TypeError when the answer had no usage."""
        return int(_told(self.usage)["prompt_tokens_details"]["cached_tokens"])


class Reply(msgspec.Struct, frozen=True):
    """One HTTP answer as it came, whatever its status.

    Attributes:
        status: HTTP status.
        body: the whole body.
        request_id: `x-request-id`, which names the decision.
        headers_s: seconds until the response headers.
        first_byte_s: seconds until the first byte of the body.
    """

    status: int
    body: bytes
    request_id: str
    headers_s: float
    first_byte_s: float

    def json(self) -> Json:
        """The body as an object. Raises ValueError with the body's text when the status is not 200."""
        if self.status != 200:
            raise ValueError(f"status {self.status}: {self.body.decode(errors='replace')}")
        told: Json = json.loads(self.body)
        return told


class Predicted(msgspec.Struct, frozen=True):
    """What a decision expected at its pick.

    Attributes:
        engine: number of the engine that was picked.
        pin: what became of the session's pin, as `Explanation.pin`.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of these the engine has.
        ttft_s: seconds to the first token.
    """

    engine: int
    pin: str
    prompt_tokens: float
    cached_tokens: float
    ttft_s: float


class Gateway:
    """A running stack and a client of it."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession, model: str, engines: Sequence[str]) -> None:
        """Use `gateway()` instead."""
        self._stack = stack
        self._http = http
        self._model = model
        self._engines = engines

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return self._stack.url

    @property
    def metrics_url(self) -> str:
        """Warmpath's metrics page."""
        return self._stack.metrics_url

    async def ask(self, messages: Messages, *, session: str = "", **more: Any) -> Answer:
        """Send one chat request; `more` goes into the body. Raises aiohttp.ClientError when it fails."""
        body = {"model": self._model, "messages": messages, "max_tokens": 4, "ignore_eos": True, **more}
        headers = {"x-session-id": session} if session else {}
        reply = await self.send("POST", "/v1/chat/completions", body, headers)
        if reply.status != 200:
            raise aiohttp.ClientPayloadError(f"status {reply.status}: {reply.body.decode(errors='replace')}")
        text, usage = _read_stream(reply.body) if body.get("stream") else _read_json(reply.body)
        return Answer(text, usage, reply.request_id, reply.headers_s, reply.first_byte_s)

    async def send(
        self, method: str, path: str, body: Json | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send any request through Envoy. Raises aiohttp.ClientError when the answer breaks off."""
        began = time.monotonic()
        async with self._http.request(method, f"{self._stack.url}{path}", json=body, headers=headers) as response:
            headers_s = time.monotonic() - began
            received = await response.content.readany()
            first_byte_s = time.monotonic() - began
            received += await response.read()
            return Reply(response.status, received, response.headers["x-request-id"], headers_s, first_byte_s)

    async def picked(self, request_id: str) -> int:
        """Number of the engine that was picked for a request."""
        page = self._stack.metrics_url.replace("/metrics", f"/decisions/{request_id}")
        told: list[bytes] = []

        async def known() -> bool:
            async with self._http.get(page) as answer:
                told.append(await answer.read())
                return answer.status == _OK

        await until_async(known)
        return self._engines.index(msgspec.json.decode(told[-1], type=Explanation).pick)

    async def predicted(self, request_id: str) -> Predicted:
        """What the decision of an answered request expected, as `warmpath explain --id` tells it."""
        page = self._stack.metrics_url.replace("/metrics", f"/decisions/{request_id}")
        async with self._http.get(page) as answer:
            told = msgspec.json.decode(await answer.read(), type=Explanation)
        pick = next(each for each in told.candidates if each.endpoint == told.pick)
        if pick.predicted_ttft_ms is None:
            raise TypeError("the decision does not know the load of its pick")
        return Predicted(
            engine=self._engines.index(pick.endpoint),
            pin=told.pin,
            prompt_tokens=told.prompt_tokens,
            cached_tokens=told.prompt_tokens - pick.uncached_tokens,
            ttft_s=pick.predicted_ttft_ms / 1000.0,
        )

    async def settled(self) -> Totals:
        """Warmpath's metrics once every decided request has ended and come back through the access log."""
        totals = await self._totals()

        async def all_told() -> bool:
            nonlocal totals
            totals = await self._totals()
            return totals[IN_FLIGHT] == 0 and totals[DECISIONS] == totals[f"{LOG_ENTRIES}{{decided}}"]

        await until_async(all_told)
        return totals

    async def serves(self) -> bool:
        """Whether a request is decided and answered now.

        Until Envoy has found the workers healthy, it picks engines by itself; until it has found an engine healthy, it
        answers 503.
        """
        before = await self._totals()
        one_token = {"model": self._model, "prompt": "?", "max_tokens": 1}
        answer = await self.send("POST", "/v1/completions", one_token)
        return answer.status == 200 and (await self._totals())[DECISIONS] > before[DECISIONS]

    async def of_engines(self, name: str) -> tuple[float, ...]:
        """One metric of each engine, from its own page; engines in their given order."""
        values = []
        for address in self._engines:
            async with self._http.get(f"http://{address}/metrics") as page:
                found = prometheus.read(await page.read(), (name,))
            values.append(sum(sample.value for sample in found[name]))
        return tuple(values)

    async def ask_seeing_engine(self, messages: Messages, *, session: str = "", **more: Any) -> tuple[Answer, int]:
        """As `ask`, with the number of the one engine whose counter moved; nothing else may run meanwhile."""
        before = await self.of_engines(ENGINE_PROMPT)
        answer = await self.ask(messages, session=session, **more)
        after = await self.of_engines(ENGINE_PROMPT)
        moved = [index for index, (was, now) in enumerate(zip(before, after, strict=True)) if now > was]
        assert len(moved) == 1, f"the counters of engines {moved} moved for one request"
        return answer, moved[0]

    async def _totals(self) -> Totals:
        async with self._http.get(self._stack.metrics_url) as page:
            found = prometheus.read(await page.read(), _NAMES)
        values: dict[str, float] = {}
        for name, samples in found.items():
            for sample in samples:
                values[name] = values.get(name, 0.0) + sample.value
                for label in sample.labels.values():
                    key = f"{name}{{{label}}}"
                    values[key] = values.get(key, 0.0) + sample.value
        return Totals(values)


@asynccontextmanager
async def gateway(
    folder: Path,
    model: str,
    engines: Sequence[str],
    *,
    pool: Mapping[str, Any] | None = None,
    pools: Mapping[str, Any] | None = None,
    models: Mapping[str, Any] | None = None,
    relay: Mapping[str, Any] | None = None,
) -> AsyncIterator[Gateway]:
    """Start Warmpath in front of engines; `folder` takes its configuration.

    `pool` is added to the settings of the pool `main`, `pools` and `models` to those sections; `relay` is that section.

    Time limits are far above their defaults: with two engines, Envoy and the sidecar on two cores, a late decision
    says nothing about Warmpath and would make Envoy or the worker go on without the knowledge that is tested here.
    """
    path = folder / "warmpath.yaml"
    config = {
        "models": {model: {"pool": "main"}, **(models or {})},
        "pools": {
            "main": {"endpoints": list(engines), "prefill_tokens_per_s": PREFILL_TOKENS_PER_S, **(pool or {})},
            **(pools or {}),
        },
        "gateway": {
            "listen": f"127.0.0.1:{free_port()}",
            "admin": f"127.0.0.1:{free_port()}",
            "message_timeout_ms": 20_000,
            "sidecar": {"admin": f"127.0.0.1:{free_port()}", "workers": 1, "drain_s": 1},
        },
        "redis": {"timeout_ms": 2000},
        "timeouts": {"connect_s": 5},
        "relay": dict(relay or {}),
    }
    path.write_text(json.dumps(config))  # YAML holds JSON
    lines: deque[str] = deque(maxlen=100)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with (
        Stack(StackSettings(path=path, quiet=True), lambda name, line: lines.append(f"{name} | {line}")) as stack,
        # One connection a request, as clients that do not know each other.
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as http,
    ):
        through = Gateway(stack, http, model, engines)
        try:
            await until_async(through.serves)
            yield through
        finally:
            print("\n".join(lines))  # pytest shows it beside a failure


def prose(name: str, characters: int) -> str:
    """English text about programming of exactly that length, which no other name shares even its beginning with."""
    rng = random.Random(name)
    text = f"{name} {rng.getrandbits(64):x}. "
    while len(text) < characters:
        text += rng.choice(_LINES) + " "
    return text[:characters]


def events(received: bytes) -> list[Json]:
    """The data of a stream of server-sent events, one object an event."""
    lines = received.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def turn(history: Messages, answer: str, question: str) -> Messages:
    """The conversation with an answer and the next question behind it."""
    return [*history, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def _told(usage: Json | None) -> Json:
    if usage is None:
        raise TypeError("the answer told no usage")
    return usage


def _read_json(received: bytes) -> tuple[str, Json]:
    body = json.loads(received)
    return body["choices"][0]["message"]["content"] or "", body["usage"]


def _read_stream(received: bytes) -> tuple[str, Json | None]:
    """Text and usage of an SSE answer. Raises ValueError when it tells an error or does not end with `[DONE]`."""
    events = [part.removeprefix("data: ") for part in received.decode().split("\n\n") if part]
    if not events or events[-1] != "[DONE]":
        raise ValueError("the stream broke off before [DONE]")
    chunks = [json.loads(event) for event in events[:-1]]
    if failed := next((chunk for chunk in chunks if "error" in chunk), None):
        raise ValueError(f"the stream tells an error: {failed}")
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return text, next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None)
