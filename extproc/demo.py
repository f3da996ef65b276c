"""`warmpath demo`: one workload twice through a whole local stack, by round robin and by the default policy."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from extproc.config import Routing
from extproc.processes import stop_requested
from extproc.sim import counters, load, report, workload
from extproc.sim.display import Bar, table
from extproc.sim.load import LoadSettings
from extproc.stack import Stack, StackSettings, free_address

BASELINE = "round_robin"
DEFAULT = Routing().policy
ENGINES = 4
MODEL = "sim"


class Demo(msgspec.Struct, frozen=True):
    """What the demo was asked for.

    Attributes:
        as_json: print one JSON object and nothing else.
        keep: leave the second stack running until Ctrl-C.
        seed: seed of the workload.
    """

    as_json: bool = False
    keep: bool = False
    seed: int = 1


async def demo(wanted: Demo) -> int:
    """Run the comparison; returns 0 only when no request failed.

    Raises:
        StackError: a part of the stack did not come up.
    """
    console = Console(stderr=wanted.as_json)
    conversations = workload.mixed(workload.WorkloadSettings(), wanted.seed)
    if not wanted.as_json:
        _introduce(console, conversations)
    summaries: dict[str, report.Summary] = {}
    with tempfile.TemporaryDirectory(prefix="warmpath-demo-") as folder:
        for policy in (BASELINE, DEFAULT):
            stack = Stack(_settings(Path(folder), policy), _unheard)
            async with stack:
                with Bar(console, policy, workload.requests(conversations)) as bar:
                    before = await counters.read_prefilled(stack.engines)
                    run = await load.run(stack.url, conversations, LoadSettings(model=MODEL), bar.note)
                    after = await counters.read_prefilled(stack.engines)
                summaries[policy] = report.summarize(run, counters.since(before, after))
                if policy == DEFAULT:
                    _show(console, summaries, as_json=wanted.as_json)
                    if wanted.keep:
                        await _keep(console, stack)
    return 0 if not any(summary.errors for summary in summaries.values()) else 1


def _settings(folder: Path, policy: str) -> StackSettings:
    """A stack on free ports with four engines of the demo's kind."""
    listen, admin, page = free_address(), free_address(), free_address()
    engine = workload.DEMO_ENGINE
    config = {
        "models": {MODEL: {"pool": "engines"}},
        "pools": {
            "engines": {"endpoints": ["127.0.0.1:1"], "prefill_tokens_per_s": engine.prefill_tokens_per_s},
        },
        "gateway": {
            "listen": listen,
            "admin": admin,
            "concurrency": 1,
            "sidecar": {"workers": 1, "admin": page, "drain_s": 5},
        },
        "routing": {"policy": policy},
    }
    path = folder / f"{policy}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return StackSettings(path=path, engines=ENGINES, engine_arguments=workload.engine_arguments(engine), quiet=True)


def _unheard(_name: str, _line: str) -> None:
    """The stack keeps the last lines of each part itself, and quotes them when one fails."""


def _introduce(console: Console, conversations: list[workload.Conversation]) -> None:
    requests = workload.requests(conversations)
    ideal = workload.ideal_cached_share(conversations, workload.DEMO_ENGINE.block_size)
    console.print(
        f"{requests} requests (shared system prompts, multi-turn sessions, long documents) to {ENGINES} simulated "
        f"vLLM engines, through Envoy.\nWith one endless cache, {ideal:.0%} of the prompt tokens would be found in it.",
        highlight=False,
    )


def _show(console: Console, summaries: dict[str, report.Summary], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{report.to_json(summaries)}\n")
        sys.stdout.flush()
    else:
        console.print(table(summaries))


async def _keep(console: Console, stack: Stack) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16})
    chat = f"curl {stack.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    # Not wrapped at the width of the terminal: a command that is broken in two cannot be pasted.
    lines = f"Try it:\n  {chat}\n  curl {stack.metrics_url}\nCtrl-C stops everything."
    console.print(lines, soft_wrap=True, markup=False, highlight=False)
    stopping, ended = asyncio.create_task(stop_requested()), asyncio.create_task(stack.ended())
    await asyncio.wait([stopping, ended], return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, ended):
        task.cancel()
