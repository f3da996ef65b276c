"""One worker inside the test process, on the memory store alone, behind a real Envoy over real gRPC."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from extproc import snapshot
from extproc.clock import SystemClock
from extproc.config import Config
from extproc.envoy.access_log import AccessLog
from extproc.envoy.discovery import Discovery, Member, Roster
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, stop
from extproc.gossip import Gossip
from extproc.learner import Learner
from extproc.router import Router, Surroundings
from extproc.showing import Showing
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.telemetry.metrics import Metrics
from tests.wire.envoy import running_envoy

_REPLICA = "inside"


class Inside(msgspec.Struct, frozen=True):
    """What is running.

    Attributes:
        url: base URL of the gateway.
        store: the only store.
        processor: the ext_proc service.
    """

    url: str
    store: MemoryStore
    processor: Processor


@contextlib.asynccontextmanager
async def inside(document: Mapping[str, Any], folder: Path) -> AsyncIterator[Inside]:
    """Run it for a configuration whose endpoints are addresses; sockets lie in `folder`."""
    config = msgspec.convert(document, Config)
    sidecar = msgspec.structs.replace(config.gateway.sidecar, socket_dir=str(folder), workers=1)
    config = msgspec.structs.replace(config, gateway=msgspec.structs.replace(config.gateway, sidecar=sidecar))
    clock, health = SystemClock(), Health()
    store = MemoryStore(clock)
    members = {name: {at: at for at in pool.endpoints} for name, pool in config.pools.items()}
    knowledge = {name: PoolKnowledge(Priors(20_000.0, 4.0, 100_000, 256)) for name in config.pools}
    fleet = snapshot.build(config, members, {}, knowledge, clock.wall())
    numbers = itertools.count()
    around = Surroundings(config, fleet, knowledge, store, _REPLICA, lambda: f"{_REPLICA}-{next(numbers)}")
    gossip, metrics = Gossip(store, knowledge, _REPLICA, 1000), Metrics()
    showing = Showing(metrics, around, ResilientStore(store, MemoryStore(clock)))
    processor = Processor(Router(around, gossip, showing, clock), Limits())
    log = AccessLog(Learner(around, gossip, metrics))
    discovery = Discovery(Roster({name: [Member(at) for at in pool.endpoints] for name, pool in config.pools.items()}))
    async with contextlib.AsyncExitStack() as cleanup:
        for name, services in (("worker-0", (processor, log, health)), ("keeper", (discovery, health))):
            handlers = [service.handler() for service in services]
            server = make_server(handlers, max_body_bytes=config.gateway.max_body_bytes)
            bind(server, f"unix:{folder / name}.sock")
            await server.start()
            busy = [processor] if processor in services else []
            cleanup.push_async_callback(stop, server, health, busy, [log, discovery], drain_s=5)
        health.set_ready(True)
        envoy = await cleanup.enter_async_context(running_envoy(config))
        yield Inside(envoy.url, store, processor)
