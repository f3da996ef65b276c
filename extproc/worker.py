"""One ext_proc process: composes a router with its store, knowledge and services, and runs until told to stop."""

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from extproc import __version__, addresses, inner, reload
from extproc.choose.fleet import Endpoint, Fleet
from extproc.clock import SystemClock
from extproc.config import Config, Pool
from extproc.ending import Ending, workers
from extproc.envoy import server as grpc_server
from extproc.envoy.access_log import AccessLog
from extproc.envoy.authorize import Authorizer
from extproc.envoy.contract import HEALTH_CHECK_S, NOT_READY_AFTER
from extproc.envoy.copies import MESSAGE, Copies
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.rate_limit import RateLimits
from extproc.errors import StoreError
from extproc.explainer import Explainer
from extproc.fleet.membership import Membership
from extproc.fleet.pulse import Pulse
from extproc.gossip import Gossip
from extproc.handing_on import HandingOn
from extproc.judging import Judging
from extproc.keeping import Keeping
from extproc.key_file import KeyFile
from extproc.learner import Learner
from extproc.limiting import Limiting
from extproc.model_list import ModelList
from extproc.overload import Overload
from extproc.processes import until_stopped
from extproc.quotas import Quotas
from extproc.rollout_following import Following
from extproc.router import Router, Surroundings
from extproc.shadow.results import Results
from extproc.shadow.scoring import Scorer
from extproc.shadow.sender import Sender
from extproc.shadow_jobs import Jobs
from extproc.shadowing import Shadowing
from extproc.showing import Showing
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from extproc.telemetry import logs
from extproc.telemetry.auth_metrics import AuthMetrics
from extproc.telemetry.breaker_metrics import BreakerMetrics
from extproc.telemetry.limit_metrics import LimitMetrics
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.overload_metrics import OverloadMetrics
from extproc.telemetry.quota_metrics import QuotaMetrics
from extproc.telemetry.rollout_metrics import VersionMetrics
from extproc.telemetry.shadow_metrics import ShadowMetrics
from extproc.tokens.tokenizing import Engines, Tokenizing
from extproc.upkeep import Upkeep
from extproc.watching import Watching

_BYTES_PER_TOKEN = 4
"""Nominal prompt bytes a token: turns `routing.block_tokens` into bytes once and for all."""
_CATCH_UP_S = 10.0
"""How long a worker waits for what the others know before it serves without: a probe would give up on it."""
_FIRST_LOOK_S = 3.0
"""How long it waits for the rollouts of models with versions: a store that is there has told them by then."""
_NOTICE_S = HEALTH_CHECK_S * (NOT_READY_AFTER + 1)
"""Envoy's checks begin at any time, and the last of them may wait for its answer."""
_LAST_S = 1.0
"""Before the end of a drain, requests in the queue of a worker are refused: nobody has room for them any more."""

log = logging.getLogger(__name__)


class Parts(msgspec.Struct, frozen=True):
    """Everything one worker is made of."""

    around: Surroundings
    store: ResilientStore
    gossip: Gossip
    upkeep: Upkeep
    showing: Showing
    explainer: Explainer
    processor: Processor
    access_log: AccessLog
    health: Health
    tokenizing: Tokenizing
    overload: Overload
    pulse: Pulse
    keys: KeyFile
    authorizer: Authorizer
    ending: Ending
    quotas: Quotas
    following: Following
    shadowing: Shadowing
    handing_on: HandingOn
    keeping: Keeping


async def run(config: Config, path: Path, settings: Sequence[str], index: int) -> int:
    """Serve as worker `index` until SIGINT or SIGTERM; returns the exit code.

    Raises:
        ConfigError: no usable store is configured, or the worker's address cannot be opened.
    """
    logs.setup(config.telemetry.log_level, f"worker-{index}")
    parts = compose(config, index)

    async def apply(changed: Config) -> None:
        logs.setup(changed.telemetry.log_level, f"worker-{index}")
        await parts.upkeep.apply(changed)
        await parts.tokenizing.apply(changed)

    with contextlib.suppress(StoreError):
        await parts.store.ping()
    await apply(config)
    await parts.keys.look()
    address = addresses.worker(config.gateway.sidecar, index)
    services = (parts.processor, parts.access_log, parts.health, parts.authorizer, RateLimits(parts.quotas))
    handlers = [part.handler() for part in services]
    server = grpc_server.make_server(
        [*handlers, inner.handler(parts.showing.page, parts.explainer, parts.ending.asked, parts.handing_on.taken)],
        max_body_bytes=max(config.gateway.max_body_bytes, MESSAGE),
    )
    grpc_server.bind(server, address)
    await server.start()
    watcher = reload.Watcher(path, settings, config, apply)
    ready = asyncio.create_task(_be_ready(parts, address))
    forever = (parts.upkeep, parts.gossip, parts.keys, parts.overload, parts.following, parts.keeping)
    running = [asyncio.create_task(each.run()) for each in (*forever, parts.shadowing, watcher)]
    background = [ready, *running]
    code = await until_stopped(background)
    ready.cancel()
    drain_s = config.gateway.sidecar.drain_s
    # Whoever still waits is answered before the streams are cancelled.
    background.append(asyncio.create_task(parts.overload.close_after(_NOTICE_S + max(0.0, drain_s - _LAST_S))))
    await grpc_server.stop(
        server,
        parts.health,
        busy=[parts.processor],
        long_lived=[parts.access_log],
        drain_s=drain_s,
        notice_s=_NOTICE_S,
        linger_s=config.telemetry.access_log_flush_ms / 1000,
    )
    await _close(parts, background)
    return code


