"""Policies: how an ask prices each endpoint, and what the store may add to it.

A policy is a function of (ask, endpoint) to named costs in milliseconds, with the weights the store applies to the
shared part. All policies have this one form, so any of them can be charged, pinned, explained and replayed alike.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from extproc.choose import scorers
from extproc.choose.fleet import Endpoint

PLACE_MS = 1e6
"""Cost of one place in the order of a policy that ranks endpoints and does not price them."""


Rung = Literal["precise", "estimated", "load"]
"""How a prompt is matched: by what the engine told of its cache, by what was decided before, or not at all."""


class Weights(msgspec.Struct, frozen=True):
    """The configured weights of the choice; see `config.Routing` for each."""

    prefill_weight: float = 1.0
    rare_weight: float = 3.0
    running_ms: float = 2.0
    output_ms: float = 0.09
    hit_weight: float = 1.0
    load_weight: float = 1.0
    tie_ms: float = 3.0
    kv_watermark: float = 0.9
    kv_penalty_ms: float = 500.0
    candidates: int = 16


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What a request asks of a pool.

    Attributes:
        prompt_tokens: estimated prompt length.
        matched_tokens: by endpoint id, how many of the prompt's first tokens its profile holds; absent means 0.
        first_block: hash that stands for the beginning of the prompt; requests that begin alike share it.
        home: hash that places the request when a policy sends whole sessions to one place.
        turn: a number that differs from request to request, for policies that rotate.
        n: answers asked for.
        output_tokens: output tokens expected of all answers.
        rarity: how seldom the longest beginning that any endpoint holds is used: 0 all the time, 1 hardly ever.
        shared_block: last block of that beginning; 0 when no endpoint holds any.
        held_tokens: by id, how many of the first tokens the endpoints with an exact profile will report as cached;
            `matched_tokens` has what these are worth, which is less where they are not in the GPU.
        estimated_tokens: what the estimated profiles say, where `held_tokens` has anything.
        blind: nothing is known of the prompt, so that load alone decides.
    """

    prompt_tokens: float
    matched_tokens: Mapping[str, float] = msgspec.field(default_factory=dict)
    first_block: int = 0
    home: int = 0
    turn: int = 0
    n: int = 1
    output_tokens: float = 0.0
    rarity: float = 0.0
    shared_block: int = 0
    held_tokens: Mapping[str, float] = msgspec.field(default_factory=dict)
    estimated_tokens: Mapping[str, float] = msgspec.field(default_factory=dict)
    blind: bool = False

    def uncached(self, endpoint: Endpoint) -> float:
        """Prompt tokens the endpoint would have to prefill, by its profile."""
        matched = self.matched_tokens.get(endpoint.id, 0.0)
        return self.prompt_tokens - scorers.cached_tokens(matched, self.prompt_tokens, endpoint.block_tokens)

    def cached(self, endpoint: Endpoint) -> float:
        """Prompt tokens that the endpoint is expected to report as cached."""
        held = self.held_tokens.get(endpoint.id)
        return self.prompt_tokens - self.uncached(endpoint) if held is None else held

    def estimated(self, endpoint: Endpoint) -> float:
        """The same by its estimated profile alone, which goes on beside an exact one."""
        if endpoint.id not in self.held_tokens:
            return self.cached(endpoint)
        matched = self.estimated_tokens.get(endpoint.id, 0.0)
        return scorers.cached_tokens(matched, self.prompt_tokens, endpoint.block_tokens)

    def rung(self, endpoint: str) -> Rung:
        """What tells what the endpoint has of the prompt."""
        if endpoint in self.held_tokens:
            return "precise"
        return "load" if self.blind else "estimated"


Price = Callable[[Ask, Endpoint, float, Weights, int], float]
"""Cost in ms of an endpoint, given (ask, endpoint, its uncached tokens, weights, position in the tie order)."""


class Policy(msgspec.Struct, frozen=True):
    """One way of choosing.

    Attributes:
        terms: the static cost of an endpoint, by the name of each part; it is their sum.
        order: how endpoints stand before they are priced: by hash of the prompt's beginning (`prefix`), by hash of
            the session (`home`), or one further for each request (`turn`).
        prefix: whether it looks at the prompt at all; if not, bodies are not parsed for it.
        sticky: whether session pins are kept.
        ties: whether costs within `tie_ms` count as equal.
        backlog: whether the store adds the shared backlog's drain time.
        running: whether the store adds what is in flight.
        traded: whether `Weights.load_weight` multiplies what the store adds.
    """

    terms: Mapping[str, Price]
    order: Literal["prefix", "home", "turn"]
    prefix: bool = False
    sticky: bool = False
    ties: bool = False
    backlog: bool = False
    running: bool = False
    traded: bool = False


def _prefill(ask: Ask, endpoint: Endpoint, uncached: float, weights: Weights, _position: int) -> float:
    # A second copy of a hot prefix serves many; one of a rare prefix only evicts something else.
    weight = weights.prefill_weight + ask.rarity * (weights.rare_weight - weights.prefill_weight)
    return scorers.prefill_ms(uncached, endpoint.rate, weight)


def _kv_pressure(_ask: Ask, endpoint: Endpoint, _uncached: float, weights: Weights, _position: int) -> float:
    return scorers.kv_pressure_ms(endpoint, weights.kv_watermark, weights.kv_penalty_ms)


def _miss(ask: Ask, _endpoint: Endpoint, uncached: float, weights: Weights, _position: int) -> float:
    return scorers.miss_ms(uncached, ask.prompt_tokens, weights.hit_weight)


def _silence(_ask: Ask, endpoint: Endpoint, _uncached: float, _weights: Weights, _position: int) -> float:
    return scorers.silence_ms(endpoint)


def _busy(_ask: Ask, endpoint: Endpoint, _uncached: float, _weights: Weights, _position: int) -> float:
    return scorers.busy_ms(endpoint)


def _place(_ask: Ask, _endpoint: Endpoint, _uncached: float, _weights: Weights, position: int) -> float:
    return PLACE_MS * position


_PREDICTED_TTFT = Policy(
    {"prefill": _prefill, "kv_pressure": _kv_pressure, "silence": _silence, "busy": _busy},
    order="prefix",
    prefix=True,
    sticky=True,
    ties=True,
    backlog=True,
    running=True,
)
POLICIES: Mapping[str, Policy] = {
    "predicted_ttft": _PREDICTED_TTFT,
    "weighted": msgspec.structs.replace(
        _PREDICTED_TTFT,
        terms={"miss": _miss, "kv_pressure": _kv_pressure, "silence": _silence, "busy": _busy},
        traded=True,
    ),
    "least_tokens": Policy({"silence": _silence, "busy": _busy}, order="turn", prefix=True, backlog=True),
    "session_hash": Policy({"place": _place}, order="home"),
    "round_robin": Policy({"place": _place}, order="turn"),
}


def terms(
    policy: Policy, ask: Ask, endpoint: Endpoint, uncached: float, weights: Weights, position: int
) -> Mapping[str, float]:
    """Static cost of an endpoint in ms, by the name of each part: `chooser.Priced.static_ms` is their sum."""
    return {name: term(ask, endpoint, uncached, weights, position) for name, term in policy.terms.items()}
