"""When requests come: Poisson processes, arrivals spread inside a clock tick, and the pace of a whole trace."""

import random
from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec

from extproc.replay.rows import Row, Trace

TOKEN_S = 0.01
"""Seconds that one generated token is taken to last where a plan needs the length of an answer beforehand."""


def seeded(name: str, seed: int) -> random.Random:
    """Return the random source of one workload; equal names and seeds give equal sources on every platform."""
    return random.Random(f"{name}-{seed}")  # noqa: S311 - traffic, not secrets


def poisson(rng: random.Random, rate: float, seconds: float, start_s: float = 0.0) -> Iterator[float]:
    """Yield the arrivals of a Poisson process of `rate` a second, from `start_s` on for `seconds`."""
    at_s = start_s + rng.expovariate(rate)
    while at_s < start_s + seconds:
        yield at_s
        at_s += rng.expovariate(rate)


def spread(times: Sequence[float], tick_s: float) -> list[float]:
    """Spread arrivals that a recorder rounded to its tick evenly over the time until the next tick.

    Args:
        times: arrivals in seconds, ascending.
        tick_s: longest time over which equal arrivals are spread.

    Returns:
        As many arrivals, ascending. The first one of each tick stays where it is, and so does whatever arrived alone.
    """
    result: list[float] = []
    for at_s, group in groupby(times):
        count = sum(1 for _ in group)
        end = len(result) + count
        gap = min(times[end] - at_s, tick_s) if end < len(times) else tick_s
        result.extend(at_s + gap * n / count for n in range(count))
    return result


def paced(trace: Trace, factor: float, *, think: bool = True) -> Trace:
    """Return the trace at `factor` times its pace; 2 halves every time between two requests.

    Args:
        trace: left as it is.
        factor: above 0.
        think: whether think times shrink too; without, only conversations begin sooner.

    Raises:
        ValueError: when `factor` is not above 0.
    """
    if not factor > 0:
        raise ValueError(f"a pace must be above 0, got {factor}")
    rows = [
        msgspec.structs.replace(row, at_s=row.at_s / factor) if think or row.after < 0 else row for row in trace.rows
    ]
    return Trace(trace.name, trace.block_tokens, rows)


def lasts_s(trace: Trace) -> float:
    """Return when the last row that waits for no other arrives, in seconds from the start of the trace."""
    return max((row.at_s for row in trace.rows if row.after < 0), default=0.0)


def expected(rows: Sequence[Row], token_s: float = TOKEN_S) -> list[float]:
    """Return when each row is sent, in seconds, if an answer takes `token_s` a token and nothing else."""
    sent: list[float] = []
    for row in rows:
        start = 0.0 if row.after < 0 else sent[row.after] + rows[row.after].output_tokens * token_s
        sent.append(start + row.at_s)
    return sent


def requests_per_s(trace: Trace, token_s: float = TOKEN_S) -> float:
    """Return the mean rate of requests up to the last one, by `expected`; 0 for a trace without extent."""
    last = max(expected(trace.rows, token_s), default=0.0)
    return trace.requests / last if last else 0.0


def interleaved(talks: Sequence[Sequence[Row]], token_s: float = TOKEN_S) -> list[Row]:
    """Merge conversations into one list of rows in the order of `expected`.

    Args:
        talks: conversations; the first row's `at_s` is its arrival, that of every other its think time after the
            row before. Their `after` is not read.
        token_s: seconds a token.

    Returns:
        The rows with `after` set.
    """
    order: list[tuple[float, int, int]] = []
    for number, talk in enumerate(talks):
        at_s = 0.0
        for turn, row in enumerate(talk):
            at_s += row.at_s
            order.append((at_s, number, turn))
            at_s += row.output_tokens * token_s
    order.sort()
    place = {(number, turn): index for index, (_, number, turn) in enumerate(order)}
    return [
        msgspec.structs.replace(talks[number][turn], after=place[number, turn - 1] if turn else -1)
        for _, number, turn in order
    ]