def compose(config: Config, index: int = 0) -> Parts:
    """Build the parts of worker `index`; nothing is connected or opened yet.

    Raises:
        ConfigError: no usable store is configured.
    """
    clock = SystemClock()
    replica = secrets.token_hex(8)
    url = addresses.store(config.redis)
    redis = RedisStore(url, config.redis.timeout_ms, config.redis.key_prefix)
    store = ResilientStore(redis, MemoryStore(clock))
    knowledge = {name: PoolKnowledge(_priors(config, pool)) for name, pool in config.pools.items()}
    gossip = Gossip(store, knowledge, replica, config.redis.feed_cap)
    around = Surroundings(config, Fleet({}, {}, ""), knowledge, store, replica, _charge_ids(replica))
    metrics = Metrics(__version__)
    around.tokens = tokenizing = Tokenizing(_engines(around), metrics.tokens, clock, replica)
    showing = Showing(metrics, around, store)
    pulse = Pulse(replica)
    around.picks = judging = Judging(around, BreakerMetrics(metrics.families), clock, pulse.dead)
    around.meter = quotas = Quotas(around, QuotaMetrics(metrics.families), clock)
    around.gate = overload = Overload(around, OverloadMetrics(metrics.families), clock)
    router = Router(around, gossip, showing, clock)
    gateway = config.gateway
    limits = Limits(
        body_mode=gateway.body_mode,
        fail_open=gateway.fail_open,
        routes=tuple(gateway.routes),
        max_body_bytes=gateway.max_body_bytes,
    )
    copies = Copies(clock)
    shadowing = _shadowing(router, around, overload, copies, ShadowMetrics(metrics.families), index)
    decider = Limiting(shadowing, config.timeouts) if config.timeouts.differ else shadowing
    processor = Processor(ModelList(decider, lambda: around.config), limits, copies)
    limit_metrics = LimitMetrics(metrics.families)
    ending = Ending(processor.endable, replica, lambda: workers(gateway.sidecar), limit_metrics, clock)
    auth = AuthMetrics(metrics.families)
    keys = KeyFile(Path(gateway.auth.keys) if gateway.auth.keys else None, auth.known)
    showing.watch(processor.counts)
    showing.watch_feed(gossip.counts)
    following = Following(around, VersionMetrics(metrics.families), clock)
    learner = Learner(around, gossip, metrics, judging, quotas, following)
    access_log = AccessLog(learner, Watching(clock, ending.end, limit_metrics))
    showing.watch_log(access_log.counts)
    return Parts(
        around=around,
        store=store,
        gossip=gossip,
        upkeep=Upkeep(around, Membership(), clock, judging),
        showing=showing,
        explainer=Explainer(around, router, clock),
        processor=processor,
        access_log=access_log,
        health=Health(),
        tokenizing=tokenizing,
        overload=overload,
        pulse=pulse,
        keys=keys,
        authorizer=Authorizer(keys.clients, auth),
        ending=ending,
        quotas=quotas,
        following=following,
        shadowing=shadowing,
        handing_on=HandingOn(copies, replica, lambda: workers(gateway.sidecar), clock),
        keeping=Keeping(around, gossip, clock),
    )


def _shadowing(
    router: Router, around: Surroundings, overload: Overload, copies: Copies, metrics: ShadowMetrics, index: int
) -> Shadowing:
    """Shadows around a router. Results of this worker go on in the same file when it starts again."""
    clock, scorer = SystemClock(), Scorer()
    results = Results(around.store, f"{socket.gethostname()}-{index}", scorer.executor)
    jobs = Jobs(around, Sender(clock.monotonic), scorer, results, metrics, clock)
    return Shadowing(router, around, jobs, copies, metrics, clock, overload.use)


def _engines(around: Surroundings) -> Engines:
    """What token ids need to know of the engines of each pool, as the latest snapshot of the fleet has it."""

    def members(pool: str) -> tuple[Endpoint, ...]:
        found = around.fleet.pools.get(pool)
        return found.endpoints if found else ()

    return Engines(
        endpoints=lambda pool: [each.destination for each in members(pool) if each.reachable and not each.asleep],
        adapters=lambda pool: {name for each in members(pool) for name in each.adapters},
        kinds=lambda pool: {each.kind for each in members(pool) if each.kind},
    )


async def _be_ready(parts: Parts, address: str) -> None:
    """Say that the worker is ready once it knows what the others do, or cannot for now; lasts until cancelled.

    One that knew nothing would send every conversation to another engine than the one that has it, and go by the file's
    weights while a rollout has others.
    """
    knows = await asyncio.gather(parts.gossip.caught_up(_CATCH_UP_S), parts.following.caught_up(_FIRST_LOOK_S))
    caught_up = all(knows)
    parts.health.set_ready(True)
    told = {"address": address, "replica": parts.around.replica, "caught_up": caught_up}
    log.info("worker is ready", extra=told)
    await asyncio.Event().wait()


async def _close(parts: Parts, background: Sequence[asyncio.Task[None]]) -> None:
    """Tell the others what was learnt, give up the lease, and let go of the store."""
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    await parts.tokenizing.close()
    await parts.pulse.close()
    await parts.ending.close()
    await parts.quotas.close()
    await parts.overload.close_after(0.0)
    await parts.following.close()
    await parts.shadowing.close()
    await parts.handing_on.close()
    await parts.gossip.leave()
    for pool in parts.around.config.pools:
        await parts.store.release(pool, parts.around.replica)
    await parts.store.close()


def _priors(config: Config, pool: Pool) -> Priors:
    return Priors(
        prefill_tokens_per_s=pool.prefill_tokens_per_s,
        bytes_per_token=pool.bytes_per_token,
        kv_tokens=pool.kv_tokens,
        block_bytes=config.routing.block_tokens * _BYTES_PER_TOKEN,
    )


def _charge_ids(replica: str) -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"{replica}-{next(numbers):x}"
