"""What keepers cost that scrape 100 endpoints four times a second, each with a real vLLM page of 63 KB."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import aiohttp

from extproc.processes import Child
from tests.bench.machine import cpu_s
from tests.bench.processes import child, listening, run, write_config
from tests.bench.report import Check, Findings, Row, Scale, middle
from tests.ports import free_port
from tests.valkey import Valkey
from tests.waiting import until_async

_ENDPOINTS = 100
_SCRAPE_MS = 250
_KEEPERS = (1, 2, 4)
_PAGE = Path(__file__).parents[1] / "unit" / "engines" / "pages" / "vllm_0.32.txt"


class _Keeper(NamedTuple):
    """A keeper of one host: its process, and its admin address."""

    process: Child
    admin: str


def bench(scale: Scale) -> Findings:
    """Windows of CPU time of running keepers that share the endpoints."""
    findings = Findings(
        f"keepers, {_ENDPOINTS} endpoints scraped every {_SCRAPE_MS} ms, pages of {_PAGE.stat().st_size:,} B"
    )
    with TemporaryDirectory(prefix="bench-") as folder:
        at = Path(folder) / "s"
        with Valkey(0, "--unixsocket", str(at)):
            findings.rows += run(
                _measure(Path(folder), f"unix://{at}", rounds=scale.pick(9, 3), seconds=scale.pick(5, 2))
            )
    wanted = _ENDPOINTS * 1000 / _SCRAPE_MS
    alone = [row for row in findings.rows if row["keepers"] == 1]
    share = middle([float(row["ms_a_scrape"]) for row in alone]) / 1000 * wanted
    findings.checks.append(Check(f"keeper at {wanted:.0f} scrapes/s", share, 0.5, "core"))
    one, most = (
        middle([float(row["scrapes_a_s"]) for row in findings.rows if row["keepers"] == number])
        for number in (_KEEPERS[0], _KEEPERS[-1])
    )
    findings.checks.append(Check(f"scrapes by {_KEEPERS[-1]} keepers against one", most / one, 1.2, "x"))
    findings.notes.append("one process serves all pages; its CPU is not counted, the gossip of states to Valkey is")
    findings.notes.append("cores and scrapes are those of all keepers together; most_held is the largest share of one")
    return findings


async def _measure(folder: Path, redis_url: str, rounds: int, seconds: int) -> list[Row]:
    rows = list[Row]()
    async with (
        listening("engine", "--ports", str(_ENDPOINTS), "--metrics", str(_PAGE)) as (_, endpoints),
        aiohttp.ClientSession() as session,
        contextlib.AsyncExitStack() as stack,
    ):
        keepers = list[_Keeper]()
        for number in _KEEPERS:
            while len(keepers) < number:
                keepers.append(await _start(stack, folder / f"k{len(keepers)}", redis_url, endpoints))
            await _shared(session, keepers)
            rows += [await _window(session, keepers, seconds) for _ in range(rounds)]
    return rows


async def _start(stack: contextlib.AsyncExitStack, folder: Path, redis_url: str, endpoints: Sequence[str]) -> _Keeper:
    await asyncio.to_thread(folder.mkdir)
    admin = f"127.0.0.1:{free_port()}"
    config = _config(folder, redis_url, endpoints, admin)
    argv = [sys.executable, "-m", "extproc", "keeper", "--config", str(config)]
    return _Keeper(await stack.enter_async_context(child("keeper", argv)), admin)


async def _shared(session: aiohttp.ClientSession, keepers: Sequence[_Keeper]) -> None:
    """Wait until the keepers have even shares, and every one has asked for its own."""

    async def even() -> bool:
        for keeper in keepers:
            if not keeper.process.running:
                raise RuntimeError(f"a keeper ended with {keeper.process.code}")
        held = await _each(session, keepers, "warmpath_endpoints_held")
        read = await _each(session, keepers, "warmpath_scrapes_total", '"read"')
        return sum(held) == _ENDPOINTS and max(held) - min(held) <= 1 and all(map(float.__ge__, read, held))

    await until_async(even)


async def _window(session: aiohttp.ClientSession, keepers: Sequence[_Keeper], seconds: int) -> Row:
    async def now() -> tuple[float, float, float]:
        scrapes = sum(await _each(session, keepers, "warmpath_scrapes_total", '"read"'))
        return scrapes, time.monotonic(), sum(cpu_s(keeper.process.pid) for keeper in keepers)

    before = await now()
    await asyncio.sleep(seconds)
    done, took, spent = (after - begun for after, begun in zip(await now(), before, strict=True))
    return {
        "keepers": len(keepers),
        "most_held": max(await _each(session, keepers, "warmpath_endpoints_held")),
        "seconds": took,
        "cores": spent / took,
        "scrapes_a_s": done / took,
        "ms_a_scrape": 1000 * spent / done,
    }


async def _each(session: aiohttp.ClientSession, keepers: Sequence[_Keeper], name: str, label: str = "") -> list[float]:
    """By keeper, the sum of a metric's samples whose labels hold this text; 0 while its page does not answer."""
    return list(await asyncio.gather(*(_sum(session, keeper.admin, name, label) for keeper in keepers)))


async def _sum(session: aiohttp.ClientSession, admin: str, name: str, label: str) -> float:
    try:
        async with session.get(f"http://{admin}/metrics") as response:
            page = await response.text()
    except aiohttp.ClientError:
        return 0.0
    lines = (line for line in page.splitlines() if line.startswith(name) and label in line)
    return sum((float(line.rpartition(" ")[2]) for line in lines), 0.0)


def _config(folder: Path, redis_url: str, endpoints: Sequence[str], admin: str) -> Path:
    gateway = {"sidecar": {"socket_dir": str(folder), "admin": admin, "workers": 1}}
    telemetry = {"scrape_ms": _SCRAPE_MS}
    return write_config(folder / "warmpath.yaml", endpoints, gateway, redis={"url": redis_url}, telemetry=telemetry)
