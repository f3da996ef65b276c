"""The command `warmpath bench`: a trace through the real stack, under several policies: Envoy, sidecar, store, engines.

What `warmpath replay` decides and simulates in one process on a virtual clock happens here over sockets and in real
time, on the same rows, engines and weights; so the two can be held against each other.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from extproc.replay import asked, printed, told
from extproc.replay.arguments import REAL_POLICIES, WORKLOAD_ENGINES
from extproc.replay.arrivals import expected
from extproc.replay.compare import Compared
from extproc.replay.rows import Trace
from extproc.replay.sending import LATE_MS, Lag, Sent, send
from extproc.replay.told import Told
from extproc.sim import counters, report
from extproc.sim.display import Bar
from extproc.sim.load import LoadSettings, Outcome
from extproc.sim.report import Summary, Tpot, Ttft
from extproc.sim.settings import EngineSettings
from extproc.stack import Stack, StackSettings, free_address

_MODEL = "sim"
_POOL = "engines"
_TIMEOUT_S = 120.0

_LOG_S = 0.5
"""After the last answer, until the sidecar has heard of it from Envoy's access log (flushed every 0.1 s)."""


class Benched(msgspec.Struct, frozen=True):
    """One policy on one trace, as its clients saw it. Names and units are those of `summary.Replayed`.

    Attributes:
        requests: rows of the trace.
        errors: rows that were not answered as they should be.
        failures: the same by `client.Failure`; kinds that did not occur are absent.
        cached_share: prompt tokens found cached, by all prompt tokens of answered rows; the engines' own report.
        predicted_cached_share: the same as the decisions expected it; what they got wrong in either direction may
            cancel out. None when nothing was predicted.
        ttft_ms: times to the first token of streams.
        tpot_ms: times per output token after the first.
        whole_ms: mean time to the last token.
        busy_imbalance: tokens that the busiest engine prefilled, by the mean of all. A replay counts busy time.
        seconds: from the first arrival to the last token.
        output_tokens_per_s: generated tokens by `seconds`.
        moved_sessions: times a session left the endpoint that it was pinned to.
        cached_error: as the sidecar's metrics tell it, see `told.Told`.
        ttft_error: the same.
        lag_ms: how late requests were sent.
        late: the sender was too late for these figures to be believed.
        busy_share: None; engines do not report it.
        precise_share: None; the answers do not tell it.
        regret_ms: None; only a replay sees what another engine would have done.
    """

    requests: int
    errors: int
    failures: Mapping[str, int]
    cached_share: float
    predicted_cached_share: float | None
    ttft_ms: Ttft
    tpot_ms: Tpot
    whole_ms: float | None
    busy_imbalance: float
    seconds: float
    output_tokens_per_s: float
    moved_sessions: int
    cached_error: float | None
    ttft_error: float | None
    lag_ms: Lag
    late: bool
    busy_share: None = None
    precise_share: None = None
    regret_ms: None = None


Watch = Callable[[str], AbstractContextManager[Callable[[Outcome], None]]]
"""Follows one policy's run, given its name: what it yields is called with every outcome."""


def _unwatched(_policy: str) -> AbstractContextManager[Callable[[Outcome], None]]:
    return nullcontext(lambda _outcome: None)


async def run(arguments: argparse.Namespace) -> int:
    """Run the comparison; returns 0 only when no request failed and none of the figures is in doubt.

    Raises:
        ConfigError: an argument or the configuration cannot be used.
        TraceError: the trace cannot be read.
        StackError: a part of the stack did not come up.
    """
    wanted = asked.compared(arguments, REAL_POLICIES)
    trace, factor = asked.trace_at_pace(arguments, wanted, wanted.engines / WORKLOAD_ENGINES)
    console = Console(stderr=True)
    if not arguments.json:
        console.print(printed.introduction(trace, wanted), highlight=False)

    @contextmanager
    def watch(policy: str) -> Iterator[Callable[[Outcome], None]]:
        with Bar(console, policy, trace.requests) as bar:
            yield bar.note

    results = await bench(trace, wanted, _unwatched if arguments.json else watch)
    text = printed.to_json(trace, factor, results)
    if arguments.output:
        printed.save(arguments.output, text)
    sys.stdout.write(text if arguments.json else table(results))
    sys.stderr.write("".join(f"warmpath: {line}\n" for line in doubts(results)))
    return 0 if not any(result.errors or result.late for result in results.values()) else 1


async def bench(trace: Trace, wanted: Compared, watch: Watch = _unwatched) -> Mapping[str, Benched]:
    """Send a trace through a stack of its own for each policy, one after the other.

    Args:
        trace: the rows; those with `after` wait for the real answer.
        wanted: policies, engines and weights; `regret` is not read.
        watch: follows the runs.

    Raises:
        StackError: a part of the stack did not come up, or its metrics cannot be read.
        EngineError: an engine's metrics cannot be read.
    """
    results = {}
    with tempfile.TemporaryDirectory(prefix="warmpath-bench-") as folder:
        for policy in wanted.policies:
            async with Stack(stack_of(Path(folder), policy, wanted), _unheard) as stack:
                with watch(policy) as note:
                    before = await counters.read_prefilled(stack.engines)
                    sent = await send(stack.url, trace, _load(trace), note)
                    after = await counters.read_prefilled(stack.engines)
                await asyncio.sleep(_LOG_S)
                heard = await told.ask(stack.metrics_url)
                results[policy] = summarize(sent, report.summarize(sent.run, counters.since(before, after)), heard)
    return results


