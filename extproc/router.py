"""The one path of a decision: bytes in, a charged and pinned endpoint out. Implements `envoy.contract.Decider`.

Parsing, hashing, matching and pricing are pure and local; what is awaited on the way is the store's `reserve`, and
before it the prompt's token ids where an exact profile asks for them.
"""

import contextlib
from collections.abc import Set as AbstractSet

import msgspec

from extproc import continuing, deciding, keeping, noting, reading, versions
from extproc.avoiding import hinted
from extproc.choose import chooser
from extproc.choose.fleet import Pool
from extproc.clock import Clock
from extproc.current import Current, current_of
from extproc.deciding import Asked, Facts
from extproc.elsewhere import for_model, is_undone, sequences_of, with_fact
from extproc.envoy.contract import FALLBACK, QUEUED, Call, Decision
from extproc.errors import NoEndpointError, OverloadedError, StoreError
from extproc.fitting import Fits
from extproc.request.model import RouteKind
from extproc.rerouting import Rerouting, route_of
from extproc.reserving import reserved
from extproc.state.feed import Answered
from extproc.state.values import Settle
from extproc.surroundings import Admitted, Publisher, Recorder, Surroundings, Tokens

__all__ = ["Publisher", "Recorder", "Router", "Surroundings", "Tokens"]


