"""A whole local stack in front of simulated engines, a pool for each kind, and what its worker says of them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec

from extproc import inner
from extproc.choose.explain import CandidateCost, Explanation
from extproc.engines import prometheus
from extproc.state.endpoint import EndpointState, decode
from extproc.state.redis import RedisStore
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, Answer, Engine, Local, configuration, running, simulated
from tests.waiting import until_async

PROFILES = ("vllm-0.11", "vllm-0.23", "vllm-0.33", "trtllm", "sglang")
"""Every kind of simulated engine."""
PATIENT = {"redis": {"timeout_ms": 2000}, "gateway": {"message_timeout_ms": 20_000}}
"""Sections for stacks on a busy machine: a late answer would make the worker or Envoy go on without what is tested."""
PRECISE = {"profiles": "precise", "tokens": {"source": "engine", "budget_ms": 5000}}
"""Settings of a pool whose engines tell token ids."""
RENDERER = "renderer"
"""Name of the engines of `renderer`."""
_BLOCKS = "warmpath_exact_profile_blocks"


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of one pool; their model is called like the pool.

    Attributes:
        pool: name of the pool.
        profile: what they are.
        each: how many.
        arguments: further arguments of `warmpath sim`.
        settings: laid over the pool's.
        addresses: where the pool finds them, when that is not where they listen.
    """

    pool: str
    profile: str
    each: int = 1
    arguments: Sequence[str] = ()
    settings: Mapping[str, Any] = {}
    addresses: Sequence[str] = ()


def renderer(model: str) -> Crew:
    """A render server for a pool whose engines cannot tell the token ids of chats: TensorRT-LLM."""
    return Crew(pool=RENDERER, profile="vllm-0.33", arguments=("--scale-out", "--model", model))


def rendered_by(engine: Engine) -> dict[str, Any]:
    """Settings of a pool with precise profiles that has its token ids from a render server."""
    tokens = {"source": "render", "url": f"http://{engine.address}", "budget_ms": 5000}
    return {"profiles": "precise", "tokens": tokens}


class Asked(msgspec.Struct, frozen=True):
    """One request through the gateway, and the decision that was made for it; sizes in tokens."""

    answer: Answer
    decision: Explanation

    @property
    def pick(self) -> CandidateCost:
        """The endpoint that was picked, as the decision saw it."""
        return next(each for each in self.decision.candidates if each.endpoint == self.decision.pick)

    @property
    def predicted(self) -> float:
        """Prompt tokens that the decision expected in the pick's cache."""
        return self.pick.matched_tokens

    @property
    def usage(self) -> dict[str, Any]:
        """What the engine reported; of a stream, its last word. Raises IndexError when it reported nothing."""
        return usages(self.answer)[-1]

    @property
    def reported(self) -> int:
        """Prompt tokens that the engine says it had cached."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def text(self) -> str:
        """The answer of a chat without a stream."""
        return str(self.answer.json["choices"][0]["message"]["content"])


def usages(answer: Answer) -> list[dict[str, Any]]:
    """Every report of usage in an answer, streamed or not."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [answer.json["usage"]]
    lines = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line.startswith(b"data: {")]
    return [usage for line in lines if (usage := json.loads(line).get("usage"))]


