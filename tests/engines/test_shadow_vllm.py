"""The comparison report on two real vLLM engines: what is the same, and what is another version."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.gateway import Gateway, gateway, prose
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
    sampled = {"version": "v2", "mode": "compare", "share": 1.0, "max_load": 1.0, "folder": str(folder / "results")}
    async with gateway(
        folder,
        model,
        [primary],
        pools={"other": {"endpoints": [other]}},
        models={model: {"versions": versions, "shadow": sampled}},
    ) as through:
        for number in range(REQUESTS):
            question = [{"role": "user", "content": prose(f"compared {number}", 200)}]
            options = {"stream_options": {"include_usage": True}} if number % 2 else {}
            await through.ask(question, max_tokens=TOKENS, temperature=0.0, stream=bool(number % 2), **options)
        await until_async(lambda: whole(folder / "results"))
        text = await said(through, folder, model)
        print(text)
        return json.loads(await said(through, folder, model, "--json"))


async def whole(folder: Path) -> bool:
    """Whether every result of the chats is written."""
    lines = [line for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines()]
    return sum(json.loads(line)["api"] == "chat" for line in lines) == REQUESTS


async def said(through: Gateway, folder: Path, model: str, *options: str) -> str:
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
    assert shadow["exact"]["number"] == shadow["exact"]["of"] == REQUESTS
    assert shadow["tokens_ratio"]["p50"] == 1.0
    assert shadow["same_finish"]["number"] == REQUESTS


async def test_an_adapter_is_told_from_its_base(tmp_path: Path, model_name: str, engines: list[VllmEngine]) -> None:
    """The shadow gets the same requests under its own name, and answers otherwise."""
    [shadow] = (await compared(tmp_path, model_name, engines, "lora-a"))["shadows"]
    assert shadow["exact"]["of"] == REQUESTS
    assert shadow["exact"]["number"] < REQUESTS
    assert shadow["similarity"]["p10"] < 1.0
