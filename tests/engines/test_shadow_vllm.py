"""The comparison report on two real vLLM engines: what is the same, and what is another version."""

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.gateway import gateway, prose
from tests.engines.vllm_engine import VllmEngine
from tests.waiting import until_async

pytestmark = pytest.mark.vllm

REQUESTS = 12
TOKENS = 24


async def compared(folder: Path, model: str, engines: list[VllmEngine], adapter: str) -> Any:
    """Ask a dozen questions of one engine, with the other as a shadow that gets all of them; the report."""
    primary, other = (engine.address for engine in engines)
    shadow: dict[str, Any] = {"pool": "other", "weight": 0}
    if adapter:
        shadow["adapter"] = {"name": adapter}
    versions = {"v1": {"pool": "main", "weight": 1}, "v2": shadow}
    # On two cores the shadow is far behind its client, and all of it is wanted.
    sampled = {"version": "v2", "mode": "compare", "share": 1.0, "max_load": 1.0, "max_concurrent": 64}
    sampled["folder"] = str(folder / "results")
    async with gateway(
        folder,
        model,
        [primary],
        pools={"other": {"endpoints": [other]}},
        models={model: {"versions": versions, "shadow": sampled}},
    ) as through:
        numbers = itertools.count()

        async def ask() -> None:
            number = next(numbers)
            question = [{"role": "user", "content": prose(f"compared {number}", 200)}]
            stream = number % 2 == 1
            usage = {"include_usage": True} if stream else None
            await through.ask(question, max_tokens=TOKENS, temperature=0.0, stream=stream, stream_options=usage)

        for _ in range(REQUESTS):
            await ask()
        found: list[Any] = []

        async def whole() -> bool:
            found.append(json.loads(await report(folder, model, "--json")))
            if sum(int(shadow["number"]) for shadow in found[-1]["shadows"]) >= REQUESTS:
                return True
            await ask()  # A worker that is late for a moment, on a busy machine, drops shadows first.
            return False

        await until_async(whole)
        print(await report(folder, model))
        return found[-1]


async def report(folder: Path, model: str, *options: str) -> str:
    """What `warmpath rollout report` prints."""
    command = [sys.executable, "-m", "extproc", "rollout", "report", model, "--config", str(folder / "warmpath.yaml")]
    process = await asyncio.create_subprocess_exec(
        *command, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_two_engines_of_one_model_say_the_same(
    tmp_path: Path, model_name: str, engines: list[VllmEngine]
) -> None:
    """At temperature 0 every pair of answers is the same to the letter, of the same length and end."""
    [shadow] = (await compared(tmp_path, model_name, engines, ""))["shadows"]
    assert shadow["exact"]["number"] == shadow["exact"]["of"] >= REQUESTS
    assert shadow["tokens_ratio"]["p10"] == shadow["tokens_ratio"]["p90"] == 1.0
    assert shadow["same_finish"]["number"] == shadow["exact"]["of"]


async def test_an_adapter_is_told_from_its_base(tmp_path: Path, model_name: str, engines: list[VllmEngine]) -> None:
    """The shadow gets the same requests under its own name, and answers otherwise."""
    [shadow] = (await compared(tmp_path, model_name, engines, "lora-a"))["shadows"]
    assert shadow["exact"]["of"] >= REQUESTS
    assert shadow["exact"]["number"] < shadow["exact"]["of"]
    assert shadow["similarity"]["p10"] < 1.0
