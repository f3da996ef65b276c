"""CPU of one decision in this process, gRPC left out: body in, serialised reply to Envoy out."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import msgspec

from extproc.choose import chooser
from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.choose.policies import Ask
from extproc.config import Config
from extproc.config import Model as ModelSettings
from extproc.config import Pool as PoolSettings
from extproc.deciding import Outcome, weights_of
from extproc.envoy import replies
from extproc.envoy.contract import Call, Decision
from extproc.request.blocks import chain
from extproc.request.shapes import parse
from extproc.router import Router, Surroundings
from extproc.state import feed
from extproc.state.feed import Delta, Held
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from tests.bench.prompts import MODEL, PATH, Prompts
from tests.bench.report import Check, Findings, Scale, middle

KIB = 1024
_BYTES_PER_TOKEN = 4  # nominal, as the worker has it
_BLOCK_BYTES = 64 * _BYTES_PER_TOKEN
_HEADERS = {
    "user-agent": "openai-python/2.0",
    "content-type": "application/json",
    "x-request-id": "5b0c6e1e-3d0a-4d62-9d2c-000000000000",
    "x-session-id": "",
}

# Every request begins a session, as no prompt continues another one.
_sessions = itertools.count()


class _CpuClock:
    """Counts CPU time of this process instead of time, so that the router's own stages are in CPU seconds."""

    def monotonic(self) -> float:
        return time.process_time()

    def wall(self) -> float:
        return time.time()


class Ear:
    """Hears what a router tells, and keeps the last outcome. Deltas are dropped: their sending is batched."""

    outcome: Outcome

    def publish(self, pool: str, delta: Delta) -> None:
        """See `router.Publisher`."""

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""
        self.outcome = outcome

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""


class Case(msgspec.Struct, frozen=True):
    """One size of body in a pool of a size.

    Attributes:
        size: bytes of the body.
        endpoints: endpoints of the pool.
        rounds: rounds of `calls` decisions; the figures are medians of the rounds.
        calls: decisions in a round.
    """

    size: int
    endpoints: int
    rounds: int
    calls: int


