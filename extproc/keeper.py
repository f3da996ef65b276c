"""The keeper of a host: reads engines, tells Envoy the members of each pool, shows metrics and health over HTTP."""

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Coroutine, Sequence
from itertools import count
from pathlib import Path

import grpc
import msgspec
from aiohttp import web

from extproc import __version__, addresses, explain_pages, inner, relaying, reload
from extproc.clock import SystemClock
from extproc.config import Config, Gateway, split_address
from extproc.engines.detect import all_adapters
from extproc.envoy import server as grpc_server
from extproc.envoy.discovery import Discovery, Member, Roster
from extproc.envoy.health import Health
from extproc.errors import ConfigError, StoreError, WorkerError
from extproc.fleet import kv_reader, rollouts, scraper
from extproc.fleet.holding import Holding
from extproc.fleet.kv_reader import KvReader
from extproc.fleet.membership import Membership
from extproc.fleet.rollouts import Controller
from extproc.fleet.scraper import Scraper
from extproc.operators import Operators
from extproc.outbox import Outbox
from extproc.processes import until_stopped
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from extproc.store_watch import StoreWatch
from extproc.telemetry import logs, pages
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.rollout_metrics import RolloutMetrics

log = logging.getLogger(__name__)


class Parts(msgspec.Struct, frozen=True):
    """Everything a keeper is made of."""

    membership: Membership
    holding: Holding
    scraper: Scraper
    events: KvReader
    rollouts: Controller
    operators: Operators
    roster: Roster
    discovery: Discovery
    health: Health
    store: ResilientStore
    watch: StoreWatch
    metrics: Metrics
    workers: dict[str, grpc.aio.Channel]
    relay: relaying.Remote | None


