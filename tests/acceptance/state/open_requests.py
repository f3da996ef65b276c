"""Requests that a replica has decided and that nobody ends: what is in flight, without an engine that works on it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from tests.acceptance.local import CHAT, chat_body
from tests.acceptance.state.replicas import Replica
from tests.unit.envoy.gateway import BUFFERED, Stream, body, headers


@contextlib.asynccontextmanager
async def held(replica: Replica, number: int) -> AsyncIterator[list[Stream]]:
    """So many decided requests of one replica; the block decides how they end."""
    async with replica.as_gateway() as worker:
        streams = [worker.open() for _ in range(number)]
        for at, stream in enumerate(streams):
            await stream.ask(headers({"content-type": "application/json"}, path=CHAT, mode=BUFFERED))
            await stream.ask(body(chat_body(f"question {at} " * 50), end=True))
        yield streams


async def finish(streams: Sequence[Stream]) -> None:
    """End requests as a gateway does whose clients have their answers."""
    await asyncio.gather(*(stream.finish() for stream in streams))
