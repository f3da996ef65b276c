"""What the arguments of `warmpath replay` and `warmpath bench` name: a trace at its pace, policies, weights."""

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from extproc import reload
from extproc.config import Routing
from extproc.errors import ConfigError, TraceError
from extproc.replay.arrivals import lasts_s, paced
from extproc.replay.compare import Compared, at_load, engine_of
from extproc.replay.generate import WORKLOADS, generated
from extproc.replay.lines import LONGEST_S
from extproc.replay.rows import Trace
from extproc.replay.traces import load

_MOST_BLOCKS = 1 << 24
"""KV blocks of all engines of a replay together; an empty one takes about 140 bytes, so 2.3 GB at most."""


def compared(arguments: argparse.Namespace, known: Sequence[str]) -> Compared:
    """Return what is to be compared.

    Args:
        arguments: as `arguments` declares them.
        known: the policies there are.

    Raises:
        ConfigError: an argument or the configuration cannot be used.
    """
    if arguments.output and not arguments.output.parent.is_dir():
        raise ConfigError(f"--output {arguments.output}: cannot be written: there is no such folder")
    return Compared(
        policies=_policies(arguments.policies, known),
        engines=arguments.engines,
        kv_tokens=arguments.kv_tokens,
        routing=_routing(arguments),
    )


def trace_at_pace(arguments: argparse.Namespace, wanted: Compared, speed: float = 1.0) -> tuple[Trace, float]:
    """Return the trace, and the factor by which its arrivals were sped up.

    Args:
        arguments: as `arguments` declares them.
        wanted: the engines that are to be kept busy.
        speed: the factor for a generated workload, unless the arguments set a pace; other traces keep their own.

    Raises:
        TraceError: the trace cannot be read.
        ConfigError: no pace keeps the engines so busy, the pace is so slow that the trace lasts more than ten years, or
            the engines' caches are too small or too large for the trace.
    """
    trace = _trace(arguments)
    _check_size(trace, wanted)
    if arguments.busy is not None:
        return at_load(trace, arguments.busy, wanted)
    factor = arguments.speed or (speed if _is_generated(arguments) else 1.0)
    slowest = lasts_s(trace) / LONGEST_S
    if factor < slowest:
        raise ConfigError(
            f"--speed {factor:g}: {trace.name} would last more than 10 years; write {1.1 * slowest:.2g} or more"
        )
    return (trace if factor == 1.0 else paced(trace, factor, think=False)), factor


def _check_size(trace: Trace, wanted: Compared) -> None:
    blocks = engine_of(trace, wanted.kv_tokens).blocks
    if blocks * wanted.engines > _MOST_BLOCKS:
        raise ConfigError(
            f"--kv-tokens {wanted.kv_tokens}, --engines {wanted.engines}: the caches come to "
            f"{blocks * wanted.engines:,} blocks, {_MOST_BLOCKS:,} are the most; write fewer tokens or fewer engines"
        )


def _policies(text: str, known: Sequence[str]) -> Sequence[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--policies: there is no `{name}`; {_nearest(name, known)}write some of {', '.join(known)}"
            )
    if not names:
        raise ConfigError(f"--policies is empty; write some of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _routing(arguments: argparse.Namespace) -> Routing:
    if arguments.config is None:
        if arguments.set:
            raise ConfigError("--set lays a setting over a file: name it with --config")
        return Routing()
    return reload.read(arguments.config, arguments.set).routing


def _is_generated(arguments: argparse.Namespace) -> bool:
    return arguments.trace in WORKLOADS and not Path(arguments.trace).exists()


def _trace(arguments: argparse.Namespace) -> Trace:
    if _is_generated(arguments):
        trace = generated(arguments.trace, arguments.seed)
        limit = arguments.limit or len(trace.rows)
        return Trace(trace.name, trace.block_tokens, trace.rows[:limit])
    if not Path(arguments.trace).exists():
        raise TraceError(
            f"{arguments.trace}: there is no such file or folder, and no such workload; "
            f"{_nearest(arguments.trace, WORKLOADS)}name a trace file, or one of {', '.join(WORKLOADS)}"
        )
    return load(arguments.trace, limit=arguments.limit, seed=arguments.seed)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"did you mean `{close[0]}`? Else " if close else ""
