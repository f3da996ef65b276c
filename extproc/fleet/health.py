"""What one scrape changes in the state of an endpoint: a pure rule.

One failed scrape changes nothing, because engines are silent during long steps and pages get lost; an endpoint is
called unreachable only after `UNREACHABLE_AFTER` scrapes in a row could not connect. An engine that answers with
anything is reachable: its numbers count as stale after three scrapes in a row that brought none, and no more.

An engine stands still when it has work and shows no progress, or brings no page. Progress is a counter of tokens that
moved, or a cache that was filled: vLLM counts a prompt's tokens with its first output token, so that during a long
prompt in chunks only the use of its cache moves, which it tells after every step.

An engine whose numbers move only now and then (`Reading.lags`) is never said to stand still by them. Where they have
not moved for longer than a step, or the page had nothing new (`Reading.kept`), they are *frozen*: nobody goes by them.
"""

import math
from enum import Enum

import msgspec

from extproc.engines.adapter import About, Reading
from extproc.engines.kv_values import EventSource
from extproc.state.endpoint import EndpointState, Source

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
        new_at: when it last told anything new, on the same clock.
    """

    state: EndpointState
    moved_at: float
    new_at: float = -math.inf


def first(destination: str, at: float) -> Health:
    """An endpoint of which nothing is known.

    Args:
        destination: its `ip:port`.
        at: monotonic time, seconds.
    """
    return Health(EndpointState(destination=destination), at, at)


def resumed(published: EndpointState, at: float) -> Health:
    """An endpoint as the keeper left it that read it before, whose clock means nothing here.

    Args:
        published: its state in the store.
        at: monotonic time, seconds.
    """
    return Health(published, at - published.stalled_s, -math.inf if published.frozen else at)


def after(previous: Health, outcome: Outcome, now: float, at: float) -> Health:
    """State after one scrape.

    Args:
        previous: state before.
        outcome: the numbers, or why there are none.
        now: wall time of the scrape, seconds since the epoch.
        at: monotonic time of the scrape, seconds.
    """
    before = previous.state
    if isinstance(outcome, Reading) and _is_other(before, outcome):
        # Another engine has taken the address: nothing that the first told is true of it.
        before = EndpointState(before.destination, draining=before.draining, kind=before.kind)
    moved_at = at if _moves(before, outcome) else previous.moved_at
    new_at = at if isinstance(outcome, Reading) and _is_new(before, outcome) else previous.new_at
    if isinstance(outcome, Failure):
        state = _unread(before, outcome)
    else:
        old = at - new_at > STEP_S
        state = _kept(before, outcome, now, idle=old) if outcome.kept else _read(before, outcome, now)
        state = msgspec.structs.replace(state, frozen=outcome.kept or (outcome.lags and old))
    still_s = at - moved_at
    return Health(msgspec.structs.replace(state, stalled_s=still_s if still_s > STEP_S else 0.0), moved_at, new_at)


def described(health: Health, about: About) -> Health:
    """Put what a slow page told over what is known.

    Args:
        health: what is known.
        about: what the page told.
    """
    before = health.state
    block_tokens = about.block_tokens or before.block_tokens
    sources = before.sources if about.sources is None else tuple(map(_published, about.sources))
    state = msgspec.structs.replace(
        before,
        models=before.models if about.models is None else about.models,
        adapters=before.adapters if about.adapters is None else about.adapters,
        version=about.version or before.version,
        sources=sources,
        block_tokens=block_tokens,
        kv_blocks=(about.kv_tokens // block_tokens if block_tokens else 0) or before.kv_blocks,
        ranks=about.ranks or before.ranks,
        max_adapters=about.max_adapters or before.max_adapters,
        hash_algo=about.hash_algo or before.hash_algo,
        prefix_caching=before.prefix_caching if about.prefix_caching is None else about.prefix_caching,
    )
    return msgspec.structs.replace(health, state=state)


def _published(source: EventSource) -> Source:
    return Source(source.rank, source.way, source.endpoint, source.replay, source.topic)


def _moves(before: EndpointState, outcome: Outcome) -> bool:
    """Whether an outcome is no sign that the engine stands still. One that does not count its tokens is not judged."""
    if isinstance(outcome, Failure):
        return outcome is Failure.UNREADABLE
    if outcome.kept or outcome.lags or not outcome.tokens:
        return True
    idle = outcome.running + outcome.waiting == 0
    return idle or (before.tokens, before.kv_usage) != (outcome.tokens, outcome.kv_usage)


def _is_other(before: EndpointState, reading: Reading) -> bool:
    """Whether a reading is of another kind of engine than what was known."""
    return before.kind not in {"", reading.kind}


def _is_new(before: EndpointState, reading: Reading) -> bool:
    """Whether a reading proves that the numbers are those of the last seconds."""
    if reading.kept:
        return False
    told = (reading.running, reading.waiting, reading.kv_usage, reading.tokens)
    return not reading.lags or told != (before.running, before.waiting, before.kv_usage, before.tokens)


def _unread(state: EndpointState, failure: Failure) -> EndpointState:
    misses = state.misses + 1 if failure is Failure.UNREACHABLE else 0
    reachable = misses < UNREACHABLE_AFTER and (misses == 0 or state.reachable)
    return msgspec.structs.replace(state, misses=misses, reachable=reachable, unread=state.unread + 1)


def _kept(before: EndpointState, reading: Reading, now: float, *, idle: bool) -> EndpointState:
    """State after a page without anything new: the last numbers, or an idle engine when no step was made for long."""
    return msgspec.structs.replace(
        before,
        scraped_at=now,
        reachable=True,
        misses=0,
        unread=0,
        running=0 if idle else before.running,
        waiting=0 if idle else before.waiting,
        started_at=_started_at(before, reading, now),
        kind=reading.kind,
        page=reading.page,
    )


def _read(before: EndpointState, reading: Reading, now: float) -> EndpointState:
    block_tokens = reading.block_tokens or before.block_tokens
    kv_blocks = reading.kv_blocks or (reading.kv_tokens // block_tokens if block_tokens else 0)
    return msgspec.structs.replace(
        before,
        scraped_at=now,
        reachable=True,
        misses=0,
        unread=0,
        asleep=reading.asleep,
        running=reading.running,
        waiting=reading.waiting,
        kv_usage=reading.kv_usage,
        block_tokens=block_tokens,
        kv_blocks=kv_blocks or before.kv_blocks,
        started_at=_started_at(before, reading, now),
        told_start=reading.started_at or before.told_start,
        prefix_queries=reading.prefix_queries,
        prefix_hits=reading.prefix_hits,
        prefix_caching=before.prefix_caching if reading.prefix_caching is None else reading.prefix_caching,
        version=reading.version or before.version,
        tokens=reading.tokens,
        kind=reading.kind,
        page=reading.page,
        active_adapters=reading.active_adapters,
        max_adapters=reading.max_adapters or before.max_adapters,
        ranks=reading.ranks or before.ranks,
        hash_algo=reading.hash_algo or before.hash_algo,
    )


def _started_at(before: EndpointState, reading: Reading, now: float) -> float:
    """Start of the engine as published: a change tells every reader that the cache is empty.

    Engines with several API processes do not tell their start; for them, and for an engine core that was replaced
    under a living API process, a counter that went back is the sign. Counters of two pages are not compared.

    Of an engine that tells neither, as long as it has counted nothing, an address that could not be connected to for a
    while is the sign: its process was gone. (So it looks when the network was cut, and then costs a profile.)
    """
    if reading.started_at and reading.started_at != before.told_start:
        return reading.started_at
    if _is_other(before, reading):
        return now
    comparable = not reading.kept and before.page in {"", reading.page}
    if comparable and (reading.prefix_queries < before.prefix_queries or reading.tokens < before.tokens):
        return now
    counts = reading.started_at or reading.prefix_queries or reading.tokens
    return before.started_at if before.reachable or counts else now
