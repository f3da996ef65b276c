"""What routing decides, asked of single workers over their own sockets, and what it predicts, read off the metrics."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as stubs

from extproc.envoy.contract import DESTINATION, METADATA
from tests.acceptance.local import CHAT, Answer, Engine, Local, chat_body, write
from tests.unit.envoy.gateway import BUFFERED, Gateway, body, connected, headers
from tests.waiting import until, until_async


class Decided(msgspec.Struct, frozen=True):
    """A decision as a worker tells the gateway; sizes in tokens.

    Attributes:
        endpoint: `ip:port` of the pick.
        prompt_tokens: estimated length of the prompt.
        uncached_tokens: of these, expected to be prefilled.
        backlog_tokens: backlog of the pick before this request was charged.
        pinned: the pin of its session was honoured.
    """

    endpoint: str
    prompt_tokens: float
    uncached_tokens: float
    backlog_tokens: float
    pinned: bool

    @property
    def cached_tokens(self) -> float:
        """Of the prompt, expected in the pick's cache."""
        return self.prompt_tokens - self.uncached_tokens


class Seen(msgspec.Struct, frozen=True):
    """One request through the gateway; sizes in tokens.

    Attributes:
        answer: the engine's answer.
        engine: who gave it.
        predicted: prompt tokens that the decision expected in the engine's cache.
    """

    answer: Answer
    engine: Engine
    predicted: float

    @property
    def reported(self) -> int:
        """Prompt tokens that the engine had cached."""
        return self.answer.cached_tokens

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt as the engine counted it."""
        return int(self.answer.json["usage"]["prompt_tokens"])


@contextlib.asynccontextmanager
async def at_workers(local: Local) -> AsyncIterator[Sequence[Gateway]]:
    """A connection to every worker, in place of Envoy's."""
    folder, number = local.stack.config.gateway.sidecar.socket_dir, local.stack.config.gateway.sidecar.workers
    async with contextlib.AsyncExitStack() as cleanup:
        sockets = [f"unix:{folder}/worker-{index}.sock" for index in range(number)]
        channels = [await cleanup.enter_async_context(connected(socket)) for socket in sockets]
        yield [Gateway(stubs.ExternalProcessorStub(channel)) for channel in channels]


async def decide(worker: Gateway, content: bytes, path: str = CHAT, more: Mapping[str, str] | None = None) -> Decided:
    """What a worker decides for a request that no engine will get. It is charged, pinned, learnt, and settled."""
    stream = worker.open()
    sent = {"content-type": "application/json", **(more or {})}
    await stream.ask(headers(sent, path=path, mode=BUFFERED))
    reply = await stream.ask(body(content, end=True))
    await stream.finish()
    fields = reply.dynamic_metadata.fields
    own = fields[METADATA].struct_value.fields
    return Decided(
        endpoint=fields["envoy.lb"].struct_value.fields[DESTINATION].string_value.partition(",")[0],
        prompt_tokens=own["prompt_tokens"].number_value,
        uncached_tokens=own["uncached_tokens"].number_value,
        backlog_tokens=own["backlog_tokens"].number_value,
        pinned=bool(own["pinned"].number_value),
    )


async def decide_chat(worker: Gateway, prompt: str, session: str = "", **fields: object) -> Decided:
    """What a worker decides for one question; `fields` are laid over the body."""
    return await decide(worker, chat_body(prompt, **fields), more={"x-session-id": session} if session else {})


async def seen(local: Local, prompt: str = "", **fields: object) -> Seen:
    """Ask one question while nobody else asks, and wait until what its answer teaches is learnt."""
    before = await local.metric("warmpath_predicted_cached_tokens_total")
    told = await local.metric("warmpath_access_log_entries_total")
    answer, engine = await local.chat_served(prompt, "", **fields)

    async def learnt() -> bool:
        return await local.metric("warmpath_access_log_entries_total") > told

    await until_async(learnt)
    return Seen(answer, engine, await local.metric("warmpath_predicted_cached_tokens_total") - before)


async def use(local: Local, path: Path, document: Mapping[str, Any]) -> None:
    """Write a changed configuration, and wait until every worker has taken it in."""

    def told() -> int:
        return sum('"process": "worker-' in line for line in local.journal.containing("is in use"))

    wanted = told() + local.stack.config.gateway.sidecar.workers
    await asyncio.to_thread(write, path, document)
    await until(lambda: told() >= wanted)
