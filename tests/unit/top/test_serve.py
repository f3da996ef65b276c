"""`warmpath serve`: its children, and what it says when they cannot live."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from extproc import inner, serve
from extproc.errors import ConfigError
from extproc.processes import Child
from tests.acceptance import processes
from tests.ports import free_port
from tests.unit.top.parts import command, config, document, free_sidecar, write
from tests.valkey import Valkey
from tests.waiting import until, until_async


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    """One store for all tests here."""
    with Valkey() as running:
        yield running


def sockets(folder: Path) -> list[Path]:
    """Sockets in a folder."""
    return list(folder.glob("*.sock"))


async def status(url: str) -> int:
    """HTTP status of a page; 0 when nobody answers."""
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            return answer.status
    except aiohttp.ClientError:
        return 0


async def test_a_worker_that_dies_is_started_again_and_nothing_is_left_at_the_end(
    tmp_path: Path, valkey: Valkey
) -> None:
    """Ready, a worker killed, ready again, SIGTERM: exit code 0 and no process of it remains."""
    gateway = free_sidecar(socket_dir=str(tmp_path))
    path = write(tmp_path / "warmpath.yaml", document(redis={"url": valkey.url}, gateway=gateway))
    url = f"http://{gateway['sidecar']['admin']}/readyz"

    async def ready() -> bool:
        return await status(url) == 200

    async with command("serve", "--config", str(path)) as running:
        await until_async(ready)
        (worker,) = [one for one in processes.children(running.child.pid) if " worker " in one.command]
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: bool(running.said("a process died and is started again")))
        (said,) = running.said("a process died and is started again")
        assert (said["child"], said["how"], said["wait_s"]) == ("worker-0", "SIGKILL", 0.1)
        # The socket of the dead worker is still there: the new one takes its place.
        await until_async(ready)
        family = processes.tree(running.child.pid)
        assert len(family) == 3
        running.child.send(signal.SIGTERM)
        assert await running.child.wait() == 0
        assert processes.left_of(family) == []
        assert await asyncio.to_thread(sockets, tmp_path) == []
    assert "Traceback" not in running.text


async def test_a_relay_is_started_watched_and_stopped_with_the_rest(tmp_path: Path, valkey: Valkey) -> None:
    """Where it is enabled: killed, it comes back; its page is part of the metrics; nothing of it is left at the end."""
    gateway = free_sidecar(socket_dir=str(tmp_path))
    content = document(redis={"url": valkey.url}, gateway=gateway, relay={"enabled": True})
    path = write(tmp_path / "warmpath.yaml", content)
    admin = f"http://{gateway['sidecar']['admin']}"

    async def told(page: str, words: str) -> bool:
        async with aiohttp.ClientSession() as http:
            try:
                async with http.get(f"{admin}{page}") as answer:
                    return words in await answer.text()
            except aiohttp.ClientError:
                return False

    async with command("serve", "--config", str(path)) as running:
        await until_async(lambda: told("/readyz", '"relay": "ok"'))
        assert await told("/metrics", 'warmpath_relay_open{process="relay"}')
        (relay,) = [one for one in processes.children(running.child.pid) if " relay " in one.command]
        os.kill(relay.pid, signal.SIGKILL)
        await until(lambda: bool(running.said("a process died and is started again")))
        await until_async(lambda: told("/readyz", '"relay": "ok"'))
        family = processes.tree(running.child.pid)
        running.child.send(signal.SIGTERM)
        assert await running.child.wait() == 0
        assert processes.left_of(family) == []
        assert await asyncio.to_thread(sockets, tmp_path) == []
    assert "Traceback" not in running.text


async def test_a_worker_killed_while_the_file_is_broken_comes_back(tmp_path: Path, valkey: Valkey) -> None:
    """Somebody is editing and a worker dies: the new one starts with the configuration that was in use."""
    gateway = free_sidecar(socket_dir=str(tmp_path))
    path = write(tmp_path / "warmpath.yaml", document(redis={"url": valkey.url}, gateway=gateway))
    url = f"http://{gateway['sidecar']['admin']}/readyz"

    async def ready() -> bool:
        return await status(url) == 200

    async with command("serve", "--config", str(path)) as running:
        await until_async(ready)
        path.write_text("models: [")
        (worker,) = [one for one in processes.children(running.child.pid) if " worker " in one.command]
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: bool(running.said("a process died and is started again")))
        await until(lambda: bool(running.said("the configuration is refused, the one in use before stays")))
        await until_async(ready)


async def test_a_taken_port_is_said_and_taken_once_it_is_free(tmp_path: Path, valkey: Valkey) -> None:
    """One worker cannot listen: the other serves, the log names address and setting, and it heals by itself."""
    gateway = free_sidecar(workers=2)
    taken = gateway["sidecar"]["worker_port"]
    path = write(tmp_path / "warmpath.yaml", document(redis={"url": valkey.url}, gateway=gateway))
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", taken))
        occupant.listen()
        async with command("serve", "--config", str(path)) as running:
            await until(lambda: f"cannot listen on 127.0.0.1:{taken}: in use" in running.text)
            assert "gateway.sidecar" in running.text
            await until(lambda: len(running.said("a process died and is started again")) >= 2)
            assert all(each["how"] == "exit code 2" for each in running.said("a process died and is started again"))
            async with inner.channel(f"127.0.0.1:{taken + 1}") as channel:
                await until_async(lambda: inner.is_ready(channel))
            occupant.close()
            async with inner.channel(f"127.0.0.1:{taken}") as channel:
                await until_async(lambda: inner.is_ready(channel))
    assert "Traceback" not in running.text


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, r"redis\.url is missing"),
        ({"redis": {"url": "redis://:p/w@h"}}, r"redis\.url has something else than a number for its database"),
        (
            {"redis": {"url": "redis://h"}, "gateway": {"sidecar": {"socket_dir": "/nowhere/here"}}},
            r"gateway\.sidecar\.socket_dir: no folder /nowhere/here: make it",
        ),
    ],
)
async def test_what_no_child_could_live_with_is_refused_at_once(sections: dict[str, object], told: str) -> None:
    """Children that can never start are not started again and again."""
    with pytest.raises(ConfigError, match=told):
        await serve.serve(config(**sections), Path("warmpath.yaml"), [])


async def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No memory for a process, an interpreter that is being replaced: both pass, so giving up would be wrong."""
    program = tmp_path / "program"
    child = Child("worker-0", [str(program)])
    keeping = asyncio.create_task(serve._keep_alive(child))
    await until(lambda: any(getattr(each, "child", "") == "worker-0" for each in caplog.records))
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    await until(lambda: child.running)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await child.stop()


async def test_overrides_reach_every_child(tmp_path: Path, valkey: Valkey) -> None:
    """`--set` given to `serve` holds in workers and keeper too."""
    gateway = free_sidecar()
    path = write(tmp_path / "warmpath.yaml", document(gateway=gateway))
    admin = f"127.0.0.1:{free_port()}"
    settings = ("--set", f"redis.url={valkey.url}", "--set", f"gateway.sidecar.admin={admin}")

    async def ready() -> bool:
        return await status(f"http://{admin}/readyz") == 200

    async with command("serve", "--config", str(path), *settings):
        await until_async(ready)


async def test_a_full_disk_does_not_end_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the copy of the configuration cannot be written, that is said, and the next change is followed as before."""
    await serve._keeping(tmp_path / "gone" / "last-good.yaml")(config())
    assert "the configuration in use is not kept" in caplog.text
    await serve._keeping(tmp_path / "last-good.yaml")(config())
    assert (tmp_path / "last-good.yaml").is_file()
