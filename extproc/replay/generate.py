"""Generated workloads: each one shows a way in which routing is won or lost, and is the same for the same seed.

The defaults are meant for 8 engines of 98,000 tokens of KV cache and 20,000 prefill tokens a second each. The
ideal cached share of a workload (`Trace.ideal_cached_share`) stands at its defaults.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import msgspec

from extproc.errors import TraceError
from extproc.replay.arrivals import interleaved, poisson, seeded
from extproc.replay.prompts import Prompt, grown, turn_id
from extproc.replay.rows import Row, Trace

Span = tuple[int, int]
"""Smallest and largest value, both possible; every value between is equally likely."""


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """What all workloads have: requests, or conversations, arrive whether or not earlier ones were answered.

    Attributes:
        rate: arrivals a second, on average, of a Poisson process.
        seconds: arrivals happen within this time.
        answer_tokens: length of an answer; its upper end is the limit that clients set.
        block_tokens: tokens of a block of the rows' hashes.
    """

    rate: float = 38.0
    seconds: float = 40.0
    answer_tokens: Span = (50, 150)
    block_tokens: int = 64


class SharedPrefixes(Open, frozen=True, kw_only=True):
    """Questions behind shared prefixes, such as system prompts and documents.

    Attributes:
        groups: number of prefixes.
        prefix_tokens: length of one.
        question_tokens: length of a question; no two are alike.
        zipf: the n-th prefix is used in proportion to 1 / n ** zipf; 0 uses all alike.
    """

    groups: int = 240
    prefix_tokens: int = 3500
    question_tokens: Span = (200, 500)
    zipf: float = 0.0


class Bursts(SharedPrefixes, frozen=True, kw_only=True):
    """Shared prefixes whose users come in waves: `rate` for `on_s`, `off_rate` for `off_s`, and sudden bursts.

    Attributes:
        on_s: seconds of a busy phase; the first one begins at once.
        off_s: seconds of a calm phase.
        off_rate: requests a second in a calm phase.
        burst: requests of a sudden burst.
        burst_s: seconds over which one is spread.
        burst_every_s: one burst falls into each span of so many seconds, at a random place.
    """

    rate: float = 45.0
    on_s: float = 4.0
    off_s: float = 4.0
    off_rate: float = 15.0
    burst: int = 100
    burst_s: float = 0.2
    burst_every_s: float = 15.0


class MultiTurn(Open, frozen=True, kw_only=True):
    """Conversations whose turns wait for the answer before and send the whole history again, answers included.

    Attributes:
        systems: number of system prompts; all are used alike.
        system_tokens: length of one.
        question_tokens: length of the user's message.
        turns: turns of a conversation.
        think_s: shortest and longest pause before the next turn, in seconds.
        named_share: share of conversations whose client sends a session id.
    """

    rate: float = 8.0
    answer_tokens: Span = (100, 300)
    systems: int = 32
    system_tokens: int = 600
    question_tokens: Span = (220, 800)
    turns: Span = (4, 8)
    think_s: tuple[float, float] = (1.0, 4.0)
    named_share: float = 0.5


class MixedLengths(Open, frozen=True, kw_only=True):
    """Prompts and answers of log-normal lengths; no two prompts share anything.

    Attributes:
        prompt_median: half of the prompts are shorter, in tokens.
        prompt_sigma: standard deviation of the natural logarithm of the length.
        prompt_tokens: lengths beyond these bounds are cut to them.
        answer_median: as `prompt_median`.
        answer_sigma: as `prompt_sigma`.
    """

    answer_tokens: Span = (4, 1000)
    prompt_median: float = 1500.0
    prompt_sigma: float = 1.2
    prompt_tokens: Span = (16, 32_000)
    answer_median: float = 100.0
    answer_sigma: float = 0.8


class LongAnswers(Open, frozen=True, kw_only=True):
    """Most requests ask behind one and the same prefix for long answers, so decoding is the work, not prefill.

    Attributes:
        hot_share: share of requests behind the prefix; the others share nothing. At 0.9 the 90th percentile of TTFT
            would lie on the edge between the two kinds, where a few requests move it by a factor of ten.
        prefix_tokens: its length; the other prompts are as long.
        question_tokens: length of a question.
    """

    rate: float = 24.0
    answer_tokens: Span = (500, 700)
    hot_share: float = 0.95
    prefix_tokens: int = 4096
    question_tokens: Span = (100, 300)


def shared_prefixes(settings: SharedPrefixes, seed: int, name: str = "shared_prefixes") -> Trace:
    """Return questions behind many prefixes that no engine can hold all of; 75 % could be found cached."""
    rng = seeded(name, seed)
    return _behind_prefixes(name, settings, list(poisson(rng, settings.rate, settings.seconds)), rng)


def hot_prefix(settings: SharedPrefixes, seed: int) -> Trace:
    """Return questions behind few prefixes, one of which takes half of the traffic; 75 % could be found cached."""
    return shared_prefixes(settings, seed, "hot_prefix")


def bursts(settings: Bursts, seed: int) -> Trace:
    """Return questions behind shared prefixes that come in waves and bursts."""
    rng = seeded("bursts", seed)
    times: list[float] = []
    start_s, on = 0.0, True
    while start_s < settings.seconds:
        rate, length_s = (settings.rate, settings.on_s) if on else (settings.off_rate, settings.off_s)
        times += poisson(rng, rate, min(length_s, settings.seconds - start_s), start_s)
        start_s, on = start_s + length_s, not on
    for n in range(int(settings.seconds / settings.burst_every_s)):
        begin_s = (n + rng.random()) * settings.burst_every_s
        times += (begin_s + rng.random() * settings.burst_s for _ in range(settings.burst))
    return _behind_prefixes("bursts", settings, sorted(times), rng)


def multi_turn(settings: MultiTurn, seed: int, name: str = "multi_turn") -> Trace:
    """Return conversations, half of which name their session; 82 % could be found cached."""
    rng = seeded(name, seed)
    size = settings.block_tokens
    systems = [grown(Prompt(), settings.system_tokens, b"%d" % n, size) for n in range(settings.systems)]
    talks: list[list[Row]] = []
    for at_s in poisson(rng, settings.rate, settings.seconds):
        talk = f"{name}-{seed}-{len(talks)}"
        session = talk if rng.random() < settings.named_share else ""
        prompt = rng.choice(systems)
        rows: list[Row] = []
        for turn in range(rng.randint(*settings.turns)):
            prompt = grown(prompt, rng.randint(*settings.question_tokens), talk.encode(), size)
            output = rng.randint(*settings.answer_tokens)
            said = grown(prompt, output, b"answer", size)
            rows.append(
                Row(
                    at_s=rng.uniform(*settings.think_s) if turn else at_s,
                    after=-1,
                    prompt_tokens=prompt.tokens,
                    output_tokens=output,
                    blocks=prompt.blocks,
                    answer_blocks=said.blocks[len(prompt.blocks) :],
                    session=session,
                    turn=turn_id(talk, turn),
                    follows=turn_id(talk, turn - 1) if turn else b"",
                    max_tokens=settings.answer_tokens[1],
                )
            )
            prompt = said
        talks.append(rows)
    return Trace(name, size, interleaved(talks))


def agents(settings: MultiTurn, seed: int) -> Trace:
    """Return agents that call tools: long prompts grow by a result a turn, answers are short; 86 % could be cached.

    Engines of 6,400 tokens of KV cache have room for two or three of them at a time.
    """
    return multi_turn(settings, seed, "agents")


def mixed_lengths(settings: MixedLengths, seed: int) -> Trace:
    """Return prompts from a line to a book that share nothing: what counts is where the work lies."""
    rng = seeded("mixed_lengths", seed)
    rows: list[Row] = []
    for at_s in poisson(rng, settings.rate, settings.seconds):
        tokens = _log_normal(rng, settings.prompt_median, settings.prompt_sigma, settings.prompt_tokens)
        output = _log_normal(rng, settings.answer_median, settings.answer_sigma, settings.answer_tokens)
        key = f"mixed_lengths-{seed}-{len(rows)}"
        rows.append(_single(key, at_s, grown(Prompt(), tokens, key.encode(), settings.block_tokens), output, settings))
    return Trace("mixed_lengths", settings.block_tokens, rows)


def long_answers(settings: LongAnswers, seed: int) -> Trace:
    """Return long answers, nearly all behind one prefix: who follows the cache alone drowns one engine."""
    rng = seeded("long_answers", seed)
    size = settings.block_tokens
    hot = grown(Prompt(), settings.prefix_tokens, b"hot", size)
    rows: list[Row] = []
    for at_s in poisson(rng, settings.rate, settings.seconds):
        key = f"long_answers-{seed}-{len(rows)}"
        is_hot = rng.random() < settings.hot_share
        lead = hot if is_hot else grown(Prompt(), settings.prefix_tokens, key.encode(), size)
        prompt = grown(lead, rng.randint(*settings.question_tokens), key.encode(), size)
        rows.append(_single(key, at_s, prompt, rng.randint(*settings.answer_tokens), settings))
    return Trace("long_answers", size, rows)


class Workload(msgspec.Struct, frozen=True):
    """A generator and the settings it is meant for.

    Attributes:
        settings: the defaults; `msgspec.structs.replace` gives others.
        generate: takes such settings and a seed.
    """

    settings: Open
    generate: Callable[[Any, int], Trace]


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "shared_prefixes": Workload(SharedPrefixes(), shared_prefixes),
        "multi_turn": Workload(MultiTurn(), multi_turn),
        "agents": Workload(
            MultiTurn(
                rate=13.0,
                answer_tokens=(8, 40),
                block_tokens=16,
                systems=6,
                system_tokens=1050,
                question_tokens=(60, 500),
                think_s=(0.5, 4.0),
            ),
            agents,
        ),
        "hot_prefix": Workload(
            SharedPrefixes(rate=60.0, groups=64, prefix_tokens=2400, question_tokens=(400, 1000), zipf=1.75), hot_prefix
        ),
        "mixed_lengths": Workload(MixedLengths(), mixed_lengths),
        "bursts": Workload(Bursts(), bursts),
        "long_answers": Workload(LongAnswers(), long_answers),
    }
)
"""Every generated workload by its name."""


def generated(name: str, seed: int, **changes: object) -> Trace:
    """Return a workload by name.

    Args:
        name: key of `WORKLOADS`.
        seed: equal seeds give equal traces.
        changes: settings that differ from the workload's defaults.

    Raises:
        TraceError: there is no such workload, or it has no such setting.
    """
    workload = WORKLOADS.get(name)
    if workload is None:
        raise TraceError(f"there is no workload {name!r}; {_nearest(name, WORKLOADS)}")
    known = workload.settings.__struct_fields__
    if unknown := next((key for key in changes if key not in known), None):
        raise TraceError(f"workload {name} has no setting {unknown!r}; {_nearest(unknown, known)}")
    return workload.generate(msgspec.structs.replace(workload.settings, **changes), seed)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"


def _behind_prefixes(name: str, settings: SharedPrefixes, times: Iterable[float], rng: random.Random) -> Trace:
    size = settings.block_tokens
    prefixes = [grown(Prompt(), settings.prefix_tokens, b"%d" % n, size) for n in range(settings.groups)]
    weights = list(accumulate(1 / n**settings.zipf for n in range(1, settings.groups + 1)))
    rows: list[Row] = []
    run = rng.random()
    for at_s in times:
        key = f"{name}-{run}-{len(rows)}"
        (prefix,) = rng.choices(prefixes, cum_weights=weights)
        prompt = grown(prefix, rng.randint(*settings.question_tokens), key.encode(), size)
        rows.append(_single(key, at_s, prompt, rng.randint(*settings.answer_tokens), settings))
    return Trace(name, size, rows)


def _single(key: str, at_s: float, prompt: Prompt, output: int, settings: Open) -> Row:
    return Row(
        at_s=at_s,
        after=-1,
        prompt_tokens=prompt.tokens,
        output_tokens=output,
        blocks=prompt.blocks,
        turn=turn_id(key, 0),
        max_tokens=settings.answer_tokens[1],
    )


def _log_normal(rng: random.Random, median: float, sigma: float, bounds: Span) -> int:
    return min(max(round(rng.lognormvariate(math.log(median), sigma)), bounds[0]), bounds[1])