def stack_of(folder: Path, policy: str, wanted: Compared) -> StackSettings:
    """Write the configuration of one policy's stack, on free ports, and return what the stack consists of.

    As in a replay, the sidecar is told nothing of the engines' speed and cache: it learns them. The KV blocks are
    those of `warmpath sim`, 16 tokens each, as real engines have them.
    """
    listen, admin, page = free_address(), free_address(), free_address()
    config = {
        "models": {_MODEL: {"pool": _POOL}},
        "pools": {_POOL: {"endpoints": ["127.0.0.1:1"]}},
        "gateway": {
            "listen": listen,
            "admin": admin,
            "concurrency": 1,
            "sidecar": {"workers": 1, "admin": page, "drain_s": 5},
        },
        "routing": {**msgspec.to_builtins(wanted.routing), "policy": policy},
    }
    path = folder / f"{policy}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    blocks = wanted.kv_tokens // EngineSettings().block_size + 1
    return StackSettings(path=path, engines=wanted.engines, engine_arguments=("--blocks", str(blocks)), quiet=True)


def summarize(sent: Sent, summary: Summary, heard: Told) -> Benched:
    """Sum up what was sent under one policy.

    Args:
        sent: the outcomes.
        summary: what `warmpath demo` shows of them.
        heard: what the sidecar says.
    """
    answered = [one for one in sent.run.outcomes if one.failure is None]
    prompt_tokens = sum(one.prompt_tokens for one in answered)
    predicted = heard.predicted_cached_tokens
    seconds, lag = summary.seconds, sent.lag
    return Benched(
        requests=summary.requests,
        errors=summary.errors,
        failures=summary.failures,
        cached_share=summary.cached_share,
        predicted_cached_share=predicted / prompt_tokens if predicted is not None and prompt_tokens else None,
        ttft_ms=summary.ttft_ms,
        tpot_ms=summary.tpot_ms,
        whole_ms=1000.0 * sum(one.end_s - one.sent_s for one in answered) / len(answered) if answered else None,
        busy_imbalance=summary.busy_imbalance,
        seconds=seconds,
        output_tokens_per_s=sum(one.output_tokens for one in answered) / seconds if seconds > 0 else 0.0,
        moved_sessions=heard.moved_sessions,
        cached_error=heard.cached_error,
        ttft_error=heard.ttft_error,
        lag_ms=lag,
        late=lag.late,
    )


def table(results: Mapping[str, Benched]) -> str:
    """Return the policies side by side, one line each."""
    return printed.table(results, _COLUMNS)


def doubts(results: Mapping[str, Benched]) -> Sequence[str]:
    """Return what speaks against believing the figures, one line for each policy concerned, for people."""
    return [
        f"{name}: the sender was late, 1 % of the requests by {result.lag_ms.p99:,.0f} ms or more (bound {LATE_MS:.0f})"
        "; these figures tell of this machine, so lower --speed, --busy or --engines"
        for name, result in results.items()
        if result.late
    ]


_COLUMNS: Sequence[printed.Column[Benched]] = (
    ("cached", lambda one: one.cached_share, printed.percent),
    ("predicted", lambda one: one.predicted_cached_share, printed.percent),
    ("TTFT mean", lambda one: one.ttft_ms.mean, printed.ms),
    ("p50", lambda one: one.ttft_ms.p50, printed.ms),
    ("p90", lambda one: one.ttft_ms.p90, printed.ms),
    ("p99 ms", lambda one: one.ttft_ms.p99, printed.ms),
    ("TPOT p50", lambda one: one.tpot_ms.p50, "{:.1f}".format),
    ("p99 ms", lambda one: one.tpot_ms.p99, "{:.1f}".format),
    ("whole ms", lambda one: one.whole_ms, printed.ms),
    ("busiest/mean", lambda one: one.busy_imbalance, "{:.2f}".format),
    ("out tok/s", lambda one: one.output_tokens_per_s, printed.ms),
    ("moved", lambda one: one.moved_sessions, "{:,}".format),
    ("cached err", lambda one: one.cached_error, printed.percent),
    ("TTFT err", lambda one: one.ttft_error, printed.percent),
    ("errors", lambda one: one.errors, "{:,}".format),
    ("lag p99 ms", lambda one: one.lag_ms.p99, "{:.1f}".format),
)


def _load(trace: Trace) -> LoadSettings:
    """No limit that a trace meets unless the engines fall ever further behind."""
    last_s = max(expected(trace.rows), default=0.0)
    return LoadSettings(model=_MODEL, timeout_s=_TIMEOUT_S, limit_s=2 * last_s + _TIMEOUT_S)


def _unheard(_name: str, _line: str) -> None:
    """The stack keeps the last lines of each part itself, and quotes them when one fails."""