class Router:
    """Decides for one worker."""

    def __init__(self, around: Surroundings, publisher: Publisher, recorder: Recorder, clock: Clock) -> None:
        self._around = around
        self._publisher = publisher
        self._recorder = recorder
        self._clock = clock
        self._turn = 0
        self._made: Current | None = None
        self._rerouting = Rerouting(around.store, around.replica)
        for known in around.knowledge.values():
            known.hear(self._rerouting.heard)

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`.

        Raises:
            UnknownModelError: the body names a model that no pool serves.
            UnknownVersionError: a tester asks for a version that the model does not have.
            NoEndpointError: the pool, or the gateway's subset of it, has no endpoint that may serve.
            UnfitRequestError: no engine of the pool can keep what the request asks for.
            OverloadedError: the pool is saturated, and the request is not to wait, or not any longer.
            QueueTimeoutError: the same, after it waited.
            ShuttingDownError: this worker stops, and the request would have to wait.
            RateLimitedError: a limit of use does not allow it.
            DuplicateRequestError: a request with its idempotency key still runs.
        """
        began = self._clock.monotonic()
        asked, pool = self.read(call)
        if asked.choice is not None and asked.choice.earlier:
            asked, pool = await self.settled(call, asked, pool)
        meter = self._around.meter
        if meter is None or not meter.concerns(call):
            return await self._admitted(call, asked, pool, began)
        held = await meter.begin(call, asked, pool)
        try:
            decision = await self._admitted(call, asked, pool, began)
        except BaseException:
            await meter.undo(held)
            raise
        return meter.marked(decision, held)

    async def _admitted(self, call: Call, asked: Asked, pool: Pool, began: float) -> Decision:
        """Decide once the pool has room."""
        gate, fits = self._around.gate, self._fits(asked, pool, call)
        if gate is None or not gate.watches(pool.name):
            return await self._decided(call, asked, pool, fits, began)
        admitted = await gate.admit(asked, pool, fits.subset(hinted(call, pool)), call)
        if admitted.model:
            return await self._elsewhere(call, admitted)
        try:
            left = await self._left(call, asked, pool) if admitted.waited_s else None
            if left is None:
                if admitted.waited_s:
                    # The fleet is another one by now.
                    pool = self._around.fleet.pools[pool.name]
                    fits = self._fits(asked, pool, call)
                decision = await self._decided(call, asked, pool, fits, began + admitted.waited_s)
        finally:
            gate.arrived(admitted)
        if left is not None:
            decision = await self._admitted(call, *left, began + admitted.waited_s)
        if admitted.waited_s:
            decision = with_fact(decision, QUEUED, admitted.waited_s * 1000.0)
        return decision

    async def _left(self, call: Call, asked: Asked, pool: Pool) -> tuple[Asked, Pool] | None:
        """Where a request goes that waited for a version which is no longer its own; None while it is."""
        if asked.choice is None:
            return None
        anew = await self.settled(call, *self.read(call))
        return None if anew[1].name == pool.name else anew

    def _fits(self, asked: Asked, pool: Pool, call: Call) -> Fits:
        body = call.body if asked.body is None else asked.body
        return self._current().fitting.fits(asked.request, pool, body, asked.named)

    async def _decided(self, call: Call, asked: Asked, pool: Pool, fits: Fits, began: float) -> Decision:
        asked = await self.with_tokens(asked, pool, call)
        request_id = call.headers.get("x-request-id", "")
        decision = await self.choose(asked, pool, fits.subset(hinted(call, pool)), began, request_id)
        decision, changes = fits.applied(decision)
        for change in changes:
            self._around.changes[pool.name, change] += 1
        return decision

    async def _elsewhere(self, call: Call, admitted: Admitted) -> Decision:
        """Let another model answer. Raises as `decide`, and OverloadedError where the body names no model."""
        renamed = for_model(call, admitted.model)
        if renamed is None:
            raise OverloadedError("every endpoint of this model is saturated")
        try:
            asked, pool = await self.settled(renamed, *self.read(renamed))
            decision = await self._admitted(renamed, asked, pool, self._clock.monotonic())
        except NoEndpointError as error:
            raise OverloadedError(
                "every endpoint of this model is saturated, and none of its fallback serves"
            ) from error
        body = renamed.body if decision.body is None else decision.body
        return with_fact(msgspec.structs.replace(decision, body=body), FALLBACK, admitted.model)

    @property
    def turn(self) -> int:
        """Number of this worker's last decision; policies that rotate go by it."""
        return self._turn

    def read(self, call: Call) -> tuple[Asked, Pool]:
        """Read a call as far as its pool's policy needs it; see `reading.read`.

        Where `Choice.earlier` is not empty, `settled` is to be asked next.

        Raises:
            UnknownModelError: the body names a model that no pool serves.
            UnknownVersionError: a tester asks for a version that the model does not have.
        """
        current = self._current()
        return reading.read(call, current.around, current.volatile, self._around.new_response_id, whole=current.whole)

    async def settled(self, call: Call, asked: Asked, pool: Pool) -> tuple[Asked, Pool]:
        """What was read of a call, for the version that its conversation runs on; see `versions.settled`."""
        if asked.choice is None or not asked.choice.earlier:
            return asked, pool
        current, new_id = self._current(), self._around.new_response_id
        request = reading.unminted(asked)
        now, store = self._clock.monotonic(), self._around.store
        fresh = self._around.fresh(asked.choice.model)
        choice = await versions.settled(asked.choice, request, current.around, store, now, fresh=fresh)
        # The fleet may be another one by now; the pools of a configuration stay.
        current = self._current()
        return reading.on_version(asked, call, choice, current.around, current.volatile, new_id)

    async def with_tokens(self, asked: Asked, pool: Pool, call: Call) -> Asked:
        """The request with its token ids, if they can be had, and an endpoint of the pool has a profile to match."""
        around = self._around
        settings, exact = around.config.pools.get(pool.name), around.knowledge[pool.name].caches.exact
        request, began = asked.request, self._clock.monotonic()
        has_prompt = asked.read and not request.flaw and request.kind is not RouteKind.OTHER
        if request.previous_response or not has_prompt:
            return asked
        if began > around.believed_until:  # this worker stood still: blocks that it was told of may be gone
            return asked
        sizes = exact.index.block_sizes if settings is not None and settings.profiles != "estimated" else ()
        # Profiles that are behind are not matched with: nobody waits for ids for their sake.
        wanted = len(sizes) > 0 and any(exact.counts(each.id) for each in pool.endpoints)
        if around.tokens is None or not wanted:
            return asked
        tokens = await around.tokens.of(pool.name, call.path, call.body, request)
        return deciding.with_tokens(asked, tokens, exact.index.block_sizes, self._clock.monotonic() - began)

    async def choose(
        self, asked: Asked, pool: Pool, subset: AbstractSet[str] | None, began: float, request_id: str = ""
    ) -> Decision:
        """Pick, charge and pin for a request whose prompt is hashed already.

        Args:
            asked: the request and its blocks.
            pool: pool that serves it.
            subset: `ip:port` of the endpoints that may be picked; None for all.
            began: when work on the request began, by the router's clock.
            request_id: `x-request-id` of the request; empty without one.

        Raises:
            NoEndpointError: the pool, or the subset of it, has no endpoint that may serve.
        """
        around = self._around
        known = around.knowledge[pool.name]
        self._turn += 1
        moment = deciding.moment_of(around.config, pool.name, self._turn, self._clock.monotonic())
        ask = deciding.ask_of(asked, known, moment)
        plan = chooser.plan(ask, pool, self._current().weights, subset)
        if not plan.candidates:
            raise NoEndpointError(f"no endpoint of pool `{pool.name}` can serve this request now")
        charge_id = around.new_charge_id()
        pins = continuing.pins_of(around.config, pool, asked.request)
        versioned = asked.choice is not None
        owner = (around.replica, charge_id)
        reserve = deciding.reserve_of(around.config, pool, plan, ask, pins, owner, versioned=versioned)
        reserving = self._clock.monotonic()
        reservation, picked = await reserved(around.store, reserve, ask, pool, plan, self._current().weights)
        ended = self._clock.monotonic()
        if versioned and asked.body is not None:
            await self._pin_conversation(asked, pool, picked.endpoint.id)
        if around.gate is not None:
            around.gate.charged(pool.name, ask.n)
        if around.picks is not None:
            around.picks.picked(pool.name, picked.endpoint)
        if ask.shared_block:
            known.heat.used(ask.shared_block, ended)
        deltas = known.decided(
            charge_id,
            picked.endpoint.id,
            asked.blocks,
            matched_tokens=ask.estimated(picked.endpoint),
            turn=continuing.turn_of(asked.request),
            follows=continuing.follows_of(asked.request),
            shared_block=ask.shared_block,
        )
        if asked.chains:
            deltas = known.sent(deltas, asked.chains, ask.held_tokens.get(picked.endpoint.id))
        for delta in deltas:
            self._publisher.publish(pool.name, delta)
        if asked.choice is not None and (kept := keeping.used(asked.choice, known, around.config, ended)) is not None:
            self._publisher.publish(pool.name, kept)
        predicted = deciding.predicted_ttft_ms(
            picked.endpoint, picked.uncached, reservation.backlog_tokens, around.config.routing.rate_factor
        )
        made = noting.Made(asked, ask, pool, plan, reserve, picked, reservation)
        spans = noting.Spans(began=began, reserving=reserving, ended=ended)
        self._recorder.decided(noting.outcome_of(made, spans, predicted))
        around.recent.remember(
            noting.remembered(made, around.config, at=self._clock.wall(), request_id=request_id, subset=subset)
        )
        order = deciding.order_of(plan, picked)
        self._rerouting.decided(charge_id, route_of(reserve, order, ask.prompt_tokens))
        decision = deciding.decision_of(asked, ask, pool, order, reservation, Facts(charge_id, predicted))
        return msgspec.structs.replace(decision, at=ended)

    async def _pin_conversation(self, asked: Asked, pool: Pool, endpoint: str) -> None:
        """Have the next turn find which version its conversation runs on, where the reservation pins a response."""
        around, session = self._around, self._around.config.routing.session
        request = reading.unminted(asked)
        key = "" if request.previous_response else versions.conversation_key(around.config, pool, request)
        if key:
            with contextlib.suppress(StoreError):
                await around.store.pin(pool.name, key, endpoint, int(session.ttl_s * 1000), session.max)

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""
        if decision.charge_id:
            await self._learn_served(decision, served)

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""
        if not decision.charge_id:
            return
        self._recorder.settled(decision.pool)
        if served:
            await self._learn_served(decision, served)
        # The resilient store queues what it cannot deliver; a bare store's charge ends with its lease.
        with contextlib.suppress(StoreError):
            refund = self._undone(decision)
            await self._around.store.settle(Settle(decision.pool, decision.charge_id, self._around.replica, refund))
        if self._around.meter is not None:
            self._around.meter.settled(decision)
        if self._around.gate is not None:
            self._around.gate.settled(decision.pool, sequences_of(decision))

    def _undone(self, decision: Decision) -> bool:
        pool = self._around.fleet.pools.get(decision.pool)
        picked = decision.metadata.get("endpoint")
        rate = next((each.rate for each in pool.endpoints if each.id == picked), 0.0) if pool else 0.0
        return rate > 0.0 and is_undone(decision, rate, self._clock.monotonic())

    async def _learn_served(self, decision: Decision, served: str) -> None:
        """A foreign gateway told who answers. If that was not picked, charge, pin and profile go there."""
        pool = self._around.fleet.pools.get(decision.pool)
        endpoint = pool.id_at(served) if pool else ""
        await self._rerouting.served(decision.charge_id, endpoint)
        answered = Answered(decision.charge_id, endpoint, -1.0, -1.0, -1.0, -1.0)
        if decision.pool in self._around.knowledge:
            for delta in self._around.knowledge[decision.pool].apply(answered):
                self._publisher.publish(decision.pool, delta)

    def _current(self) -> Current:
        around = self._around
        self._made = made = current_of(around.config, around.fleet, around.knowledge, self._made)
        return made
