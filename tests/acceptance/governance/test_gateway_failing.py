"""Fail open and fail closed, path by path, on a real stack whose sidecar is killed, stopped or gone."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, Local, chat_body, configuration, running, simulated
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 2
CLOSED = "/v1/chat/completions"
OPEN = "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """A stack that fails open but for chats."""
    gateway = {"routes": [{"path": CLOSED, "fail_open": False}], "sidecar": {"workers": WORKERS}}
    async with simulated(journal, each=2) as engines:
        document = configuration({"main": [one.address for one in engines]}, gateway=gateway)
        async with running(journal, folder / "warmpath.yaml", document, engines) as started:
            yield started


async def fails_as_configured(local: Local) -> bool:
    """Whether chats are refused at once, and completions are answered by an engine."""
    began = time.monotonic()
    chat = await local.ask(CHAT, chat_body("hello"))
    took_s = time.monotonic() - began
    other = await local.ask(OPEN, b'{"model": "sim", "prompt": "hello", "max_tokens": 2}')
    assert other.status == 200
    assert chat.status in {200, 503}
    if chat.status == 503:
        assert chat.headers["x-warmpath-reason"] == "sidecar_unavailable"
        assert chat.json["error"]["code"] == 503
        # `message_timeout_ms` is what a sidecar that stands still costs.
        assert took_s < 5.0
    return chat.status == 503


def killed(pid: int) -> None:
    """SIGKILL; `serve` starts it again."""
    os.kill(pid, signal.SIGKILL)


def stopped(pid: int) -> None:
    """SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("harm", [killed, stopped])
async def test_without_workers_each_path_fails_in_its_own_way(local: Local, harm: Callable[[int], None]) -> None:
    """503 at once where a path fails closed, an engine's answer where it fails open; then all is as before."""
    assert (await local.ask(CHAT, chat_body("hello"))).status == 200
    pids = local.workers()
    for pid in pids:
        harm(pid)
    try:
        assert await fails_as_configured(local)
    finally:
        if harm is stopped:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    await local.whole(WORKERS)

    async def decides_again() -> bool:
        return (await local.ask(CHAT, chat_body("hello"))).status == 200

    await until_async(decides_again)


async def test_with_the_whole_sidecar_gone_nothing_changes(local: Local) -> None:
    """Envoy alone keeps the rules, for as long as it takes."""
    serve = local.stack.children["sidecar"]
    await serve.stop(grace_s=20.0)
    try:
        for _ in range(5):
            assert await fails_as_configured(local)
            await asyncio.sleep(0.2)
    finally:
        await serve.start()
    await local.whole(WORKERS)
