"""How much each engine prefilled, by its own counters."""

import asyncio
import re
from collections.abc import Mapping, Sequence

import aiohttp

from extproc.errors import EngineError

_PROMPT = "vllm:prompt_tokens_total"
_CACHED = "vllm:prompt_tokens_cached_total"
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


def prefilled_tokens(page: str) -> float:
    """Return the prompt tokens an engine computed since it started, by its `/metrics` page: all less the cached.

    Raises:
        EngineError: the page lacks one of the two counters.
    """
    return _sum(page, _PROMPT) - _sum(page, _CACHED)


async def read_prefilled(engines: Sequence[str]) -> dict[str, float]:
    """Return `prefilled_tokens` by engine.

    Args:
        engines: `host:port` of each.

    Raises:
        EngineError: an engine does not answer, or its page lacks the counters.
    """
    async with aiohttp.ClientSession(timeout=_TIMEOUT, raise_for_status=True) as session:

        async def read(engine: str) -> float:
            try:
                async with session.get(f"http://{engine}/metrics") as response:
                    return prefilled_tokens(await response.text())
            except (aiohttp.ClientError, TimeoutError) as error:
                raise EngineError(
                    f"the metrics of {engine} could not be read: {error or type(error).__name__}"
                ) from error

        values = await asyncio.gather(*map(read, engines))
    return dict(zip(engines, values, strict=True))


def since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what was added between two readings of the same engines; one that restarted between counts from 0."""
    return {name: value - before[name] if value >= before[name] else value for name, value in after.items()}


def _sum(page: str, name: str) -> float:
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    if not found:
        raise EngineError(f"the engine's metrics page has no {name}; is it vLLM 0.33 or its simulator?")
    return sum(map(float, found))
