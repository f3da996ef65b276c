"""Speed of `warmpath replay`: rows a second of CPU time, decisions of the product's own code included."""

import time

import pytest

from extproc.config import Routing
from extproc.replay.arguments import KV_TOKENS, ORACLE
from extproc.replay.compare import Compared, at_load, replay
from extproc.replay.generate import generated
from extproc.replay.rows import Trace
from extproc.replay.traces import MOONCAKE_BLOCK, load
from tests.bench.report import Check, Findings, Row, Scale, middle, spread
from tests.traces import trace_path

ENGINES = 8
DEFAULT = Routing().policy
_POLICIES = (DEFAULT, "weighted", "least_tokens", "session_hash", "round_robin", ORACLE)
_CONVERSATION = "mooncake/conversation_trace.jsonl"
_CONVERSATION_KV = 2400 * MOONCAKE_BLOCK
_BUDGET_PER_S = 3000


def bench(scale: Scale) -> Findings:
    """Every policy on conversations and on shared prefixes, with and without a look at the truth at each decision."""
    findings = Findings(
        f"rows replayed in a second of CPU time, {ENGINES} engines: arrival, decision, engines, access log, scrapes"
    )
    shared = generated("shared_prefixes", 1)
    findings.rows += _measured(shared, KV_TOKENS, scale)
    try:
        whole = load(trace_path(_CONVERSATION), limit=scale.pick(3000, 1000))
    except pytest.skip.Exception as missing:
        findings.notes.append(f"conversations are left out: {missing}")
    else:
        conversation, _ = at_load(whole, 0.8, Compared(policies=(), engines=ENGINES, kv_tokens=_CONVERSATION_KV))
        findings.rows += _measured(conversation, _CONVERSATION_KV, scale)
    findings.checks += [
        Check(f"{row['trace']}, {DEFAULT}, regret {row['regret']}", float(row["per_s"]), _BUDGET_PER_S, "rows/s", True)
        for row in findings.rows
        if row["policy"] == DEFAULT
    ]
    findings.notes.append("medians of rounds; regret on holds each decision against the outlook of every engine")
    return findings


def _measured(trace: Trace, kv_tokens: int, scale: Scale) -> list[Row]:
    rounds = scale.pick(5, 2)
    rows: list[Row] = []
    for policy in _POLICIES:
        for regret in (False, True):
            wanted = Compared(policies=(), engines=ENGINES, kv_tokens=kv_tokens, regret=regret)
            speeds = [_rows_per_s(trace, policy, wanted) for _ in range(rounds)]
            rows.append(
                {
                    "trace": trace.name.removesuffix(".jsonl"),
                    "policy": policy,
                    "regret": "on" if regret else "off",
                    "rows": trace.requests,
                    "per_s": round(middle(speeds)),
                    "us_a_row": 1e6 / middle(speeds),
                    "range": spread(speeds),
                }
            )
    return rows


def _rows_per_s(trace: Trace, policy: str, wanted: Compared) -> float:
    began = time.process_time()
    replay(trace, policy, wanted)
    return trace.requests / (time.process_time() - began)
