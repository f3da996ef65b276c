"""A worker's part in limits of use: takes before a request runs, corrects when its answer tells what it used.

Estimates are taken before, so that requests at one moment cannot all pass; whichever worker hears the end of a request
gives back what it did not use, or takes what it used more. Implements `surroundings.Meter`.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from extproc.choose.fleet import Pool
from extproc.clock import Clock
from extproc.config import Config
from extproc.deciding import Asked
from extproc.envoy.contract import Call, Decision, Served
from extproc.envoy.rate_limit import Asked as Ahead
from extproc.envoy.rate_limit import Passed
from extproc.errors import DuplicateRequestError, RateLimitedError, StoreError
from extproc.fitting import own_name
from extproc.govern import quota_text, quotas
from extproc.govern.quota_rules import Rules
from extproc.govern.quotas import Correction, Draw, Take, Taken
from extproc.idempotency import Idempotency
from extproc.quota_limits import Bound, bounds_of, refusal, response_headers
from extproc.quota_usage import AHEAD, AHEAD_BY, CARRIED, correction, refused_undecided, returned, used
from extproc.request.model import RouteKind
from extproc.state.store import Store
from extproc.surroundings import Held, Surroundings
from extproc.telemetry.quota_metrics import QuotaMetrics

log = logging.getLogger(__name__)

_KNOWN: Final = 4096
"""Pairs of tenant and model whose limits are remembered."""
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_WITHOUT_OUTPUT: Final = frozenset({RouteKind.EMBEDDING, RouteKind.RERANK, RouteKind.SCORE})


class Quotas:
    """Limits and idempotency keys of one worker.

    Args:
        around: configuration, store, and what is known of pools.
        metrics: what is recorded.
        clock: tells how long a key that could not be given up is tried for.
    """

    def __init__(self, around: Surroundings, metrics: QuotaMetrics, clock: Clock) -> None:
        self._around = around
        self._metrics = metrics
        self._keys = Idempotency(around, clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._config: Config | None = None
        self._bounds = lru_cache(_KNOWN)(lambda tenant, model: bounds_of(self._current(), self._rules, tenant, model))
        self._rules = Rules(())

    @property
    def _store(self) -> Store:
        return self._around.store

    def _current(self) -> Config:
        config = self._around.config
        if config is not self._config:
            self._config, self._rules = config, Rules(config.rate_limits.rules)
            self._bounds.cache_clear()
        return config

    def concerns(self, call: Call) -> bool:
        """See `Meter.concerns`."""
        config = self._current()
        limited = bool(self._rules) and call.method not in _READING
        return limited or self._keys.concerns(config, call)

    async def begin(self, call: Call, asked: Asked, pool: Pool) -> Held:
        """See `Meter.begin`. The key comes first: a request that is not to run takes nothing."""
        config = self._current()
        try:
            claim = await self._keys.claimed(config, call, asked.request.tenant, pool.name)
        except DuplicateRequestError:
            self._metrics.duplicate()
            raise
        draws, bounds = [], []
        if self._rules and call.method not in _READING:
            tokens = self._estimate(asked, pool)
            model = asked.request.model or _model_of(config, pool)
            for bound in self._bounds(asked.request.tenant, model):
                # Requests that name no model yet were held against these limits before their body was read.
                if bound.draw.unit == "requests" and config.rate_limits.before_body and bound.model is None:
                    continue
                # Nothing is estimated of a path that is no API, but an engine may generate there: what its usage tells
                # is owed afterwards, and while it is, nothing more passes.
                amount = 1.0 if bound.draw.unit == "requests" else tokens
                draws.append(msgspec.structs.replace(bound.draw, amount=amount))
                bounds.append(bound)
        if not draws:
            return Held(claim=claim)
        taken = await self._store.take(Take(draws, pool.name, self._share(config)))
        self._note(draws, taken)
        if not taken.allowed:
            if claim is not None:
                self._keys.release(claim)
            raise self._refused(draws, bounds, taken)
        return Held(draws, taken, claim)

    async def ahead(self, asked: Sequence[Ahead]) -> Passed:
        """See `rate_limit.Limiter.ahead`: one step for all descriptors; a limit that several name is taken once."""
        config = self._current()
        found: dict[str, tuple[Draw, Bound]] = {}
        for one in asked:
            for bound in self._bounds(one.tenant, one.model and own_name(config, one.model)):
                if bound.draw.unit == "requests":
                    found[bound.draw.bucket] = msgspec.structs.replace(bound.draw, amount=one.hits), bound
        if not found:
            return Passed()
        draws = [draw for draw, _ in found.values()]
        taken = await self._store.take(Take(draws, "", self._share(config)))
        self._note(draws, taken)
        if not taken.allowed:
            raise self._refused(draws, [bound for _, bound in found.values()], taken)
        headers = response_headers(quota_text.headers(draws, taken))
        if not any(draw.amount for draw in draws):
            return Passed(headers)
        return Passed(headers, {AHEAD: quota_text.carried(draws, taken), AHEAD_BY: self._around.replica})

    def _note(self, draws: Sequence[Draw], taken: Taken) -> None:
        if taken.local:
            self._metrics.local()
        if taken.allowed:
            for unit, amount in {draw.unit: draw.amount for draw in draws}.items():
                self._metrics.taken(unit, amount)

    def _refused(self, draws: Sequence[Draw], bounds: Sequence[Bound], taken: Taken) -> RateLimitedError:
        error, bound = refusal(draws, bounds, taken)
        self._metrics.refused(bound.limit, bound.tenant, bound.model)
        return error

    async def undo(self, held: Held) -> None:
        """See `Meter.undo`."""
        if held.claim is not None:
            self._keys.release(held.claim)
        if held.taken is None:
            return
        self._metrics.given_back()
        back = [msgspec.structs.replace(draw, amount=-draw.amount) for draw in held.draws]
        share = self._share(self._current())
        own = [quotas.alone(draw, share) for draw in back]
        await self._correct(Correction(held.taken.at, () if held.taken.local else back, own))

    def marked(self, decision: Decision, held: Held) -> Decision:
        """See `Meter.marked`."""
        if held.claim is not None:
            self._keys.belongs(held.claim, decision.charge_id)
        if held.taken is None:
            return decision
        told = {CARRIED: quota_text.carried(held.draws, held.taken), **quota_text.headers(held.draws, held.taken)}
        return msgspec.structs.replace(decision, metadata={**decision.metadata, **told})

    def settled(self, decision: Decision) -> None:
        """See `Meter.settled`."""
        self._keys.settled(decision.charge_id)

    def answered(self, served: Served, counted: float) -> None:
        """A request is over, whoever took for it; returns at once. `counted` as in `quota_usage.used`."""
        text = served.metadata.get(CARRIED)
        if not isinstance(text, str):
            return
        try:
            carried = quota_text.read_carried(text)
        except ValueError:
            self._metrics.unknown("unreadable")
            return
        found = used(served, counted)
        if found.tokens < 0:
            self._metrics.unknown("usage")
            return
        own = served.charge_id.startswith(f"{self._around.replica}-")
        told = correction(carried, found, share=self._share(self._current()), own=own)
        if not found.served:
            self._metrics.given_back()
        elif taken := next((draw.amount for draw in carried.draws if draw.unit == "tokens"), 0.0):
            self._metrics.corrected(found.tokens - taken)
        if told.draws or told.own:
            self._keep(self._correct(told))

    def ended_ahead(self, served: Served) -> None:
        """A request is over for which requests may have been taken before its body was read; returns at once.

        They come back where those of a decision would; as it was not decided, where anything but an engine refused it.
        """
        text = served.metadata.get(AHEAD)
        if not isinstance(text, str) or (used(served, -1.0).served and not refused_undecided(served)):
            return
        try:
            carried = quota_text.read_carried(text)
        except ValueError:
            self._metrics.unknown("unreadable")
            return
        self._metrics.given_back()
        own = served.metadata.get(AHEAD_BY) == self._around.replica
        self._keep(self._correct(returned(carried, share=self._share(self._current()), own=own)))

    async def _correct(self, told: Correction) -> None:
        try:
            await self._store.correct(told)
        except StoreError:
            self._metrics.unknown("lost")

    def _estimate(self, asked: Asked, pool: Pool) -> float:
        """Tokens that a request is expected to use: its prompt's, and those of all its answers."""
        request, known = asked.request, self._around.knowledge[pool.name]
        if request.kind is RouteKind.OTHER:
            return 0.0
        prompt = max(1.0, math.ceil(asked.prompt_bytes / known.bytes_per_token_of(asked.blocks)))
        if request.kind in _WITHOUT_OUTPUT:
            return prompt
        return prompt + math.ceil(known.expected_output(asked.blocks, request.max_tokens)) * request.n

    def _share(self, config: Config) -> float:
        """One of all workers; those on other hosts than the gateway's are counted, too."""
        sidecar = config.gateway.sidecar
        return 1.0 / (sidecar.workers * (1 if sidecar.socket_dir else len(sidecar.hosts)))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Finish what is under way: keys that are given up, and corrections."""
        await asyncio.gather(*self._tasks)
        await self._keys.close()


def _model_of(config: Config, pool: Pool) -> str:
    """The model of a request that names none: the first one of its pool."""
    return next((name for name, model in config.models.items() if model.in_pool(pool.name)), "")
