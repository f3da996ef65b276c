"""The arithmetic of a reservation as plain functions; `redis/reserve.lua` does the same inside Redis.

The contract suite holds both to the same results, bit for bit: keep the order of operations equal.
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.state.values import Candidate, Load, Move, Reserve

MAX_CANDIDATES: Final = 32
MAX_SEQUENCES: Final = 65_536
"""Sequences that one charge holds at most; what a client writes in `n` has no bound."""
MAX_OUTPUT_TOKENS: Final = 1e9
"""Output tokens that one charge holds at most."""
MAX_RUNNING: Final = 10**9
"""Sequences that an engine can be said to run at most."""
PINS_TRIMMED: Final = 8
"""Pins given up at most for one that is added: more than one, so that a lowered bound is reached; few, so that no
decision waits for it."""

# Output tokens are charged in steps of 1/1024. Sums of such numbers are exact in doubles up to 2^43, so that the ends
# of charges take away to the last bit what their beginnings added, whatever the order.
_STEPS: Final = 1024.0


class Bucket(msgspec.Struct, frozen=True, gc=False):
    """Leaky bucket of prefill work: `tokens` at the time `since` (seconds), drained at `rate` tokens a second."""

    tokens: float
    since: float
    rate: float

    def level(self, now: float) -> float:
        """Tokens left at `now`: b(now) = max(0, b(since) - rate * (now - since))."""
        return max(0.0, self.tokens - self.rate * max(0.0, now - self.since))


class Pick(msgspec.Struct, frozen=True, gc=False):
    """Outcome of a reservation: position of the picked candidate (-1: none, the pin is absent) and why."""

    index: int
    cost_ms: float = 0.0
    pinned: bool = False
    moved: bool = False


def check(ask: Reserve) -> None:
    """Raise ValueError when `ask` has no or too many candidates, or numbers that cannot be priced or charged."""
    check_pins(ask.max_pins)
    if not 0 < len(ask.candidates) <= MAX_CANDIDATES:
        raise ValueError(f"reserve: {len(ask.candidates)} candidates; pass 1 to {MAX_CANDIDATES}")
    if ask.sequences < 1 or not 0.0 <= ask.output_tokens < math.inf:
        raise ValueError(
            f"reserve: {ask.sequences} sequences of {ask.output_tokens} output tokens; "
            "pass one sequence or more, and a finite number of tokens that is not negative"
        )
    for each in ask.candidates:
        if not 0.0 < each.rate < math.inf:
            raise ValueError(f"reserve: endpoint {each.endpoint!r} has rate {each.rate}; pass a positive number")
        if not all(0.0 <= amount < math.inf for amount in (each.tokens, each.floor_tokens, each.stalled_tokens)):
            raise ValueError(
                f"reserve: endpoint {each.endpoint!r} has {each.tokens} tokens, a floor of {each.floor_tokens} and "
                f"{each.stalled_tokens} stalled; pass finite numbers that are not negative"
            )
        if not 0 <= each.floor_running <= MAX_RUNNING:
            raise ValueError(
                f"reserve: endpoint {each.endpoint!r} is said to run {each.floor_running} sequences; "
                f"pass 0 to {MAX_RUNNING}"
            )
        if not math.isfinite(each.static_ms):
            raise ValueError(f"reserve: endpoint {each.endpoint!r} costs {each.static_ms} ms; pass a finite number")


def check_pins(max_pins: int) -> None:
    """Raise ValueError for a bound that leaves no room for the pin just made."""
    if max_pins < 1:
        raise ValueError(f"pins: at most {max_pins} of them; pass 1 or more")


def check_move(move: Move) -> None:
    """Raise ValueError when `move` has numbers that cannot be charged."""
    if not (0.0 <= move.tokens < math.inf and 0.0 < move.rate < math.inf):
        raise ValueError(
            f"move: endpoint {move.endpoint!r} gets {move.tokens} tokens at rate {move.rate}; "
            "pass a finite number of tokens that is not negative, and a positive rate"
        )


def decode_charge(ask: Reserve) -> tuple[int, float]:
    """Sequences and output tokens that the charge of `ask` holds until its end: bounded, tokens in steps of 1/1024."""
    tokens = min(ask.output_tokens, MAX_OUTPUT_TOKENS)
    return min(ask.sequences, MAX_SEQUENCES), round(tokens * _STEPS) / _STEPS


def floored(candidate: Candidate, load: Load) -> Load:
    """Load that counts for `candidate`: what the store knows, and no less than what its engine proves."""
    running = max(load.running, candidate.floor_running)
    backlog = max(load.backlog_tokens, candidate.floor_tokens, candidate.stalled_tokens * running)
    return Load(backlog, running, load.output_tokens)


def cost_ms(ask: Reserve, candidate: Candidate, load: Load) -> float:
    """Full cost of `candidate` under `load`, its floors included."""
    return (
        candidate.static_ms
        + load.backlog_tokens / candidate.rate * 1000 * ask.backlog_weight
        + load.running * ask.running_ms
        + load.output_tokens * ask.output_ms
    )


def pick(ask: Reserve, loads: Sequence[Load], pin: str) -> Pick:
    """Pick a candidate by the rules of `Reserve`.

    Args:
        ask: the reservation.
        loads: load of each candidate before this charge, in their order, floors included.
        pin: endpoint that the session is pinned to; empty without a live pin.

    Returns:
        The pick.
    """
    costs = [cost_ms(ask, candidate, load) for candidate, load in zip(ask.candidates, loads, strict=True)]
    least = min(costs)
    if pin and not ask.ignore_pin:
        at = next((index for index, each in enumerate(ask.candidates) if each.endpoint == pin), -1)
        if at < 0:
            return Pick(-1)
        if ask.strict or costs[at] <= least + ask.break_out_ms:
            return Pick(at, costs[at], pinned=True)
    index = next(index for index, cost in enumerate(costs) if cost <= least + ask.tie_ms)
    moved = bool(pin) and ask.candidates[index].endpoint != pin
    return Pick(index, costs[index], moved=moved)
