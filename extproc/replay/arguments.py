"""What `warmpath replay` and `warmpath bench` can be told; apart from what they do, which takes a while to import."""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from extproc.config import PolicyName

ORACLE = "oracle"
"""Name of the policy that only a replay can have."""
REAL_POLICIES: tuple[str, ...] = get_args(PolicyName)
"""Policies that decide without knowing more than a sidecar can."""
POLICIES = (*REAL_POLICIES, ORACLE)
GENERATED = ("shared_prefixes", "multi_turn", "agents", "hot_prefix", "mixed_lengths", "bursts", "long_answers")
"""Names of the generated workloads."""
Profiles = Literal["estimated", "precise"]
"""Kinds of profiles."""
PROFILES: tuple[Profiles, ...] = get_args(Profiles)
KV_TOKENS = 98_304
"""KV cache of an engine unless said otherwise."""
BENCHED = ("round_robin", "least_tokens", "predicted_ttft")
"""Policies that `warmpath bench` compares unless told otherwise: each of them takes as long as the trace."""
BENCH_ENGINES = 4
BENCH_ROWS = 400
WORKLOAD_ENGINES = 8
"""Engines that the generated workloads are meant for."""
_MOST_ENGINES = 1024
_MOST_KV_TOKENS = 1_000_000_000
_LONGEST_DELAY_MS = 600_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `warmpath replay`."""
    _add_common(parser, POLICIES, POLICIES, engines=WORKLOAD_ENGINES)
    parser.add_argument("--limit", type=_count, metavar="N", help="replay only the first N rows")
    _add_pace(parser, "1")
    parser.add_argument(
        "--profiles",
        type=_profiles,
        default=PROFILES[:1],
        metavar="A,B",
        help=f"kinds of profiles to compare, of {', '.join(PROFILES)} ({PROFILES[0]})",
    )
    parser.add_argument(
        "--event-delay-ms",
        type=_delay,
        default=0.0,
        metavar="MS",
        help="how late precise profiles hear what happens to caches (%(default)g)",
    )
    parser.add_argument("--curve", type=Path, metavar="PNG", help="draw the trade-off curve of policy `weighted` here")


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `warmpath bench`."""
    parser.epilog = (
        "Client, Envoy, sidecar, store and engines share this machine's cores, and every policy takes as long as the "
        "trace: two cores carry 4 engines and 30 requests a second. When requests went out late, the command "
        "says so and exits with 1: slow arrivals down with --speed or --busy. `warmpath replay` has no such bounds."
    )
    _add_common(parser, REAL_POLICIES, BENCHED, engines=BENCH_ENGINES)
    parser.add_argument(
        "--limit", type=_count, default=BENCH_ROWS, metavar="N", help="send only the first N rows (%(default)s)"
    )
    _add_pace(parser, f"1; for a generated workload the share that the engines are of {WORKLOAD_ENGINES}")


def _add_common(parser: argparse.ArgumentParser, known: Sequence[str], policies: Sequence[str], engines: int) -> None:
    parser.add_argument(
        "trace",
        help=f"a trace file (Mooncake rows, OpenAI request logs, ...) or a generated workload: {', '.join(GENERATED)}",
    )
    seeing = f"; `{ORACLE}` sees the engines' true caches and queues, and is greedy" if ORACLE in known else ""
    parser.add_argument(
        "--policies",
        default=",".join(policies),
        metavar="A,B,...",
        help=f"which to compare, of {', '.join(known)}{seeing} (%(default)s)",
    )
    parser.add_argument(
        "--engines",
        type=partial(_count, most=_MOST_ENGINES),
        default=engines,
        metavar="N",
        help="number of engines (%(default)s)",
    )
    parser.add_argument(
        "--kv-tokens",
        type=partial(_count, most=_MOST_KV_TOKENS),
        default=KV_TOKENS,
        metavar="N",
        help="KV cache of an engine (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of a generated workload (%(default)s)")
    parser.add_argument("--config", type=Path, metavar="FILE", help="take the section `routing` of this file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="lay a setting over the file; needs --config"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON object to this file too")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_pace(parser: argparse.ArgumentParser, default: str) -> None:
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--speed", type=_positive, metavar="X", help=f"speed arrivals up by this factor (default: {default})"
    )
    pace.add_argument(
        "--busy", type=_share, metavar="SHARE", help="arrivals at which round robin's engines are busy for this share"
    )


def _count(text: str, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1 or (most is not None and value > most):
        bounds = ", 1 or more" if most is None else f" from 1 to {most:,}"
        raise argparse.ArgumentTypeError(f"{text}: write a whole number{bounds}")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: write a number above 0, as 2 for twice the pace")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: write a share between 0 and 1, as 0.8")
    return value


def _profiles(text: str) -> Sequence[Profiles]:
    names = dict.fromkeys(name.strip() for name in text.split(","))
    if not set(names) <= set(PROFILES):
        raise argparse.ArgumentTypeError(f"{text}: write one or both of {', '.join(PROFILES)}")
    return [name for name in PROFILES if name in names]


def _delay(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= _LONGEST_DELAY_MS:
        raise argparse.ArgumentTypeError(f"{text}: write milliseconds from 0 to {_LONGEST_DELAY_MS:,}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
