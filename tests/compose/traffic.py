"""Requests through the stack's Envoy, and a steady stream of them that keeps count of what failed."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MODEL = "sim"
RATE_PER_S = 10.0
ANSWER_LIMIT = aiohttp.ClientTimeout(total=60)


@dataclass
class Tally:
    """What a steady stream of requests saw.

    Attributes:
        answered: requests answered in full.
        failures: one line for every request that was not.
    """

    answered: int = 0
    failures: list[str] = field(default_factory=list)


def chat(prompt: str, **options: Any) -> dict[str, Any]:
    """Body of a chat completion with one user message and a short answer."""
    return {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": prompt}], **options}


async def ask(client: aiohttp.ClientSession, prompt: str) -> dict[str, Any]:
    """One answer as JSON; raises unless it is 200."""
    async with client.post("/v1/chat/completions", json=chat(prompt)) as response:
        response.raise_for_status()
        answer: dict[str, Any] = await response.json()
        return answer


async def ask_streamed(client: aiohttp.ClientSession, prompt: str) -> list[dict[str, Any]]:
    """The chunks of one streamed answer; raises unless it is 200 and ends with `[DONE]`."""
    body = chat(prompt, stream=True, stream_options={"include_usage": True})
    async with client.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        text = (await response.read()).decode()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        raise aiohttp.ClientPayloadError(f"the stream ended without [DONE]: {text[-200:]!r}")
    return [json.loads(event) for event in events[:-1]]


@contextlib.asynccontextmanager
async def steady(client: aiohttp.ClientSession) -> AsyncIterator[Tally]:
    """Send requests at a fixed rate, streamed and not in turn, for as long as the block runs.

    The rate does not wait for answers, so a stalled service is met by every request that falls into the stall.
    """
    tally = Tally()
    sender = asyncio.create_task(_send(client, tally))
    try:
        yield tally
    finally:
        sender.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sender


async def _send(client: aiohttp.ClientSession, tally: Tally) -> None:
    async with asyncio.TaskGroup() as requests:
        try:
            for number in itertools.count():
                requests.create_task(_one(client, number, tally))
                await asyncio.sleep(1 / RATE_PER_S)
        except asyncio.CancelledError:
            return  # the group still waits for the requests under way


async def _one(client: aiohttp.ClientSession, number: int, tally: Tally) -> None:
    prompt = f"Conversation {number % 20}. " + "The same words again. " * 40
    try:
        if number % 2:
            await ask_streamed(client, prompt)
        else:
            await ask(client, prompt)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        tally.failures.append(f"request {number}: {error!r}")
    else:
        tally.answered += 1
