"""Estimated against precise profiles: the same workload through the same stack and engines, pool by pool in turns."""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median

import aiohttp
import msgspec
import yaml

from extproc.engines import prometheus
from extproc.sim import load, workload
from extproc.sim.load import LoadSettings, Outcome, Run
from extproc.sim.report import percentile
from extproc.sim.workload import Conversation, Message, Turn, text
from extproc.stack import Stack, StackSettings
from tests.bench.processes import child, run
from tests.bench.report import Findings, Row, Scale
from tests.ports import free_port

ENGINES = 8
BLOCKS = 401
"""Blocks of an engine's cache, 16 tokens each: 6,400 tokens, room for two or three conversations."""
MODES = ("estimated", "precise")
_AGENTS = 6
_SYSTEM_TOKENS = (600, 1500)
_TURNS = (4, 8)
_RESULT_TOKENS = (60, 500)
_ANSWER_TOKENS = (8, 40)
_THINK_S = (0.5, 4.0)
_RATE = 1.75
_LOGGED_S = 2.0
"""Time for the last entries of the access log to come in: 0.1 s, and more on a busy machine."""
_ERROR = "warmpath_cached_tokens_error_share"
_MATCHED = "warmpath_matched_total"


class _Taken(msgspec.Struct, frozen=True):
    """One run of one pool: its outcomes, and what the worker's metrics added meanwhile."""

    run: Run
    compared: float
    error: float
    within: float
    precise: float


def agents(seconds: float, seed: int) -> list[Conversation]:
    """Agents that call tools: each run is a conversation that grows by a result a turn, behind one of few long prompts.

    Half of them name their session. Requests arrive at random times, whatever became of the others.
    """
    rng = random.Random(seed)
    systems = [Message("system", text(rng, rng.randint(*_SYSTEM_TOKENS))) for _ in range(_AGENTS)]
    conversations, at_s = list[Conversation](), rng.expovariate(_RATE)
    while at_s < seconds:
        number = len(conversations)
        turns = tuple(
            Turn(
                text(rng, rng.randint(*_RESULT_TOKENS)),
                rng.randint(*_ANSWER_TOKENS),
                stream=True,
                think_s=0.0 if not turn else rng.uniform(*_THINK_S),
            )
            for turn in range(rng.randint(*_TURNS))
        )
        session = f"{seed}-{number}" if number % 2 else ""
        conversations.append(Conversation(at_s, "agent", session, (rng.choice(systems),), turns))
        at_s += rng.expovariate(_RATE)
    return conversations


def bench(scale: Scale) -> Findings:
    """Rounds of both modes by turns, each round of both with the same conversations, and with empty caches."""
    seconds, rounds = scale.pick(20, 5), scale.pick(2, 1)
    findings = Findings(
        f"{ENGINES} simulated vLLM engines a pool, {(BLOCKS - 1) * 16:,} tokens of cache each; agents with growing "
        f"conversations behind {_AGENTS} system prompts, {_RATE} runs a second"
    )
    taken = run(_measure(seconds, rounds))
    findings.rows = [_row(mode, taken[mode]) for mode in MODES]
    ideal = [workload.ideal_cached_share(agents(seconds, seed), 16) for seed in range(rounds)]
    findings.notes += [
        f"{rounds} rounds of {seconds} s of arrivals, by turns; figures are over all requests of all rounds",
        f"one engine with an endless cache would find {median(ideal):.1%} of the prompt tokens cached",
        "error: |expected - reported| cached tokens by prompt tokens, mean; within 1 %: share of requests",
        "token ids come from the engines (`/v1/chat/completions/render`), and are part of TTFT",
    ]
    return findings


def _row(mode: str, taken: Sequence[_Taken]) -> Row:
    outcomes = [one for each in taken for one in each.run.outcomes if one.failure is None]
    first = sorted(1000 * one.ttft_s for one in outcomes if one.ttft_s is not None)
    compared = sum(each.compared for each in taken)
    return {
        "profiles": mode,
        "requests": sum(len(each.run.outcomes) for each in taken),
        "failed": sum(len(each.run.failed) for each in taken),
        "cached_share": _cached_share(outcomes),
        "ttft_p50_ms": percentile(first, 0.5) or 0.0,
        "ttft_p90_ms": percentile(first, 0.9) or 0.0,
        "ttft_p99_ms": percentile(first, 0.99) or 0.0,
        "error": sum(each.error for each in taken) / compared if compared else 0.0,
        "within_1_percent": sum(each.within for each in taken) / compared if compared else 0.0,
        "precise_share": sum(each.precise for each in taken) / max(1, len(outcomes)),
    }


