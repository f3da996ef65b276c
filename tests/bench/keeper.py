"""What keepers cost that scrape 100 endpoints four times a second, of each kind of engine.

vLLM's page is a real one of 61 KB; the others are short, in the names and shapes of the engines. All kinds are found
out by their pages.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
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
_FOLDER = Path(__file__).parents[1] / "unit" / "engines" / "pages"
_VLLM = {"/metrics": "vllm_0.32.txt"}
_OTHERS = {
    "sglang": {"/v1/loads?include=core": "sglang_0.5.23_loads.json", "/server_info": "sglang_0.5.23_server_info.json"},
    "tensorrt_llm": {"/prometheus/metrics": "trtllm_1.3_prometheus.txt", "/v1/models": "trtllm_1.3_models.json"},
}


class _Keeper(NamedTuple):
    """A keeper of one host: its process, and its admin address."""

    process: Child
    admin: str


def bench(scale: Scale) -> Findings:
    """Windows of CPU time of running keepers that share the endpoints."""
    findings = Findings(
        f"keepers, {_ENDPOINTS} endpoints scraped every {_SCRAPE_MS} ms, "
        f"vLLM's pages of {(_FOLDER / _VLLM['/metrics']).stat().st_size:,} B"
    )
    with TemporaryDirectory(prefix="bench-") as folder:
        at = Path(folder) / "s"
        with Valkey(0, "--unixsocket", str(at)):
            url, rounds, seconds = f"unix://{at}", scale.pick(9, 3), scale.pick(5, 2)
            findings.rows += run(_measure(Path(folder) / "vllm", url, "vllm", _VLLM, _KEEPERS, rounds, seconds))
            for kind, pages in _OTHERS.items():
                findings.rows += run(_measure(Path(folder) / kind, url, kind, pages, (1,), scale.pick(3, 1), seconds))
    wanted = _ENDPOINTS * 1000 / _SCRAPE_MS
    for kind in ("vllm", *_OTHERS):
        alone = [row for row in findings.rows if row["keepers"] == 1 and row["engine"] == kind]
        share = middle([float(row["ms_a_scrape"]) for row in alone]) / 1000 * wanted
        findings.checks.append(Check(f"keeper at {wanted:.0f} scrapes/s of {kind}", share, 0.5, "core"))
    one, most = (
        middle(
            [float(row["scrapes_a_s"]) for row in findings.rows if (row["engine"], row["keepers"]) == ("vllm", number)]
        )
        for number in (_KEEPERS[0], _KEEPERS[-1])
    )
    findings.checks.append(Check(f"scrapes by {_KEEPERS[-1]} keepers against one", most / one, 1.2, "x"))
    findings.notes.append("one process serves all pages; its CPU is not counted, the gossip of states to Valkey is")
    findings.notes.append("cores and scrapes are those of all keepers together; most_held is the largest share of one")
    return findings


async def _measure(
    folder: Path, redis_url: str, kind: str, pages: Mapping[str, str], numbers: Sequence[int], rounds: int, seconds: int
) -> list[Row]:
    """Windows of running keepers, more and more of them, over engines with these files as pages."""
    await asyncio.to_thread(folder.mkdir)
    given = [argument for path, name in pages.items() for argument in ("--page", f"{path}={_FOLDER / name}")]
    rows = list[Row]()
    async with (
        listening("engine", "--ports", str(_ENDPOINTS), *given) as (_, endpoints),
        aiohttp.ClientSession() as session,
        contextlib.AsyncExitStack() as stack,
    ):
        keepers = list[_Keeper]()
        for number in numbers:
            while len(keepers) < number:
                keepers.append(await _start(stack, folder / f"k{len(keepers)}", redis_url, endpoints))
            await _shared(session, keepers)
            rows += [{"engine": kind, **await _window(session, keepers, seconds)} for _ in range(rounds)]
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
