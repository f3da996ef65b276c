"""`warmpath up` as a user runs it: one command, one URL, and nothing left of it afterwards."""

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.config import split_address
from extproc.processes import Child
from tests.acceptance import processes
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, ask, chat_body, configuration, write
from tests.acceptance.processes import Process
from tests.waiting import until

PARTS = ("valkey", "engines", "sidecar", "envoy", "warmpath")


class Up:
    """The command, started in a temporary folder of its own."""

    def __init__(self, folder: Path, journal: Journal, document: dict[str, Any]) -> None:
        self.path = folder / "warmpath.yaml"
        self.scratch = folder / "t"
        self.lines: list[str] = []
        self.document = document
        self._journal = journal
        command = [sys.executable, "-m", "extproc", "up", "--config", str(self.path), "--sim", "2"]
        self.child = Child("up", command, self._hear, {"TMPDIR": str(self.scratch)})

    def _hear(self, name: str, line: str) -> None:
        self.lines.append(line)
        self._journal.write(name, line)

    async def start(self) -> None:
        """Start it, without waiting for anything."""
        self.scratch.mkdir()
        write(self.path, self.document)
        await self.child.start()

    @property
    def url(self) -> str | None:
        """The URL of its readiness line, once there is one."""
        found = (re.match(r"warmpath +\| ready: (http://\S+)", line) for line in self.lines)
        return next((match[1] for match in found if match), None)

    async def ready(self) -> str:
        """Wait for the readiness line; its URL."""
        await until(lambda: self.url is not None or not self.child.running)
        assert self.url is not None, self.lines[-5:]
        return self.url

    def everything(self) -> list[Process]:
        """All of its processes, and any that works in its folder."""
        own = processes.tree(self.child.pid)
        return own + [one for one in processes.running() if str(self.scratch.parent) in one.command and one not in own]


@pytest.fixture
async def up(journal: Journal) -> AsyncIterator[Up]:
    """The command with two simulated engines; killed with all it started, should a test leave it running."""
    folder = Path(tempfile.mkdtemp(prefix="wu-"))
    document = configuration({"main": ["127.0.0.1:1"]})
    command = Up(folder, journal, document)
    yield command
    for one in command.everything() if command.child.pid else []:
        if processes.left_of([one]):
            os.kill(one.pid, signal.SIGKILL)
    await command.child.stop()
    shutil.rmtree(folder, ignore_errors=True)


def kinds(every: list[Process]) -> set[str]:
    """Which of the parts are among these processes."""
    words = {"valkey": "valkey-server", "envoy": "/envoy ", "worker": " worker ", "keeper": " keeper ", "sim": " sim "}
    return {kind for kind, word in words.items() if any(word in one.command for one in every)}


async def test_it_says_where_it_is_and_prefixes_what_its_parts_say(up: Up) -> None:
    """One readiness line with the URL, which serves; every other line names its part. Ctrl-C ends all, exit code 0."""
    await up.start()
    url = await up.ready()
    assert url == f"http://{up.document['gateway']['listen']}"
    async with aiohttp.ClientSession() as http:
        assert (await ask(http, f"{url}{CHAT}", chat_body("hello"))).status == 200
    every = up.everything()
    assert kinds(every) == {"valkey", "envoy", "worker", "keeper", "sim"}
    assert len(list(up.scratch.iterdir())) == 1
    up.child.send(signal.SIGINT)
    assert await up.child.wait() == 0
    await nothing_left(up, every)
    assert list(up.scratch.iterdir()) == []
    prefixes = {line.partition("|")[0].strip() for line in up.lines}
    assert prefixes <= set(PARTS), prefixes
    assert {"valkey", "engines", "sidecar", "warmpath"} <= prefixes
    assert up.lines[-1].endswith("| stopped")


async def test_ctrl_c_while_it_starts_leaves_nothing(up: Up) -> None:
    """An interrupt before the stack is ready stops what was started so far."""
    await up.start()
    await until(lambda: any(line.startswith("valkey") for line in up.lines))
    every = up.everything()
    up.child.send(signal.SIGINT)
    assert await up.child.wait() == 0
    await nothing_left(up, every)
    assert up.url is None
    assert list(up.scratch.iterdir()) == []


@pytest.mark.parametrize("setting", ["gateway.listen", "gateway.admin", "gateway.sidecar.admin"])
async def test_a_port_in_use_is_said_with_the_remedy(up: Up, setting: str) -> None:
    """The error names the address, the setting and what to do; nothing was left behind, and nothing was shared."""
    section: Any = up.document
    for step in setting.split("."):
        section = section[step]
    with socket.create_server(split_address(section)):
        await up.start()
        every = up.everything()
        assert await up.child.wait() == 1
    said = [line for line in up.lines if line.startswith("warmpath: ")]
    assert len(said) == 1, up.lines
    assert section in said[0]
    assert f"--set {setting}=" in said[0]
    await nothing_left(up, every)
    assert list(up.scratch.iterdir()) == []


@pytest.mark.parametrize("part", ["valkey", "sim", "envoy"])
async def test_a_part_that_dies_ends_it_with_its_last_words(up: Up, part: str) -> None:
    """Without one of its parts the command ends with exit code 1, says which it was, and leaves nothing."""
    await up.start()
    await up.ready()
    every = up.everything()
    os.kill(next(one.pid for one in every if part in kinds([one])), signal.SIGKILL)
    assert await up.child.wait() == 1
    name = {"valkey": "valkey", "sim": "engines", "envoy": "envoy"}[part]
    assert any(line.startswith("warmpath") and f"{name} ended" in line for line in up.lines), up.lines[-8:]
    await nothing_left(up, every)
    assert list(up.scratch.iterdir()) == []


async def test_killed_itself_it_leaves_nothing_running(up: Up) -> None:
    """SIGKILL gives it no chance to stop its parts: they end by themselves."""
    await up.start()
    await up.ready()
    every = up.everything()
    up.child.send(signal.SIGKILL)
    # Not `wait`: whoever still holds the pipe to the test would keep it open.
    await until(lambda: not up.child.running)
    await nothing_left(up, every)


async def nothing_left(up: Up, every: list[Process]) -> None:
    """Wait until neither those processes nor any that works in the command's folder is there, nor its ports open."""
    with contextlib.suppress(TimeoutError):
        await until(lambda: not processes.left_of(every + up.everything()), patience_s=20)
    assert processes.left_of(every + up.everything()) == []
    for address in (up.document["gateway"]["listen"], up.document["gateway"]["admin"]):
        await until(_free(address))


def _free(address: str) -> Callable[[], bool]:
    def free() -> bool:
        with contextlib.closing(socket.socket()) as probe:
            return probe.connect_ex(split_address(address)) != 0

    return free
