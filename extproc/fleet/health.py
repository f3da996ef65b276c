"""What one scrape changes in the state of an endpoint: a pure rule.

One failed scrape changes nothing, because engines are silent during long steps and pages get lost; an endpoint is
called unreachable only after `UNREACHABLE_AFTER` scrapes in a row could not connect. An engine that answers with
anything is reachable: its numbers grow old, and their age says so.

An engine stands still when it has work and shows no progress, or brings no page. Progress is a counter of tokens that
moved, or a cache that was filled: vLLM counts a prompt's tokens with its first output token, so that during a long
prompt in chunks only the use of its cache moves, which it tells after every step.
"""

from enum import Enum

import msgspec

from extproc.engines.adapter import Reading
from extproc.state.endpoint import EndpointState

UNREACHABLE_AFTER = 3
STEP_S = 2.0
"""No progress for so long is no stall: one step may take it. vLLM's largest default budget, 16,384 prompt tokens a
step, takes a 70B model 1 to 2 s at 8,000 to 16,000 tokens/s; a step of decoding takes milliseconds."""


class Failure(Enum):
    """Why a scrape brought no numbers."""

    UNREADABLE = "unreadable"
    """An HTTP error, a page of something else, or a connection that broke."""
    SILENT = "silent"
    """Connected, but no page in time: the process may be frozen."""
    UNREACHABLE = "unreachable"
    """No connection."""


Outcome = Reading | Failure


class Health(msgspec.Struct, frozen=True):
    """What the keeper remembers of an endpoint between scrapes.

    Attributes:
        state: what is published.
        moved_at: when the engine last showed progress or had nothing to do, on this keeper's monotonic clock.
    """

    state: EndpointState
    moved_at: float


def first(destination: str, at: float) -> Health:
    """An endpoint of which nothing is known.

    Args:
        destination: its `ip:port`.
        at: monotonic time, seconds.
    """
    return Health(EndpointState(destination=destination), at)


def resumed(published: EndpointState, at: float) -> Health:
    """An endpoint as the keeper left it that read it before, whose clock means nothing here.

    Args:
        published: its state in the store.
        at: monotonic time, seconds.
    """
    return Health(published, at - published.stalled_s)


def after(previous: Health, outcome: Outcome, now: float, at: float) -> Health:
    """State after one scrape.

    Args:
        previous: state before.
        outcome: the numbers, or why there are none.
        now: wall time of the scrape, seconds since the epoch.
        at: monotonic time of the scrape, seconds.
    """
    state = _read(previous.state, outcome, now) if isinstance(outcome, Reading) else _unread(previous.state, outcome)
    moved_at = at if _moves(previous.state, outcome) else previous.moved_at
    still_s = at - moved_at
    return Health(msgspec.structs.replace(state, stalled_s=still_s if still_s > STEP_S else 0.0), moved_at)


def _moves(before: EndpointState, outcome: Outcome) -> bool:
    """Whether an outcome is no sign that the engine stands still. One that does not count its tokens is not judged."""
    if isinstance(outcome, Failure):
        return outcome is Failure.UNREADABLE
    idle = outcome.running + outcome.waiting == 0
    return idle or not outcome.tokens or (before.tokens, before.kv_usage) != (outcome.tokens, outcome.kv_usage)


def _unread(state: EndpointState, failure: Failure) -> EndpointState:
    misses = state.misses + 1 if failure is Failure.UNREACHABLE else 0
    reachable = misses < UNREACHABLE_AFTER and (misses == 0 or state.reachable)
    return msgspec.structs.replace(state, misses=misses, reachable=reachable)


def _read(before: EndpointState, reading: Reading, now: float) -> EndpointState:
    return msgspec.structs.replace(
        before,
        scraped_at=now,
        reachable=True,
        misses=0,
        asleep=reading.asleep,
        running=reading.running,
        waiting=reading.waiting,
        kv_usage=reading.kv_usage,
        block_tokens=reading.block_tokens or before.block_tokens,
        kv_blocks=reading.kv_blocks or before.kv_blocks,
        started_at=_started_at(before, reading, now),
        told_start=reading.started_at or before.told_start,
        prefix_queries=reading.prefix_queries,
        prefix_hits=reading.prefix_hits,
        prefix_caching=reading.prefix_caching,
        version=reading.version or before.version,
        tokens=reading.tokens,
    )


def _started_at(before: EndpointState, reading: Reading, now: float) -> float:
    """Start of the engine as published: a change tells every reader that the cache is empty.

    Engines with several API processes do not tell their start; for them, and for an engine core that was replaced
    under a living API process, a counter that went back is the sign.
    """
    if reading.started_at and reading.started_at != before.told_start:
        return reading.started_at
    if reading.prefix_queries < before.prefix_queries:
        return now
    return before.started_at
