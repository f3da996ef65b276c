"""What an answer says of its endpoint, and which endpoints are left alone: the rules in front of the breakers."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from statistics import median
from typing import Final, Literal

Verdict = Literal["good", "strike", "neutral"]
"""What one answer says of its endpoint: it works, it does not, or nothing."""

_BROKEN: Final = frozenset({"UF", "UC", "UR", "UPE"})
"""Envoy's response flags of a connection that failed, ended or was reset by the engine, or that spoke no HTTP. Silence
before the headers (`UT` without a status) counts as well; with one, the request was only longer than it may be."""
_CLIENT: Final = frozenset({"DC", "DPE", "DR"})
"""Flags of a client that left, or broke the protocol."""
_FULL: Final = frozenset({429, 503})
_GAIN: Final = 0.2
"""Weight of a new answer in an endpoint's pace: about the last five count."""
_LEAST_ANSWERS: Final = 3
"""Answers of a peer from which on its pace counts."""


def verdict(status: int, flags: Sequence[str] | AbstractSet[str]) -> Verdict:
    """What one answer, or one attempt at it, says of the endpoint.

    Args:
        status: HTTP status that the engine sent; 0 when it sent none.
        flags: Envoy's response flags, by their short names.
    """
    if _BROKEN.intersection(flags) or ("UT" in flags and status == 0):
        return "strike"
    if _CLIENT.intersection(flags) or "UT" in flags or status in _FULL or status == 0 or 400 <= status < 500:
        return "neutral"
    return "strike" if status >= 500 else "good"


def is_full(status: int) -> bool:
    """Whether an engine answered that it has no room."""
    return status in _FULL


def left_alone(left_ms: Mapping[str, float], members: int, most_share: float) -> set[str]:
    """Which of a pool's endpoints get no requests.

    Of more than `most_share` of the pool those that opened last are left alone: who is tried again first is let through
    instead, so that the same ones are on every replica.

    Args:
        left_ms: endpoints whose breaker is not closed, and how long it still stays open; 0 for half open.
        members: endpoints in the pool.
        most_share: the largest share of the pool that may be left alone.
    """
    most = math.floor(members * most_share + 1e-9)
    return set(sorted(left_ms, key=lambda name: (-left_ms[name], name))[:most])


class Pace:
    """How long first tokens take at each endpoint of a pool, as a multiple of what the pool's usual speed explains.

    Where the whole pool is late, nobody is slow: an endpoint is measured by its peers.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, int]] = {}

    def took(self, endpoint: str, ttft_s: float, usual_s: float) -> float:
        """Take in an answer; returns how many times longer it took than its peers do. 0 where no peer is known.

        Args:
            endpoint: who answered.
            ttft_s: time to the first token.
            usual_s: what an endpoint of the pool's median speed needs for the same work; positive.
        """
        ratio = ttft_s / usual_s
        peers = [pace for name, (pace, seen) in self._of.items() if name != endpoint and seen >= _LEAST_ANSWERS]
        pace, seen = self._of.get(endpoint, (ratio, 0))
        self._of[endpoint] = pace + _GAIN * (ratio - pace), min(seen + 1, _LEAST_ANSWERS)
        return ratio / max(1.0, median(peers)) if peers else 0.0

    def keep(self, endpoints: AbstractSet[str]) -> None:
        """Forget all endpoints but these."""
        for name in self._of.keys() - endpoints:
            del self._of[name]


def usual_s(work_tokens: float, rates: Sequence[float], overheads_s: Sequence[float]) -> float:
    """Time to the first token at an endpoint of the pool's median speed, seconds.

    Args:
        work_tokens: prompt tokens to prefill, those of others in front included.
        rates: prefill speed of each endpoint, tokens a second; not empty, all positive.
        overheads_s: of each, what no prompt accounts for.
    """
    return median(overheads_s) + max(1.0, work_tokens) / median(rates)
