"""`warmpath.yaml` is edited while requests flow."""

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Local, configuration, running, simulated, write
from tests.waiting import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUMBERS = itertools.count()
PROCESSES = 3
"""Those that follow the file: `serve`, the keeper and one worker."""


class Edited(msgspec.Struct, frozen=True):
    """A stack and the document its configuration was written from."""

    local: Local
    path: Path
    document: dict[str, Any]

    async def write(self, endpoints: int) -> None:
        """Write the configuration with the first so many engines, and wait until worker and keeper use it."""
        in_use = self.heard("is in use")
        document = copy.deepcopy(self.document)
        document["pools"][POOL]["endpoints"] = [one.address for one in self.local.engines[:endpoints]]
        await asyncio.to_thread(write, self.path, document)
        await until(lambda: self.heard("is in use") == in_use + 2)

    def heard(self, words: str) -> int:
        """How many lines of the stack had these words so far."""
        return len(list(self.local.journal.containing(words)))

    async def gets_traffic(self, engine: int) -> bool:
        """Send one new prompt; whether this engine got it."""
        before = await self.local.engines[engine].prompt_tokens()
        answer = await self.local.chat(f"new text {next(NUMBERS)}, " * 40)
        assert answer.status == 200, answer.body[:300]
        return await self.local.engines[engine].prompt_tokens() > before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edited(journal: Journal, folder: Path) -> AsyncIterator[Edited]:
    """Three engines, of which the configuration names two."""
    path = folder / "warmpath.yaml"
    async with simulated(journal, each=3) as engines:
        document = configuration({POOL: [engine.address for engine in engines[:2]]})
        async with running(journal, path, document, engines) as local:
            yield Edited(local, path, document)


async def test_a_new_endpoint_gets_traffic_without_a_restart(edited: Edited) -> None:
    """An endpoint added to the file reaches Envoy and serves; one taken away serves no more; no process restarts."""
    local = edited.local
    processes = [*local.workers(), local.keeper(), *(child.pid for child in local.stack.children.values())]
    for _ in range(10):
        assert not await edited.gets_traffic(2)
    await edited.write(3)
    await until_async(lambda: edited.gets_traffic(2))
    await edited.write(2)

    for _ in range(10):
        assert not await edited.gets_traffic(2)
    assert processes == [*local.workers(), local.keeper(), *(child.pid for child in local.stack.children.values())]


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("models: {sim: {pool: main}\n", "warmpath.yaml"),
        ("models: {sim: {pool: main}}\npools: {main: {endpoint: ['127.0.0.1:1']}}\n", "endpoints"),
        ("models: {sim: {pool: other}}\npools: {main: {endpoints: ['127.0.0.1:1']}}\n", "other"),
        ("", "warmpath.yaml"),
    ],
    ids=["no YAML", "misspelt key", "missing pool", "empty"],
)
async def test_a_bad_edit_is_refused_and_said(edited: Edited, mistake: str, named: str) -> None:
    """The configuration in use stays, every process says why, and the next good edit is taken."""
    refused = edited.heard("is refused")
    await asyncio.to_thread(edited.path.write_text, mistake, encoding="utf-8")
    await until(lambda: edited.heard("is refused") == refused + PROCESSES)
    assert all(named in line for line in list(edited.local.journal.containing("is refused"))[refused:])
    for _ in range(5):
        assert not await edited.gets_traffic(2)
    await edited.write(3)
    await until_async(lambda: edited.gets_traffic(2))
    await edited.write(2)