class Rig:
    """A router over a pool whose profiles are full, with everything it touches at hand."""

    def __init__(self, endpoints: int, kv_tokens: int) -> None:
        config = Config(models={MODEL: ModelSettings(pool="main")}, pools={"main": PoolSettings(endpoints=["x:1"])})
        members = tuple(
            Endpoint(f"10.0.{at // 250}.{at % 250}:8000", f"10.0.{at // 250}.{at % 250}:8000", 8000.0, running=at % 7)
            for at in range(endpoints)
        )
        self.clock = _CpuClock()
        self.pool = Pool("main", "predicted_ttft", members)
        self.config = config
        self.store = MemoryStore(self.clock)
        self.ear = Ear()
        self.known = PoolKnowledge(Priors(block_bytes=_BLOCK_BYTES, kv_tokens=kv_tokens))
        numbers = itertools.count()
        around = Surroundings(
            config=config,
            fleet=Fleet({"main": self.pool}, {MODEL: "main"}, "main"),
            knowledge={"main": self.known},
            store=self.store,
            replica="0123456789abcdef",
            new_charge_id=lambda: f"0123456789abcdef-{next(numbers):x}",
        )
        self.router = Router(around, self.ear, self.ear, self.clock)

    def fill(self, entries: int) -> None:
        """Fill the profiles with `entries` blocks of other prompts, spread over the endpoints."""
        each = max(1, entries // len(self.pool.endpoints))
        for at, endpoint in enumerate(self.pool.endpoints):
            blocks = range(1 + at * each, 1 + (at + 1) * each)
            self.known.apply(Held(endpoint.id, feed.pack(blocks)))

    async def decide(self, call: Call) -> Decision:
        """Decide and serialise the reply, as the stream does."""
        decision = await self.router.decide(call)
        replies.on_body(decision)
        return decision


def bench(scale: Scale) -> Findings:
    """Every size of body, every size of pool, and the parts of a decision."""
    rounds = scale.pick(9, 3)
    sizes = [
        (KIB, scale.pick(200, 50)),
        (8 * KIB, scale.pick(200, 50)),
        (64 * KIB, scale.pick(60, 15)),
        (512 * KIB, 8),
        (5 * KIB * KIB, 2),
    ]
    pools = (1, 64, 1000)
    cases = [Case(size, endpoints, rounds, calls) for endpoints in pools for size, calls in sizes]
    findings = Findings("CPU of one decision in µs: parse, hash, match, price, reserve in memory, serialise the reply")
    measured = [measure(case) for case in cases]
    findings.rows += measured
    _check(findings, {(int(row["body_kib"]), int(row["endpoints"])): row for row in measured})
    findings.notes.append(
        "whole = local + store + the rest (profile, record, reply); medians of rounds, 64-token blocks"
    )
    findings.notes.append(
        "every request begins a session, which is pinned; a sixteenth of all others share its prompt's first half"
    )
    findings.notes.append("prompt = parse + hash, measured by themselves on the same bodies")
    return findings


def measure(case: Case) -> dict[str, float | int]:
    """One row: the whole decision, the router's own stages, and the parts by themselves."""
    # Engines that can hold such a prompt: four of them at the least.
    kv_tokens = max(400_000, 4 * case.size // _BYTES_PER_TOKEN)
    rig = Rig(case.endpoints, kv_tokens)
    rig.fill(400_000)
    prompts = Prompts(case.size)
    wholes, locals_, stores = [], [], []
    for at in range(case.rounds + 1):
        calls = [_call(prompts) for _ in range(case.calls)]
        whole, local, in_store = asyncio.run(_round(rig, calls))
        if at:  # the first round warms up
            wholes.append(whole)
            locals_.append(local)
            stores.append(in_store)
    parts = _parts(rig, [_call(prompts) for _ in range(min(case.calls, 50))], case.rounds)
    return {
        "body_kib": case.size // KIB,
        "endpoints": case.endpoints,
        "whole_us": middle(wholes),
        "least_us": min(wholes),
        "local_us": middle(locals_),
        "store_us": middle(stores),
        **parts,
    }


async def _round(rig: Rig, calls: Sequence[Call]) -> tuple[float, float, float]:
    whole = local = in_store = 0.0
    now = time.process_time
    for call in calls:
        began = now()
        decision = await rig.decide(call)
        whole += now() - began
        local += rig.ear.outcome.local_s
        in_store += rig.ear.outcome.store_s
        await rig.router.settle(decision)
    scale = 1e6 / len(calls)
    return whole * scale, local * scale, in_store * scale


def _parts(rig: Rig, calls: Sequence[Call], rounds: int) -> dict[str, float]:
    requests = [parse(call.path, call.headers, call.body) for call in calls]
    chains = [chain(request.segments, request.salt, _BLOCK_BYTES) for request in requests]
    matches = [rig.known.matched_tokens(blocks) for blocks in chains]
    weights = weights_of(rig.config)
    asks = [
        Ask(request.prompt_bytes / _BYTES_PER_TOKEN, matched, blocks[0] if blocks else 0)
        for request, matched, blocks in zip(requests, matches, chains, strict=True)
    ]
    return {
        "parse_us": _each(lambda at: parse(calls[at].path, calls[at].headers, calls[at].body), len(calls), rounds),
        "hash_us": _each(lambda at: chain(requests[at].segments, b"", _BLOCK_BYTES), len(calls), rounds),
        "match_us": _each(lambda at: rig.known.matched_tokens(chains[at]), len(calls), rounds),
        "plan_us": _each(lambda at: chooser.plan(asks[at], rig.pool, weights), len(calls), rounds),
    }


def _each(work: Callable[[int], object], calls: int, rounds: int) -> float:
    """Median over rounds of the CPU time of one call, in microseconds."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        for at in range(calls):
            work(at)
        times.append(1e6 * (time.process_time() - began) / calls)
    return middle(times)


def _call(prompts: Prompts) -> Call:
    body = prompts.next()
    return Call("POST", PATH, {**_HEADERS, "x-session-id": f"s-{next(_sessions)}"}, body)


def _check(findings: Findings, rows: dict[tuple[int, int], dict[str, float | int]]) -> None:
    def prompt(size: int) -> float:
        row = rows[size, 64]
        return (row["parse_us"] + row["hash_us"]) / 1000

    findings.checks += [
        Check("decision, 8 KB, 64 endpoints", rows[8, 64]["whole_us"], 250, "µs"),
        Check("prompt of 512 KB, parse and hash", prompt(512), 3, "ms"),
        Check("prompt of 5 MB, parse and hash", prompt(5120), 25, "ms"),
        Check("decision, 8 KB, 1,000 endpoints", rows[8, 1000]["whole_us"] / 1000, 2, "ms"),
    ]
