"""Sends a share of the requests of a model to a further version as well, without any effect on the client.

Implements `envoy.contract.Decider` around another one. A decision that is drawn gets one header more: for a mirrored
request the cluster that Envoy sends it to, for a compared one the wish for a copy of the answer. All else goes on in
the background: nothing of it is awaited by the request, charged to anybody, or held against an endpoint.
"""

import asyncio
import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from extproc.choose import filters
from extproc.choose.fleet import Endpoint, Pool
from extproc.clock import Clock
from extproc.config import Config, Shadow
from extproc.config_relay import AVOID
from extproc.engines.fit import fit
from extproc.envoy.contract import (
    CAPTURE_HEADER,
    FALLBACK,
    MODEL,
    SHADOW_HEADER,
    VERSION,
    Call,
    Decider,
    Decision,
    shadow_cluster,
)
from extproc.envoy.copies import Copies
from extproc.errors import UnfitRequestError
from extproc.fitting import Fitting, kinds_of
from extproc.govern.saturation import UNKNOWN, Room
from extproc.request.model import RouteKind
from extproc.shadow import bodies, sampling
from extproc.shadow.answer import COMPARABLE
from extproc.shadow.sampling import State, Use
from extproc.shadow.sender import Letter, passed
from extproc.shadow_jobs import Job, Jobs
from extproc.surroundings import Surroundings
from extproc.telemetry.shadow_metrics import ShadowMetrics, ShadowOutcome

_REMEMBERED: Final = 8192
"""Ids of requests that were drawn lately: one that a relay tries again is not drawn twice."""
_LOOK_S: Final = 0.1

log = logging.getLogger(__name__)

Waiting = Callable[[str], tuple[Room, int]]
"""Room of a pool, as far as it is known, and how many requests wait for it at this worker."""


def nobody_waits(_pool: str) -> tuple[Room, int]:
    """Where there is no gate."""
    return UNKNOWN, 0