def _cached_share(outcomes: Sequence[Outcome]) -> float:
    tokens = sum(one.prompt_tokens for one in outcomes)
    return sum(one.cached_tokens for one in outcomes) / tokens if tokens else 0.0


async def _measure(seconds: float, rounds: int) -> dict[str, list[_Taken]]:
    """Both modes by turns in one stack, the first of each round by turns too; what one does not use stands still."""
    taken: dict[str, list[_Taken]] = {mode: [] for mode in MODES}
    async with _stack() as (stack, engines), aiohttp.ClientSession() as http:
        for number in range(rounds):
            conversations = agents(seconds, number)
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                await _empty(http, engines[mode])
                before = await _figures(http, stack, mode)
                done = await load.run(stack.url, conversations, LoadSettings(model=mode))
                await asyncio.sleep(_LOGGED_S)
                compared, error, within, precise = (
                    after - then for after, then in zip(await _figures(http, stack, mode), before, strict=True)
                )
                taken[mode].append(_Taken(done, compared, error, within, precise))
    return taken


async def _empty(http: aiohttp.ClientSession, engines: Sequence[str]) -> None:
    """Let engines begin anew, and give the keeper the time to see it."""
    for engine in engines:
        async with http.post(f"http://{engine}/sim/restart", json={"down_s": 0.0}) as answer:
            answer.raise_for_status()
    await asyncio.sleep(3.0)


async def _figures(http: aiohttp.ClientSession, stack: Stack, mode: str) -> tuple[float, float, float, float]:
    """Answers compared, the sum of their errors, those within 1 %, and decisions by precise profiles."""
    names = (f"{_ERROR}_count", f"{_ERROR}_sum", f"{_ERROR}_bucket", _MATCHED)
    async with http.get(stack.metrics_url) as page:
        found = prometheus.read(await page.read(), names)
    wanted: list[dict[str, str]] = [{}, {}, {"le": "0.01"}, {"rung": "precise"}]
    count, total, within, precise = (
        sum(one.value for one in found.get(name, ()) if ({"pool": mode} | labels).items() <= one.labels.items())
        for name, labels in zip(names, wanted, strict=True)
    )
    return count, total, within, precise


@contextlib.asynccontextmanager
async def _stack() -> AsyncIterator[tuple[Stack, dict[str, list[str]]]]:
    """A whole stack in front of the engines of both pools, each of which serves a model of its name."""
    async with contextlib.AsyncExitStack() as cleanup:
        engines = {mode: await cleanup.enter_async_context(_engines(mode)) for mode in MODES}
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-bench-")))
        path = folder / "warmpath.yaml"
        tokens = {"source": "engine", "budget_ms": 250}
        config = {
            "models": {mode: {"pool": mode} for mode in MODES},
            "pools": {
                mode: {"endpoints": engines[mode], "prefill_tokens_per_s": 20_000, "profiles": mode, "tokens": tokens}
                for mode in MODES
            },
            "gateway": {
                "listen": f"127.0.0.1:{free_port()}",
                "admin": f"127.0.0.1:{free_port()}",
                "concurrency": 1,
                "sidecar": {"workers": 1, "admin": f"127.0.0.1:{free_port()}", "drain_s": 5},
            },
            "routing": {"ramp_s": 0.0},
            "redis": {"timeout_ms": 250},
        }
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        stack = await cleanup.enter_async_context(Stack(StackSettings(path=path, quiet=True), _unheard))
        yield stack, engines


@contextlib.asynccontextmanager
async def _engines(model: str) -> AsyncIterator[list[str]]:
    """Simulated engines in one process."""
    addresses: list[str] = []

    def heard(line: str) -> None:
        if line.startswith('{"engine"'):
            addresses.append(json.loads(line)["address"])

    settings = ("--model", model, "--engines", str(ENGINES), "--blocks", str(BLOCKS))
    switches = ("--kv-events", "--scale-out", "--control", "--exit-with-parent")
    argv = [sys.executable, "-m", "extproc", "sim", *settings, *switches]
    async with child(f"engines of {model}", argv, lambda: len(addresses) == ENGINES, heard):
        yield addresses


def _unheard(_name: str, _line: str) -> None:
    """The stack quotes what its parts said last when one fails."""
