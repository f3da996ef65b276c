"""What a worker answers an operator who asks why: of a request that it is shown, and of a decision that it made.

Every value is made by the functions that a decision is made of; only `reserve`, which charges, pins and renews, is
replaced by reading what it reads and picking as it picks.
"""

from collections.abc import Callable, Sequence

import msgspec

from extproc import continuing, deciding
from extproc.choose.explain import Case, Explanation, PinState, Why, costs
from extproc.choose.fleet import Endpoint
from extproc.clock import Clock
from extproc.config import Config
from extproc.envoy.contract import Call
from extproc.errors import StoreError, UnknownDecisionError
from extproc.recent import Remembered
from extproc.rollout.split import Choice
from extproc.router import Router, Surroundings
from extproc.state.pick import cost_ms, floored, pick
from extproc.state.values import Load, Reserve


class Explainer:
    """Explains for one worker. Asking it changes nothing: no charge, no pin, no profile."""

    def __init__(self, around: Surroundings, router: Router, clock: Clock) -> None:
        self._around = around
        self._router = router
        self._clock = clock

    async def explain(self, call: Call) -> Explanation:
        """What would be decided for `call` now.

        Raises:
            UnknownModelError: the body names a model that no pool serves.
            UnknownVersionError: a tester asks for a version that the model does not have.
            StoreError: nobody knows the load.
        """
        around = self._around
        asked, pool = await self._router.settled(call, *self._router.read(call))
        asked = await self._router.with_tokens(asked, pool, call)
        subset = None if call.subset is None else frozenset(call.subset)
        config = around.config
        moment = deciding.moment_of(config, pool.name, self._router.turn + 1, self._clock.monotonic())
        ask = deciding.ask_of(asked, around.knowledge[pool.name], moment)
        case = Case(ask, pool, deciding.weights_of(config), subset)
        plan = case.plan()
        pins = continuing.pins_of(config, pool, asked.request)
        reserve = deciding.reserve_of(
            config, pool, plan, ask, pins, (around.replica, ""), versioned=asked.choice is not None
        )
        pin, pinned_to = await self._pin(reserve)
        loads = await around.store.loads(pool.name)
        reserve = _offering(reserve, case, pinned_to)
        offered = {each.endpoint: each for each in reserve.candidates}

        def load_of(endpoint: str) -> Load:
            load, candidate = loads.get(endpoint, Load()), offered.get(endpoint)
            return load if candidate is None else floored(candidate, load)

        picked, why = _pick(reserve, [load_of(each.endpoint) for each in reserve.candidates], pinned_to)
        if pinned_to:
            pin = "honoured" if why == "pin" else "moved"
        explained = Explanation(
            at=self._clock.wall(),
            charge_id="",
            request_id="",
            replica=around.replica,
            pool=pool.name,
            policy=pool.policy,
            kind=asked.request.kind.value,
            flaw=asked.request.flaw,
            prompt_tokens=ask.prompt_tokens,
            answers=ask.n,
            output_tokens=ask.output_tokens,
            pin=pin,
            pinned_to=pinned_to,
            pick=picked,
            why=why,
            tie_ms=reserve.tie_ms,
            break_out_ms=reserve.break_out_ms,
            candidates=costs(case, pinned_to, load_of, _predictor(config)),
        )
        return _of_version(explained, asked.choice)

    def recall(self, name: str) -> Explanation:
        """Why a past decision was made, by its charge id or its request's id.

        Raises:
            UnknownDecisionError: it was made by another worker, or too long ago.
        """
        made = self._around.recent.find(name)
        if made is None:
            raise UnknownDecisionError("this worker does not remember the decision")
        return recalled(made, self._around.replica)

    async def _pin(self, reserve: Reserve) -> tuple[PinState, str]:
        """What there is to say of the session's pin before its cost is known, and the endpoint that it names."""
        if not reserve.pin_key:
            return ("new" if reserve.next_pin_key else "none"), ""
        try:
            return "new", await self._around.store.pinned(reserve.pool, reserve.pin_key)
        except StoreError:
            return "unknown", ""


def recalled(made: Remembered, replica: str) -> Explanation:
    """A remembered decision taken apart. The store told the load of the pick alone, so the others' costs lack it."""
    reservation, pool, ask, config = made.reservation, made.pool, made.ask, made.config
    case = Case(ask, pool, deciding.weights_of(config), made.subset)
    pinned_to = reservation.endpoint if reservation.pinned else ""
    load = Load(reservation.backlog_tokens, reservation.running, reservation.output_tokens)
    explained = Explanation(
        at=made.at,
        charge_id=made.charge_id,
        request_id=made.request_id,
        replica=replica,
        pool=pool.name,
        policy=pool.policy,
        kind=made.kind.value,
        flaw=made.flaw,
        prompt_tokens=ask.prompt_tokens,
        answers=ask.n,
        output_tokens=ask.output_tokens,
        pin=_pin_state(made),
        pinned_to=pinned_to,
        pick=reservation.endpoint,
        why="pin" if reservation.pinned else "least_cost",
        tie_ms=case.plan().tie_ms,
        break_out_ms=config.routing.session.break_out_ms,
        candidates=costs(
            case, pinned_to, lambda each: load if each == reservation.endpoint else None, _predictor(config)
        ),
    )
    return _of_version(explained, made.choice)


def _of_version(explained: Explanation, choice: Choice | None) -> Explanation:
    if choice is None:
        return explained
    return msgspec.structs.replace(
        explained, model=choice.model, version=choice.version, version_why=choice.why, version_by=choice.by
    )


def _pin_state(made: Remembered) -> PinState:
    if made.reservation.pinned:
        return "honoured"
    if made.reservation.moved:
        return "moved"
    return "new" if made.session else "none"


def _offering(reserve: Reserve, case: Case, pinned_to: str) -> Reserve:
    """The reservation that is decided in the end: the pinned endpoint among the candidates, or its pin ignored."""
    offered = deciding.packed(case.with_pinned(case.plan(), pinned_to))
    absent = bool(pinned_to) and all(each.endpoint != pinned_to for each in offered)
    return msgspec.structs.replace(reserve, candidates=offered, ignore_pin=absent)


def _pick(reserve: Reserve, loads: Sequence[Load], pin: str) -> tuple[str, Why]:
    if not reserve.candidates:
        return "", "no_endpoint"
    choice = pick(reserve, loads, pin)
    picked = reserve.candidates[choice.index].endpoint
    if choice.pinned:
        return picked, "pin"
    least = min(cost_ms(reserve, each, load) for each, load in zip(reserve.candidates, loads, strict=True))
    return picked, "cheapest" if choice.cost_ms <= least else "tie_order"


def _predictor(config: Config) -> Callable[[Endpoint, float, float], float]:
    factor = config.routing.rate_factor
    return lambda endpoint, uncached, backlog: deciding.predicted_ttft_ms(endpoint, uncached, backlog, factor)