class Shadowing:
    """Decides as another one does, and has a share of the requests sent to shadows."""

    def __init__(
        self,
        decider: Decider,
        around: Surroundings,
        jobs: Jobs,
        copies: Copies,
        metrics: ShadowMetrics,
        clock: Clock,
        waiting: Waiting = nobody_waits,
    ) -> None:
        """Begin.

        Args:
            decider: the other one.
            around: configuration and fleet.
            jobs: carries comparisons out.
            copies: takes copies of answers.
            metrics: counts.
            clock: time.
            waiting: see `Waiting`.
        """
        self._decider = decider
        self._around = around
        self._jobs = jobs
        self._copies = copies
        self._metrics = metrics
        self._clock = clock
        self._waiting = waiting
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._late_s = 0.0
        self._fitting: tuple[Config, Fitting] | None = None

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        decision = await self._decider.decide(call)
        if VERSION not in decision.metadata:
            return decision
        try:
            return self._with_shadow(call, decision)
        except Exception as error:  # noqa: BLE001  # no fault of a shadow may cost a client its answer
            # The error's own text stays out of the log: it may quote the request.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("a request has no shadow: %s at\n%s", type(error).__name__, where)
            return decision

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""
        await self._decider.served(decision, served)

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""
        if decision.capture is not None:
            self._copies.ended(decision.charge_id)
        await self._decider.settle(decision, served)

    async def run(self) -> None:
        """Watch how late the event loop is; lasts until cancelled."""
        while True:
            began = self._clock.monotonic()
            await asyncio.sleep(_LOOK_S)
            # A loop that was late a moment ago is likely to be so again.
            late_s = max(0.0, self._clock.monotonic() - began - _LOOK_S)
            self._late_s = max(late_s, self._late_s / 2)

    async def close(self) -> None:
        """Give up whatever is under way."""
        await self._jobs.close()

    def _with_shadow(self, call: Call, decision: Decision) -> Decision:
        model = str(decision.metadata[MODEL])
        settings = self._around.config.models.get(model)
        shadow = settings.shadow if settings is not None else None
        if settings is None or shadow is None or shadow.version == decision.metadata[VERSION]:
            return decision
        pool = self._around.fleet.pools.get(settings.versions[shadow.version].pool)
        if pool is None or not self._is_drawn(call, decision, model, shadow):
            return decision
        held = sampling.held_back(self._state(decision.pool, pool, model), shadow.max_concurrent, shadow.max_load)
        if held is not None:
            return self._without(decision, model, shadow, held)
        if shadow.mode == "mirror":
            self._metrics.ended(model, shadow.mode, "mirrored")
            headers = {**decision.headers, SHADOW_HEADER: shadow_cluster(pool.name)}
            return msgspec.structs.replace(decision, headers=headers)
        return self._compared(call, decision, model, shadow, pool)

    def _is_drawn(self, call: Call, decision: Decision, model: str, shadow: Shadow) -> bool:
        kind = decision.metadata.get("kind")
        if kind == RouteKind.OTHER or (shadow.mode == "compare" and kind not in COMPARABLE):
            return False
        request_id = call.headers.get("x-request-id", "")
        # A relay goes on with half an answer: neither half can be compared with a whole one.
        if call.headers.get(AVOID) or FALLBACK in decision.metadata or not decision.charge_id:
            return False
        if not sampling.drawn(model, request_id, shadow.share):
            return False
        if (model, request_id) in self._seen:
            return False
        self._seen[model, request_id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return True

    def _state(self, primary: str, shadow: Pool, model: str) -> State:
        return State(
            under_way=self._jobs.under_way(model),
            late_s=self._late_s,
            primary=self._use(self._around.fleet.pools[primary]),
            shadow=self._use(shadow),
            serves=bool(_able(shadow)),
        )

    def _use(self, pool: Pool) -> Use:
        room, queued = self._waiting(pool.name)
        pages = [(each.kv_usage, each.waiting) for each in filters.usable(pool.endpoints)]
        return Use(sampling.share_of(room.limit, room.sequences, pages), queued)

    def _without(self, decision: Decision, model: str, shadow: Shadow, why: ShadowOutcome) -> Decision:
        self._metrics.ended(model, shadow.mode, why)
        return decision

    def _compared(self, call: Call, decision: Decision, model: str, shadow: Shadow, pool: Pool) -> Decision:
        kind = RouteKind(str(decision.metadata["kind"]))
        body = bodies.shadow_body(call.body, kind)
        letter = self._letter(call, body, kind, model, shadow, pool) if body is not None else None
        if letter is None:
            return self._without(decision, model, shadow, "unfit")
        job = Job(model, shadow, letter, kind, call, decision, self._clock.wall())
        self._jobs.begin(job)
        self._copies.expect(decision.charge_id, job)
        headers = {**decision.headers, CAPTURE_HEADER: "1"}
        return msgspec.structs.replace(decision, headers=headers, capture=job)

    def _letter(
        self, call: Call, body: bytes, kind: RouteKind, model: str, shadow: Shadow, pool: Pool
    ) -> Letter | None:
        """The request for the endpoint that has least to do; None when its engine cannot keep what is asked for."""
        config, busy = self._around.config, self._jobs.at
        endpoint = min(
            _able(pool), key=lambda each: (each.waiting, each.running + busy[each.destination], each.kv_usage)
        )
        kinds = kinds_of(config, pool)
        engine = kinds.each.get(endpoint.destination) or kinds.engines[0]
        try:
            name = bodies.model_of(body) or model
            fitted = fit(body, kind, self._fit_for(config).wanted(name, pool.name, engine))
        except UnfitRequestError:
            return None
        sent = body if fitted is None else fitted.body
        return Letter(endpoint.destination, call.path, passed(call.headers), sent, shadow.timeout_s)

    def _fit_for(self, config: Config) -> Fitting:
        if self._fitting is None or self._fitting[0] is not config:
            self._fitting = config, Fitting(config)
        return self._fitting[1]


def _able(pool: Pool) -> list[Endpoint]:
    """Endpoints that serve for sure: a shadow is no reason to try one that may not."""
    return [each for each in pool.endpoints if not filters.hard_reason(each, None) and not filters.soft_reason(each)]
