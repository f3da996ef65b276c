"""Replicas in front of the versions of one model, each a pool of simulated engines, and the operator's command."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Engine, simulated
from tests.acceptance.state import replicas
from tests.acceptance.state.replicas import Site
from tests.waiting import PATIENCE_S, until_async

MODEL = "chat"
OLD, NEW = "v1", "v2"
"""Versions: the one that serves, and the one that is to."""
NEXT = "next"
"""The new version's pool; the old one's is the first of all."""
SPEED = ("--prefill-tokens-per-s", "2000", "--answer-tokens", "12", "--length-spread", "0.4")
"""A question of 200 tokens is 100 ms of prefill, so that what a version adds to it stands out of a busy machine."""
PATIENT = {"redis": {"timeout_ms": 2000}, "gateway": {"message_timeout_ms": 20_000}}
"""A late answer of the store, or of a worker, would be a fault that no test put there."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What stands.

    Attributes:
        replicas: how many `warmpath serve`.
        each: engines of each version.
        engines: arguments of all engines.
        model: laid over the model.
        sections: laid over the configuration.
    """

    replicas: int = 2
    each: int = 16
    engines: Sequence[str] = SPEED
    model: Mapping[str, Any] = {}
    sections: Mapping[str, Mapping[str, Any]] = {}


class Told(msgspec.Struct, frozen=True):
    """What the command said, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output as JSON."""
        return json.loads(self.out)


class Stand:
    """What runs.

    Attributes:
        site: the replicas, Envoy and Valkey.
        engines: the engines of each version.
    """

    def __init__(self, site: Site, engines: Mapping[str, list[Engine]]) -> None:
        self.site = site
        self.engines = engines

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return self.site.front.url

    async def traits(self, version: str, **traits: float) -> None:
        """Make a version's engines so; without traits they are as the others."""
        await asyncio.gather(*(engine.control("traits", **traits) for engine in self.engines[version]))

    async def rollout(self, *arguments: str) -> Told:
        """Call `warmpath rollout`, as an operator does."""
        command = [sys.executable, "-m", "extproc", "rollout", *arguments, "--config", str(self.site.path)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=dict(os.environ)
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return Told(process.returncode, out.decode(), err.decode())

    async def done(self, *arguments: str) -> Any:
        """Call `warmpath rollout` for something that it does; its answer."""
        told = await self.rollout(*arguments, "--json")
        assert told.code == 0, told.err
        return told.json

    async def start(self, *options: str) -> Any:
        """Begin a rollout to the new version; the rollout."""
        return (await self.done("start", MODEL, "--to", NEW, *options))["rollout"]

    async def status(self, replica: int = 0) -> Any:
        """How the model stands, as a keeper tells it."""
        answer = await self.site.replicas[replica].page(f"/v1/rollouts/{MODEL}")
        assert answer.status == 200, answer.body
        return answer.json["statuses"][0]

    async def phase(self, *phases: str, patience_s: float = PATIENCE_S) -> Any:
        """Wait until the rollout is in one of these phases; the rollout then."""

        def there(rollout: Any) -> bool:
            return rollout["phase"] in phases

        return await self.when(there, patience_s)

    async def when(self, true: Callable[[Any], bool], patience_s: float = PATIENCE_S) -> Any:
        """Wait until something is true of the rollout, as a keeper tells it once it does; the rollout then."""
        found: list[Any] = []

        async def so() -> bool:
            with contextlib.suppress(aiohttp.ClientError, AssertionError):
                found.append((await self.status())["rollout"])
            return bool(found and found[-1] and true(found[-1]))

        await until_async(so, patience_s)
        return found[-1]

    async def abort(self) -> None:
        """Give the rollout up, and wait until no worker sends anybody to the new version any more."""
        await self.done("abort", MODEL)

        async def left() -> bool:
            shares = [await one.metric("warmpath_version_share", version=NEW) for one in self.site.replicas]
            return not any(shares)

        await until_async(left)

    async def events(self) -> list[Any]:
        """What happened to the model's rollouts, the oldest first."""
        return [line["event"] for line in reversed((await self.done("history", MODEL))["events"])]


@contextlib.asynccontextmanager
async def stand(journal: Journal, folder: Path, fleet: Fleet) -> AsyncIterator[Stand]:
    """Versions, and replicas in front of them; ready on entry, and nothing is left behind on exit."""
    arguments = ("--model", MODEL, *fleet.engines)
    async with (
        simulated(journal, each=fleet.each, arguments=arguments) as old,
        simulated(journal, each=fleet.each, arguments=(*arguments, "--text-seed", "1")) as new,
    ):
        versions = {OLD: {"pool": POOL, "weight": 1}, NEW: {"pool": NEXT, "weight": 0}}
        plan = replicas.Plan(
            replicas=fleet.replicas,
            envoys=((),),
            sections=_merged(PATIENT, fleet.sections),
            models={MODEL: {"versions": versions, **fleet.model}},
        )
        async with replicas.site(journal, folder, {POOL: old, NEXT: new}, plan) as site:
            yield Stand(site, {OLD: old, NEW: new})


def _merged(base: Mapping[str, Mapping[str, Any]], over: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: {**base.get(name, {}), **over.get(name, {})} for name in {*base, *over}}
