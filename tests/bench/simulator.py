"""What four simulated engines cost at 50 requests a second: streamed chats of 1,500 tokens, and being scraped."""

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence

import aiohttp
import msgspec

from tests.bench.machine import cpu_s
from tests.bench.processes import child, run
from tests.bench.report import Check, Findings, Row, Scale, middle

_ENGINES = 4
_RATE = 50.0
_SCRAPE_S = 0.25


def bench(scale: Scale) -> Findings:
    """Rounds of a Poisson stream on one set of engines."""
    findings = Findings(f"{_ENGINES} simulated engines in one process at {_RATE:.0f} requests/s, time factor 1")
    findings.rows += run(_measure(rounds=scale.pick(3, 2), seconds=scale.pick(20, 6)))
    share = middle([float(row["cores"]) for row in findings.rows])
    findings.checks.append(Check("simulated engines", share, 0.15, "core"))
    findings.notes.append("1,000 tokens of one of eight system prompts, 500 of the request's own, answers of 32 to 64")
    return findings


async def _measure(rounds: int, seconds: int) -> list[Row]:
    addresses: list[str] = []

    def heard(line: str) -> None:
        if line.startswith('{"engine"'):
            addresses.append(json.loads(line)["address"])

    argv = [sys.executable, "-m", "extproc.sim", "--engines", str(_ENGINES), "--exit-with-parent"]
    async with (
        child("engines", argv, lambda: len(addresses) == _ENGINES, heard) as engines,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        scraping = asyncio.create_task(_scrape(session, addresses))
        try:
            return [await _round(session, addresses, engines.pid, seconds, seed) for seed in range(rounds)]
        finally:
            scraping.cancel()


async def _round(session: aiohttp.ClientSession, addresses: Sequence[str], pid: int, seconds: int, seed: int) -> Row:
    rng = random.Random(seed)
    shared = ["".join(rng.choices("abcdefgh ", k=4000)) for _ in range(8)]
    bodies = [_body(rng, shared) for _ in range(int(_RATE * seconds))]
    turns = itertools.cycle(addresses)
    cpu, began, due = cpu_s(pid), time.monotonic(), time.monotonic()
    tasks = []
    for body in bodies:
        due += rng.expovariate(_RATE)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(_ask(session, next(turns), body)))
    firsts = await asyncio.gather(*tasks)
    spent, took = cpu_s(pid) - cpu, time.monotonic() - began
    return {
        "requests": len(bodies),
        "cores": spent / took,
        "cpu_ms_a_request": 1000 * spent / len(bodies),
        "ttft_p50_ms": 1000 * middle(firsts),
    }


def _body(rng: random.Random, shared: Sequence[str]) -> bytes:
    own = "".join(rng.choices("abcdefghijklmnop ", k=2000))
    messages = [{"role": "system", "content": rng.choice(shared)}, {"role": "user", "content": own}]
    body = {"model": "sim", "messages": messages, "max_tokens": rng.randint(32, 64), "ignore_eos": True}
    return msgspec.json.encode(body | {"stream": True})


async def _ask(session: aiohttp.ClientSession, address: str, body: bytes) -> float:
    """Send one request; returns the seconds to its first token."""
    began = time.monotonic()
    async with session.post(f"http://{address}/v1/chat/completions", data=body) as response:
        response.raise_for_status()
        await response.content.readany()
        first = time.monotonic() - began
        await response.read()
    return first


async def _scrape(session: aiohttp.ClientSession, addresses: Sequence[str]) -> None:
    while True:
        for address in addresses:
            async with session.get(f"http://{address}/metrics") as response:
                await response.read()
        await asyncio.sleep(_SCRAPE_S)