async def run(config: Config, path: Path, settings: Sequence[str]) -> int:
    """Keep until SIGINT or SIGTERM; returns the exit code.

    Raises:
        ConfigError: no usable store is configured, or an address cannot be opened.
    """
    logs.setup(config.telemetry.log_level, "keeper")
    parts = compose(config)

    async def apply(changed: Config) -> None:
        logs.setup(changed.telemetry.log_level, "keeper")
        parts.scraper.apply(changed)
        parts.events.apply(changed)
        parts.rollouts.apply(changed)
        parts.operators.apply(changed)
        await parts.membership.apply(changed)

    with contextlib.suppress(StoreError):
        await parts.store.ping()
    await apply(config)
    await parts.watch.look()
    # Before Envoy can ask: an answer without members would take away the endpoints it has.
    _tell_members(parts)
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.push_async_callback(_close, parts)
        admin = await _serve_admin(parts, config.gateway)
        cleanup.push_async_callback(admin.cleanup)
        services = [parts.discovery.handler(), parts.health.handler(), parts.operators.service()]
        server = grpc_server.make_server(services, max_body_bytes=0)
        grpc_server.bind(server, addresses.keeper(config.gateway.sidecar))
        await server.start()
        watcher = reload.Watcher(path, settings, config, apply)
        forever = (parts.membership, parts.scraper, parts.events, parts.rollouts, parts.watch, watcher)
        background = [asyncio.create_task(task) for task in (*(each.run() for each in forever), _tell_envoy(parts))]
        parts.health.set_ready(True)
        log.info("keeper is ready", extra={"admin": config.gateway.sidecar.admin, "keeper": parts.holding.holder})
        code = await until_stopped(background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await grpc_server.stop(server, parts.health, long_lived=[parts.discovery], drain_s=1.0)
    return code


async def _close(parts: Parts) -> None:
    await asyncio.gather(*(channel.close() for channel in parts.workers.values()))
    if parts.relay:
        await parts.relay.close()
    await parts.store.close()


def compose(config: Config) -> Parts:
    """Build the parts of a keeper; channels connect when they are first used.

    Raises:
        ConfigError: no usable store is configured.
    """
    clock = SystemClock()
    # A keeper waits longer than a decision would: nobody waits for it.
    redis = RedisStore(addresses.store(config.redis), max(config.redis.timeout_ms, 500), config.redis.key_prefix)
    store = ResilientStore(redis, MemoryStore(clock))
    membership, metrics, roster = Membership(), Metrics(__version__), Roster()
    keeper = secrets.token_hex(8)
    holding, names = Holding(store, scraper.WORK, keeper, clock), count()
    reader = Scraper(membership, store, holding, all_adapters(), metrics, clock, random.Random())  # noqa: S311
    controller = Controller(
        store,
        Holding(store, rollouts.WORK, keeper, clock),
        RolloutMetrics(metrics.families),
        clock,
        random.Random(),  # noqa: S311 -- it only spreads load
    )
    sidecar = config.gateway.sidecar
    return Parts(
        membership=membership,
        holding=holding,
        scraper=reader,
        events=KvReader(
            states=reader.states,
            store=store,
            holding=Holding(store, kv_reader.WORK, keeper, clock),
            new_box=lambda: Outbox(f"{keeper}-kv-{next(names)}"),
            metrics=metrics.kv,
            clock=clock,
        ),
        rollouts=controller,
        operators=Operators(config, store, membership.current, controller.known),
        roster=roster,
        discovery=Discovery(roster),
        health=Health(),
        store=store,
        watch=StoreWatch(redis, store, membership.current, metrics.store, clock),
        metrics=metrics,
        workers={
            f"worker-{index}": inner.channel(addresses.local_worker(sidecar, index)) for index in range(sidecar.workers)
        },
        relay=relaying.Remote(config) if config.relay.enabled else None,
    )


async def _tell_envoy(parts: Parts) -> None:
    """Pass every change of membership on to Envoy."""
    version = -1
    while True:
        version = await parts.membership.changed(version)
        _tell_members(parts)


def _tell_members(parts: Parts) -> None:
    members = parts.membership.current()
    parts.roster.replace({pool: [Member(at) for at in sorted(ids.values())] for pool, ids in members.items()})


async def _serve_admin(parts: Parts, gateway: Gateway) -> web.AppRunner:
    """Open the admin page. Raises ConfigError when its address cannot be opened."""
    admin, longest = gateway.sidecar.admin, gateway.max_body_bytes
    app = web.Application(client_max_size=explain_pages.largest_question(longest))
    app.add_routes(
        [
            web.get("/metrics", lambda _: _metrics(parts)),
            web.get("/healthz", lambda _: _healthz()),
            web.get("/readyz", lambda _: _readyz(parts)),
            *explain_pages.routes(parts.workers, longest),
            *parts.operators.pages(),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, port = split_address(admin)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"cannot listen on {admin}: {error.strerror}; see gateway.sidecar.admin") from error
    return runner


async def _metrics(parts: Parts) -> web.Response:
    """All processes of this host on one page; a worker that does not answer is missing from it."""
    parts.watch.tell()
    asked = {name: inner.read_page(channel) for name, channel in parts.workers.items()}
    if parts.relay:
        asked[relaying.NAME] = parts.relay.page()
    read = await asyncio.gather(*(_page_of(name, page) for name, page in asked.items()))
    merged = pages.merge({"keeper": parts.metrics.page(), **dict(zip(asked, read, strict=True))})
    return web.Response(body=merged, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})


async def _page_of(name: str, page: Coroutine[None, None, bytes]) -> bytes:
    try:
        return await page
    except WorkerError as error:
        log.warning("a worker is missing from the metrics page", extra={"worker": name, "error": str(error)})
        return b""


async def _healthz() -> web.Response:
    return web.json_response({"status": "alive"})


async def _readyz(parts: Parts) -> web.Response:
    """Health by component. Ready while at least one worker answers: everything else degrades, and says so."""
    states = await asyncio.gather(*(inner.is_ready(channel) for channel in parts.workers.values()))
    components = {name: "ok" if up else "down" for name, up in zip(parts.workers, states, strict=True)}
    if parts.relay:
        # Without it requests go straight to engines.
        components[relaying.NAME] = "ok" if await parts.relay.is_ready() else "down"
    components["store"] = parts.watch.component()
    known = [state for pool in parts.scraper.states().values() for state in pool.values()]
    components["engines"] = "ok" if all(each.reachable and not each.stalled_s for each in known) else "degraded"
    ready = any(states)
    return web.json_response({"ready": ready, "components": components}, status=200 if ready else 503)
