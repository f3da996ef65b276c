"""The one path of a decision: bytes in, a charged and pinned endpoint out. Implements `envoy.contract.Decider`.

Parsing, hashing, matching and pricing are pure and local; what is awaited on the way is the store's `reserve`, and
before it the prompt's token ids where an exact profile asks for them.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

import msgspec

from extproc import continuing, deciding, reading
from extproc.choose import chooser
from extproc.choose.chooser import Plan, Priced
from extproc.choose.fleet import Fleet, Pool
from extproc.choose.policies import POLICIES, Ask, Weights
from extproc.clock import Clock
from extproc.config import Config
from extproc.deciding import Asked, Facts, Outcome
from extproc.envoy.contract import Call, Decision
from extproc.errors import NoEndpointError, StoreError
from extproc.fitting import Fitting
from extproc.recent import Recent, Remembered
from extproc.request.model import Request
from extproc.request.volatile import Rules, rules_of
from extproc.rerouting import Rerouting, route_of
from extproc.state.exact_blocks import TokenPrompt
from extproc.state.feed import Answered, Delta
from extproc.state.knowledge import PoolKnowledge
from extproc.state.pick import MAX_CANDIDATES
from extproc.state.store import Store
from extproc.state.values import Reservation, Reserve, Settle


class Recorder(Protocol):
    """Who counts decisions."""

    def decided(self, outcome: Outcome) -> None:
        """Take in one decision."""
        ...

    def settled(self, pool: str) -> None:
        """A decided request is over."""
        ...


class Publisher(Protocol):
    """Who tells other replicas."""

    def publish(self, pool: str, delta: Delta) -> None:
        """Queue a delta for the pool's feed; returns at once."""
        ...


class Tokens(Protocol):
    """Who tells the token ids of prompts."""

    async def of(self, pool: str, path: str, body: bytes, request: Request) -> TokenPrompt | None:
        """The prompt of a request as the pool's engines see it; None when it cannot be told in time. Never raises."""
        ...


class Surroundings(msgspec.Struct):
    """What a router works with; the worker replaces `config` and `fleet` as they change.

    Attributes:
        config: current configuration.
        fleet: current snapshot.
        knowledge: by pool, what this worker knows.
        store: shared ledger and pins.
        replica: this worker's id.
        new_charge_id: gives a unique id at each call.
        new_response_id: gives an id at each call that nobody can guess: who knows it may read the response.
        recent: the last decisions, for `warmpath explain`.
        changes: by pool and reason, how many bodies were changed for their engine.
        tokens: tells token ids; None where nobody does.
    """

    config: Config
    fleet: Fleet
    knowledge: Mapping[str, PoolKnowledge]
    store: Store
    replica: str
    new_charge_id: Callable[[], str]
    new_response_id: Callable[[], str] = lambda: f"resp_{secrets.token_hex(16)}"
    recent: Recent = msgspec.field(default_factory=Recent)
    changes: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    tokens: Tokens | None = None


class _Current(msgspec.Struct, frozen=True):
    """What follows from a configuration and a fleet: made once for each.

    Attributes:
        config: the configuration.
        fleet: the fleet.
        weights: its weights.
        volatile: what hashing passes over.
        whole: every pool's policy looks at prompts, so bodies are read whole at once.
        fitting: what engines get in place of bodies.
    """

    config: Config
    fleet: Fleet
    weights: Weights
    volatile: Rules
    whole: bool
    fitting: Fitting