def body_of(model: str, prompt: str | Sequence[Mapping[str, str]], **fields: object) -> bytes:
    """Body of a chat: one question, or all messages; `fields` are laid over it."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return json.dumps({"model": model, "messages": messages, "max_tokens": 4, **fields}).encode()


def matched(told: inner.Told) -> dict[str, CandidateCost]:
    """What a worker explained, by endpoint."""
    assert told.status == 200, told.body
    return {each.endpoint: each for each in msgspec.json.decode(told.body, type=Explanation).candidates}


class Page(msgspec.Struct, frozen=True):
    """A metrics page."""

    text: bytes

    def total(self, name: str, **labels: str) -> float:
        """Sum of all samples of a metric with these labels."""
        return sum(value for value, _ in self._samples(name, labels))

    def by_endpoint(self, name: str, **labels: str) -> dict[str, float]:
        """Samples of a metric by their endpoint."""
        return {found["endpoint"]: value for value, found in self._samples(name, labels)}

    def _samples(self, name: str, labels: Mapping[str, str]) -> list[tuple[float, Mapping[str, str]]]:
        samples = prometheus.read(self.text, (name,)).get(name, ())
        return [(one.value, one.labels) for one in samples if labels.items() <= one.labels.items()]


class Stand:
    """What runs.

    Attributes:
        local: the stack.
        engines: the engines of each pool.
        worker: a channel to the only worker.
    """

    def __init__(self, local: Local, engines: Mapping[str, list[Engine]], worker: grpc.aio.Channel) -> None:
        self.local = local
        self.engines = engines
        self.worker = worker

    async def ask(
        self,
        model: str,
        prompt: str | Sequence[Mapping[str, str]],
        headers: Mapping[str, str] | None = None,
        **fields: object,
    ) -> Asked:
        """Send a chat that is answered 200, and have its decision told."""
        answer = await self.local.ask(CHAT, body_of(model, prompt, **fields), headers)
        assert answer.status == 200, answer.body
        return Asked(answer, await self.decision(answer))

    async def decision(self, answer: Answer) -> Explanation:
        """The decision that was made for an answered request."""
        told = await inner.recall(self.worker, answer.headers["x-request-id"])
        assert told.status == 200, told.body
        return msgspec.json.decode(told.body, type=Explanation)

    async def expected(
        self, model: str, prompt: str | Sequence[Mapping[str, str]], **fields: object
    ) -> dict[str, CandidateCost]:
        """What each endpoint is expected to hold of a chat. Asking changes nothing."""
        question = inner.Question(CHAT, {}, body_of(model, prompt, **fields))
        return matched(await inner.explain(self.worker, question))

    async def page(self) -> Page:
        """The worker's metrics page."""
        return Page(await inner.read_page(self.worker))

    async def keeper_page(self) -> Page:
        """The metrics page of all processes."""
        async with self.local.http.get(self.local.stack.metrics_url) as answer:
            return Page(await answer.read())

    async def in_step(self, pool: str) -> None:
        """Wait until the worker's exact profiles hold as many blocks as the engines of a pool do."""
        await until_async(lambda: self.is_in_step(pool))

    async def is_in_step(self, pool: str) -> bool:
        """Whether the worker's exact profiles hold as many blocks as the engines of a pool do."""
        states = await asyncio.gather(*(one.control("state") for one in self.engines[pool]))
        held = (await self.page()).by_endpoint(_BLOCKS, pool=pool)
        return sorted(held.values()) == sorted(float(state["blocks_cached"]) for state in states)

    async def states(self, pool: str) -> dict[str, EndpointState]:
        """What the keeper published of the endpoints of a pool."""
        redis = self.local.stack.config.redis
        assert redis.url is not None
        store = RedisStore(redis.url, 2000, redis.key_prefix)
        try:
            await store.ping()
            return {name: decode(payload) for name, payload in (await store.states(pool)).items()}
        finally:
            await store.close()

    async def idle(self, pool: str) -> None:
        """Wait until nothing of a pool is in flight: by the worker's count, and by the shared ledger."""

        async def ended() -> bool:
            loads = await self.local.loads(pool)
            worker = (await self.page()).total("warmpath_in_flight", pool=pool)
            return worker == 0 and all(load.running == 0 for load in loads.values())

        await until_async(ended)


@contextlib.asynccontextmanager
async def crewed(journal: Journal, crews: Sequence[Crew]) -> AsyncIterator[dict[str, list[Engine]]]:
    """Simulated engines by pool, all started at once; those of `renderer` too."""
    async with contextlib.AsyncExitStack() as cleanup:
        started = await asyncio.gather(
            *(
                cleanup.enter_async_context(
                    simulated(
                        journal,
                        each=crew.each,
                        arguments=("--profile", crew.profile, "--model", crew.pool, *crew.arguments),
                    )
                )
                for crew in crews
            )
        )
        yield {crew.pool: engines for crew, engines in zip(crews, started, strict=True)}


@contextlib.asynccontextmanager
async def standing(
    journal: Journal,
    folder: Path,
    crews: Sequence[Crew],
    engines: Mapping[str, list[Engine]],
    **sections: Mapping[str, Any],
) -> AsyncIterator[Stand]:
    """A stack in front of engines that run; sections of the configuration are laid over `PATIENT`."""
    crews = [crew for crew in crews if crew.pool != RENDERER]
    at = {crew.pool: crew.addresses or [one.address for one in engines[crew.pool]] for crew in crews}
    document = configuration(at, **{**PATIENT, "pools": {}, **sections})
    for crew in crews:
        document["pools"][crew.pool] |= crew.settings
    document["models"] = {**{name: {"pool": name} for name in at}, **sections.get("models", {})}
    everyone = [one for crew in crews if not crew.addresses for one in engines[crew.pool]]
    async with running(journal, folder / "warmpath.yaml", document, everyone) as local:
        socket = f"unix:{local.stack.config.gateway.sidecar.socket_dir}/worker-0.sock"
        async with inner.channel(socket) as worker:
            yield Stand(local, engines, worker)


@contextlib.asynccontextmanager
async def stand(
    journal: Journal, folder: Path, crews: Sequence[Crew], **sections: Mapping[str, Any]
) -> AsyncIterator[Stand]:
    """Engines and the stack in front of them."""
    async with (
        crewed(journal, crews) as engines,
        standing(journal, folder, crews, engines, **sections) as started,
    ):
        yield started
