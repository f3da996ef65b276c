"""Replicas of the sidecar as hosts run them: each a `warmpath serve` on an address of its own, one Valkey for all.

Every address of 127.0.0.0/8 is this machine: replica 0 has 127.0.0.1, replica 1 has 127.0.0.2, with the same ports.
"""

import asyncio
import contextlib
import copy
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as stubs

from extproc import addresses, reload
from extproc.config import Config, split_address
from extproc.processes import Child
from tests.acceptance import processes
from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Answer, ask, configuration, metric, write
from tests.acceptance.state.books import Books
from tests.acceptance.state.front import Front
from tests.ports import free_port, free_ports
from tests.unit.envoy.gateway import Gateway, connected
from tests.valkey import Valkey
from tests.waiting import until, until_async
from tests.wire.envoy import running_envoy


class Addressed(Protocol):
    """Something that serves a pool."""

    address: str


Pools = Mapping[str, Sequence[Addressed]]
"""Who serves each pool, the default pool first."""

_STOP_S = 20.0
_PATIENT = aiohttp.ClientTimeout(total=60.0)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a site consists of.

    Attributes:
        replicas: how many `warmpath serve`.
        workers: workers of each.
        envoys: settings laid over the configuration of each Envoy, as `--set` takes them.
        sections: laid over the sections of `warmpath.yaml`; the endpoints of each pool are the engines given.
        models: the models, in place of one for each pool; empty for those.
        store_url: a store that others run; empty to run a Valkey.
    """

    replicas: int = 2
    workers: int = 1
    envoys: Sequence[Sequence[str]] = ()
    sections: Mapping[str, Any] = {}
    models: Mapping[str, Any] = {}
    store_url: str = ""


class Replica:
    """One `warmpath serve`.

    Attributes:
        name: for people.
        config: its configuration.
        child: its process, the parent of its workers and its keeper.
    """

    def __init__(self, name: str, config: Config, child: Child, http: aiohttp.ClientSession) -> None:
        self.name = name
        self.config = config
        self.child = child
        self._http = http

    def worker_addresses(self) -> list[str]:
        """Where each of its workers listens."""
        return [addresses.worker(self.config.gateway.sidecar, at) for at in range(self.config.gateway.sidecar.workers)]

    async def page(self, path: str) -> Answer:
        """A page of its keeper. Raises aiohttp.ClientError when it does not answer."""
        return await ask(self._http, f"http://{self.config.gateway.sidecar.admin}{path}", method="GET")

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of all samples of a metric with these labels."""
        return await metric(self._http, f"http://{self.config.gateway.sidecar.admin}/metrics", name, labels)

    async def well(self) -> bool:
        """Whether all its parts say that they are well."""
        with contextlib.suppress(aiohttp.ClientError):
            return set((await self.page("/readyz")).json["components"].values()) == {"ok"}
        return False

    async def ready(self) -> None:
        """Wait until it takes requests."""
        await until_async(self.takes_requests)

    async def takes_requests(self) -> bool:
        """Whether it says that it takes requests."""
        with contextlib.suppress(aiohttp.ClientError):
            return (await self.page("/readyz")).status == 200
        return False

    def pids(self) -> list[int]:
        """Its processes, the parent first."""
        return [one.pid for one in processes.tree(self.child.pid)]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each of its processes."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def kill(self) -> None:
        """SIGKILL of every process, the parent stopped first so that it neither replaces nor warns a child."""
        left = processes.tree(self.child.pid)
        self.child.send(signal.SIGSTOP)
        for one in [*left[1:], *left[:1]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        await self.child.wait()
        await until(lambda: not processes.left_of(left))

    async def stop(self) -> int:
        """SIGTERM, and wait for its end; returns its exit code."""
        return await self.child.stop(_STOP_S)

    async def start(self) -> None:
        """Start it again after it ended."""
        await self.child.start()

    @contextlib.asynccontextmanager
    async def as_gateway(self, worker: int = 0) -> AsyncIterator[Gateway]:
        """A connection to one of its workers, in place of Envoy's."""
        async with connected(self.worker_addresses()[worker]) as channel:
            yield Gateway(stubs.ExternalProcessorStub(channel))


class Site:
    """Everything that runs.

    Attributes:
        replicas: the sidecar, several times.
        fronts: the Envoys.
        books: what it has on its books.
        path: the configuration file of all replicas.
        document: what was written to it.
        journal: what the children print.
        http: a client session.
    """

    def __init__(self, path: Path, document: dict[str, Any], journal: Journal, store: Valkey | None) -> None:
        self.replicas: list[Replica] = []
        self.fronts: list[Front] = []
        self._store = store
        self.path = path
        self.document = document
        self.journal = journal
        self.books = Books(document["redis"]["url"])
        # Without a limit: a client that queues requests by itself would hide what becomes of them.
        self.http = aiohttp.ClientSession(timeout=_PATIENT, connector=aiohttp.TCPConnector(limit=0))

    @property
    def store(self) -> Valkey:
        """The Valkey of all replicas. Raises AssertionError when others run the store."""
        assert self._store is not None
        return self._store

    @property
    def front(self) -> Front:
        """The first Envoy."""
        return self.fronts[0]

    async def well(self) -> None:
        """Wait until every part of every replica is well, and every Envoy knows all of them and all engines."""
        for replica in self.replicas:
            await until_async(replica.well)
        named = self.document["pools"][POOL]["endpoints"]
        for front in self.fronts:
            await front.knows([at for one in self.replicas for at in one.worker_addresses()], named)

    def heard(self, words: str, process: str) -> int:
        """How many lines with these words the processes whose name begins so have printed."""
        return sum(f'"process": "{process}' in line for line in self.journal.containing(words))

    async def use(self, pools: Pools) -> None:
        """Write these endpoints to the file; wait until every worker and keeper uses them."""
        self.document = copy.deepcopy(self.document)
        for name, engines in pools.items():
            self.document["pools"][name]["endpoints"] = [one.address for one in engines]
        workers, keepers = self.heard("is in use", "worker-"), self.heard("is in use", "keeper")
        expected = sum(len(one.worker_addresses()) for one in self.replicas)
        await asyncio.to_thread(write, self.path, self.document)
        await until(lambda: self.heard("is in use", "worker-") >= workers + expected)
        await until(lambda: self.heard("is in use", "keeper") >= keepers + len(self.replicas))

    async def metric(self, name: str, **labels: str) -> float:
        """Sum over all replicas."""
        return sum([await one.metric(name, **labels) for one in self.replicas])


@contextlib.asynccontextmanager
async def site(journal: Journal, folder: Path, pools: Pools, plan: Plan) -> AsyncIterator[Site]:
    """Run a site whose pools have these engines; ready on entry, and nothing is left behind on exit."""
    document = _document(pools, plan)
    path = folder / "warmpath.yaml"
    async with contextlib.AsyncExitStack() as cleanup:
        store = None
        if not plan.store_url:
            store = Valkey()
            cleanup.callback(store.stop)
            await asyncio.to_thread(store.start)
        document["redis"] = {"url": store.url if store else plan.store_url, **document.get("redis", {})}
        await asyncio.to_thread(write, path, document)
        here = Site(path, document, journal, store)
        cleanup.push_async_callback(here.http.close)
        cleanup.push_async_callback(here.books.close)
        for index in range(plan.replicas):
            replica = replica_of(here, index, folder)
            here.replicas.append(replica)
            cleanup.push_async_callback(replica.stop)
            await replica.start()
        for replica in here.replicas:
            await replica.ready()
        for settings in plan.envoys:
            config = reload.read(path, settings)
            envoy = await cleanup.enter_async_context(running_envoy(config))
            here.fronts.append(Front(envoy, here.http))
        await here.well()
        yield here


def replica_of(here: Site, index: int, folder: Path) -> Replica:
    """One more replica for a site, not started yet."""
    host = f"127.0.0.{index + 1}"
    port = split_address(here.document["gateway"]["sidecar"]["admin"])[1]
    settings = [f"gateway.sidecar.bind={host}", f"gateway.sidecar.admin={host}:{port}"]
    name = f"replica-{index}"
    command = [sys.executable, "-m", "extproc", "serve", "--config", str(here.path)]
    overrides = [part for setting in settings for part in ("--set", setting)]
    # What a killed process leaves of its scratch files goes with the test's folder.
    child = Child(name, [*command, *overrides], here.journal.write, env={"TMPDIR": str(folder)})
    return Replica(name, reload.read(here.path, settings), child, here.http)


def _document(pools: Pools, plan: Plan) -> dict[str, Any]:
    """The configuration file: a host for each replica, and ports that are the same on every host."""
    *workers, keeper = free_ports(plan.workers + 1)
    named = {name: [one.address for one in engines] for name, engines in pools.items()}
    document = configuration(named, **plan.sections)
    document["models"] = dict(plan.models) or document["models"]
    document["gateway"]["sidecar"] |= {
        "hosts": [f"127.0.0.{index + 1}" for index in range(plan.replicas)],
        "workers": plan.workers,
        "worker_port": workers[0],
        "keeper_port": keeper,
        "admin": f"127.0.0.1:{free_port()}",
        "drain_s": 10.0,
    }
    return document
