"""Bodies made to hurt whoever reads them, on a real stack: answered, at bounded memory, and nobody else notices."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, Local, chat_body, configuration, running, simulated

pytestmark = pytest.mark.asyncio(loop_scope="module")

_MIB = 1 << 20


def _asking(content: bytes) -> bytes:
    return b'{"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": %s}]}' % content


HURTFUL = {
    "deep lists": _asking(b"[" * 200_000 + b"]" * 200_000),
    "deep objects, never closed": b'{"a":' * 300_000,
    "deep schema": b'{"model": "sim", "messages": [], "tools": ' + b'[{"a":' * 90_000 + b"1" + b"}]" * 90_000 + b"}",
    "no UTF-8": _asking(b'"\xff\xfe\xc0\x80"'),
    "half a surrogate pair": _asking(b'"\\ud800 and \\udc00"'),
    "the same key twice": b'{"model": "none", "model": "sim", "max_tokens": 2, "messages": [], "messages": [{}]}',
    "a number of a million digits": _asking(b'"x"').replace(b'"max_tokens": 2', b'"max_tokens": ' + b"9" * 1_000_000),
    "no number": _asking(b'"x"').replace(b'"max_tokens": 2', b'"max_tokens": NaN, "n": 1e999, "seed": -Infinity'),
    "a name of a megabyte": _asking(b'"x"').replace(b'"sim"', b'"' + b"m" * _MIB + b'"'),
    "half a million messages": b'{"model": "sim", "messages": [' + b",".join([b"{}"] * 500_000) + b"]}",
    "half a million keys": b"{" + b",".join(b'"k%d":0' % n for n in range(500_000)) + b"}",
    "zeros": bytes(20 * _MIB),
    "text that is no JSON": b"hello " * 3_000_000,
    "only blanks": b" " * (20 * _MIB),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """A stack with one worker, so that it is the one that is hurt."""
    async with simulated(journal, each=2) as engines:
        document = configuration({"main": [one.address for one in engines]}, gateway={"sidecar": {"workers": 1}})
        async with running(journal, folder / "warmpath.yaml", document, engines) as started:
            yield started


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


@contextlib.asynccontextmanager
async def bystander(local: Local) -> AsyncIterator[list[int]]:
    """Another client, and the statuses that it got."""
    statuses: list[int] = []

    async def ask() -> None:
        while True:
            statuses.append((await local.chat("hello")).status)
            await asyncio.sleep(0.05)

    asking = asyncio.create_task(ask())
    try:
        yield statuses
    finally:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize("body", HURTFUL.values(), ids=HURTFUL.keys())
async def test_a_hurtful_body_is_answered_and_nobody_else_notices(local: Local, body: bytes) -> None:
    """The engine says what it thinks of it, or the sidecar that no such model is served; nothing dies of it."""
    [worker] = local.workers()
    before = memory(worker)
    async with bystander(local) as others:
        answers = [await local.ask(CHAT, body) for _ in range(3)]
    assert {answer.status for answer in answers} <= {200, 400, 404, 413, 422}
    assert set(others) <= {200}
    assert local.workers() == [worker]
    assert memory(worker) < before + 200 * _MIB


async def test_no_decision_failed(local: Local) -> None:
    """Not one of them was let through because of a fault of ours, and the stack serves as before."""
    for kind in ("failed_open", "unexpected", "unreadable"):
        assert await local.metric("warmpath_exchange_anomalies_total", kind=kind) == 0
    assert (await local.ask(CHAT, chat_body("hello"))).status == 200