class Router:
    """Decides for one worker."""

    def __init__(self, around: Surroundings, publisher: Publisher, recorder: Recorder, clock: Clock) -> None:
        self._around = around
        self._publisher = publisher
        self._recorder = recorder
        self._clock = clock
        self._turn = 0
        self._made: _Current | None = None
        self._rerouting = Rerouting(around.store, around.replica)
        for known in around.knowledge.values():
            known.hear(self._rerouting.heard)

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`.

        Raises:
            UnknownModelError: the body names a model that no pool serves.
            NoEndpointError: the pool, or the gateway's subset of it, has no endpoint that may serve.
            UnfitRequestError: no engine of the pool can keep what the request asks for.
        """
        began = self._clock.monotonic()
        asked, pool = self.read(call)
        fits = self._current().fitting.fits(asked.request, pool, call.body if asked.body is None else asked.body)
        subset = fits.subset(None if call.subset is None else frozenset(call.subset))
        asked = await self.with_tokens(asked, pool, call)
        decision = await self.choose(asked, pool, subset, began, call.headers.get("x-request-id", ""))
        decision, changes = fits.applied(decision)
        for change in changes:
            self._around.changes[pool.name, change] += 1
        return decision

    @property
    def turn(self) -> int:
        """Number of this worker's last decision; policies that rotate go by it."""
        return self._turn

    def read(self, call: Call) -> tuple[Asked, Pool]:
        """Read a call as far as its pool's policy needs it; see `reading.read`.

        Raises:
            UnknownModelError: the body names a model that no pool serves.
        """
        around, current = self._around, self._current()
        rules, new_id = current.volatile, around.new_response_id
        return reading.read(call, around.fleet, around.knowledge, rules, new_id, whole=current.whole)

    async def with_tokens(self, asked: Asked, pool: Pool, call: Call) -> Asked:
        """The request with its token ids, if they can be had, and an endpoint of the pool has a profile to match."""
        around = self._around
        settings, exact = around.config.pools.get(pool.name), around.knowledge[pool.name].caches.exact
        whole = asked.read and not asked.request.flaw and not asked.request.previous_response
        sizes = exact.index.block_sizes if settings is not None and settings.profiles != "estimated" else ()
        # Profiles that are behind are not matched with: nobody waits for ids for their sake.
        wanted = len(sizes) > 0 and any(exact.counts(each.id) for each in pool.endpoints)
        if around.tokens is None or not (whole and wanted):
            return asked
        began = self._clock.monotonic()
        tokens = await around.tokens.of(pool.name, call.path, call.body, asked.request)
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
        reserve = deciding.reserve_of(around.config, pool, plan, ask, pins, (around.replica, charge_id))
        reserving = self._clock.monotonic()
        reservation, picked = await self._reserve(reserve, ask, pool, plan)
        ended = self._clock.monotonic()
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
        cached = ask.cached(picked.endpoint)
        predicted = deciding.predicted_ttft_ms(
            picked.endpoint, picked.uncached, reservation.backlog_tokens, around.config.routing.rate_factor
        )
        self._recorder.decided(
            Outcome(
                pool=pool.name,
                policy=pool.policy,
                kind=asked.request.kind,
                prompt_tokens=ask.prompt_tokens,
                cached_tokens=cached,
                best_cached_tokens=max(plan.best_cached, cached),
                predicted_ttft_ms=predicted,
                session=bool(reserve.pin_key or reserve.next_pin_key),
                pinned=reservation.pinned,
                moved=reservation.moved,
                flaw=asked.request.flaw,
                local_s=reserving - began - asked.waited_s,
                store_s=ended - reserving,
                tokens_s=asked.waited_s,
                rung=ask.rung(picked.endpoint.id),
            )
        )
        around.recent.remember(
            Remembered(
                at=self._clock.wall(),
                charge_id=charge_id,
                request_id=request_id,
                kind=asked.request.kind,
                flaw=asked.request.flaw,
                session=bool(reserve.pin_key or reserve.next_pin_key),
                ask=ask,
                pool=pool,
                subset=subset,
                config=around.config,
                reservation=reservation,
            )
        )
        order = deciding.order_of(plan, picked)
        self._rerouting.decided(charge_id, route_of(reserve, order, ask.prompt_tokens))
        return deciding.decision_of(asked, ask, pool, order, reservation, Facts(charge_id, predicted))

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
        try:
            await self._around.store.settle(Settle(decision.pool, decision.charge_id, self._around.replica))
        except StoreError:
            # The resilient store queues what it cannot deliver; a bare store's charge ends with its lease.
            return

    async def _learn_served(self, decision: Decision, served: str) -> None:
        """A foreign gateway told who answers. If that was not picked, charge, pin and profile go there."""
        pool = self._around.fleet.pools.get(decision.pool)
        endpoint = pool.id_at(served) if pool else ""
        await self._rerouting.served(decision.charge_id, endpoint)
        answered = Answered(decision.charge_id, endpoint, -1.0, -1.0, -1.0, -1.0)
        if decision.pool in self._around.knowledge:
            for delta in self._around.knowledge[decision.pool].apply(answered):
                self._publisher.publish(decision.pool, delta)

    def _current(self) -> "_Current":
        around, current = self._around, self._made
        if current is None or current.config is not around.config or current.fleet is not around.fleet:
            same = current is not None and current.config is around.config
            self._made = current = _Current(
                config=around.config,
                fleet=around.fleet,
                weights=current.weights if same and current else deciding.weights_of(around.config),
                volatile=current.volatile if same and current else rules_of(around.config.routing.volatile),
                fitting=current.fitting if same and current else Fitting(around.config),
                whole=all(POLICIES[pool.policy].prefix for pool in around.fleet.pools.values()),
            )
        return current

    async def _reserve(self, reserve: Reserve, ask: Ask, pool: Pool, plan: Plan) -> tuple[Reservation, Priced]:
        """One round trip; a second one when the session is pinned to an endpoint outside the candidates."""
        store = self._around.store
        candidates = list(plan.candidates)
        try:
            answer = await store.reserve(reserve)
            absent = answer.absent_pin
            pinned = next((each for each in plan.eligible if each.id == absent), None) if absent else None
            if pinned:
                priced = chooser.price_one(ask, pinned, pool, self._current().weights)
                candidates = [priced, *candidates][:MAX_CANDIDATES]
                offered = [*deciding.packed([priced]), *reserve.candidates][:MAX_CANDIDATES]
                answer = await store.reserve(msgspec.structs.replace(reserve, candidates=offered))
            if answer.absent_pin:  # to one that may not serve, or moved in between
                answer = await store.reserve(msgspec.structs.replace(reserve, ignore_pin=True))
        except StoreError:
            cheapest = min(plan.candidates, key=lambda each: each.static_ms)
            return Reservation(cheapest.endpoint.id, cheapest.static_ms), cheapest
        return answer, next((each for each in candidates if each.endpoint.id == answer.endpoint), candidates[0])
