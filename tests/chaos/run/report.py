"""The figures of a run: as a page of text, and as JSON beside those of the benches."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from extproc.sim.report import percentile
from tests.bench.machine import load_average, machine, versions
from tests.bench.report import FOLDER, Row, summary, table
from tests.chaos.run import judge as judging
from tests.chaos.run.judge import FIRST_BYTE_S, LATE_S, NOTICED_S, WAKE_S, Happened, Kept, Seen, Sent, Verdict

KEPT_SHARE = 0.95
_ENGINE = "engine"
_SHOWN = 10


class Ledger(msgspec.Struct, frozen=True):
    """What the store had in flight once the load had ended.

    Attributes:
        running: sequences.
        output_tokens: output tokens expected of them.
        zero_after_s: seconds from the end of the load until both were 0; None when they never were.
    """

    running: int
    output_tokens: float
    zero_after_s: float | None


class Asked(msgspec.Struct, frozen=True):
    """How a run was made."""

    seed: int
    seconds: float
    rate: float
    store: str
    clock: bool


class Run(msgspec.Struct, frozen=True):
    """Everything that was seen of a run.

    Attributes:
        asked: how it was made.
        sent: its requests, in the order they were sent.
        seen: what the Envoys said of each, by number.
        happened: its faults.
        missed: faults whose part was not running.
        ledger: what was left in flight.
        load_before: load average of the machine before.
    """

    asked: Asked
    sent: Sequence[Sent]
    seen: Mapping[int, Seen]
    happened: Sequence[Happened]
    missed: int
    ledger: Ledger
    load_before: Sequence[float]

    @property
    def engine_faults(self) -> list[Happened]:
        """Those that hit an engine."""
        return [one for one in self.happened if one.part == _ENGINE]

    def log_of(self, sent: Sent) -> Seen:
        """What Envoy said of a request."""
        return self.seen.get(sent.number, Seen())

    def stood(self, sent: Sent) -> float | None:
        """See `judge.stood`."""
        return judging.stood(sent, self.log_of(sent), self.engine_faults)


class Result(msgspec.Struct, frozen=True):
    """A run that was judged.

    Attributes:
        verdicts: number of requests by verdict.
        cut_unseen: cut requests of which no byte of the body had come.
        kept: how sessions were kept.
        alone: requests that Envoy sent without the sidecar's pick.
        retried: requests that took more than one try.
        late_elsewhere: late requests whose engine did not stand still while they waited.
        stood: requests that were sent to an engine that stood still.
        stood_noticed: those of them sent when it had done so for `NOTICED_S`.
        criteria: what was demanded, and whether it held.
    """

    verdicts: Mapping[str, int]
    cut_unseen: int
    kept: Kept
    alone: int
    retried: int
    late_elsewhere: int
    stood: int
    stood_noticed: int
    criteria: Mapping[str, bool]

    @property
    def good(self) -> bool:
        """Whether everything held."""
        return all(self.criteria.values())


def judge(run: Run) -> tuple[Result, dict[Verdict, list[Sent]]]:
    """Judge a run; also its requests by verdict."""
    sorted_out: dict[Verdict, list[Sent]] = {one: [] for one in Verdict}
    for sent in run.sent:
        sorted_out[judging.verdict(sent, run.log_of(sent), run.engine_faults)].append(sent)
    stood = [at for one in run.sent if (at := run.stood(one)) is not None]
    sessions = judging.kept(run.sent, run.seen, run.engine_faults)
    failed, ledger = sorted_out[Verdict.FAILED], run.ledger
    result = Result(
        verdicts={str(one): len(requests) for one, requests in sorted_out.items()},
        cut_unseen=sum(one.first_byte_s is None for one in sorted_out[Verdict.CUT]),
        kept=sessions,
        alone=sum(not run.log_of(one).picked for one in run.sent),
        retried=sum(run.log_of(one).attempts > 1 for one in run.sent),
        late_elsewhere=sum(run.stood(one) is None for one in sorted_out[Verdict.LATE]),
        stood=sum(at >= 0 for at in stood),
        stood_noticed=sum(at >= NOTICED_S for at in stood),
        criteria={
            f"no request failed: {len(failed)} did": not failed,
            f"ledger exactly 0: {ledger.running} running, {ledger.output_tokens:g} output tokens": (
                ledger.running == 0 and ledger.output_tokens == 0
            ),
            f"sessions kept >= {KEPT_SHARE:.0%}: {sessions.share:.2%}": sessions.share >= KEPT_SHARE,
        },
    )
    return result, sorted_out


def rows(run: Run) -> list[Row]:
    """One row for the whole run and one for each kind of fault, of the requests under way during it."""
    made: list[Row] = [_row("whole run", 0, run.sent, run)]
    kinds = Counter(f"{one.kind} {one.part}" for one in run.happened)
    for name, count in sorted(kinds.items()):
        faults = [one for one in run.happened if f"{one.kind} {one.part}" == name]
        met = {one.number: one for fault in faults for one in judging.during(run.sent, fault)}
        made.append(_row(name, count, list(met.values()), run))
    return made


def _row(name: str, count: int, requests: Sequence[Sent], run: Run) -> Row:
    verdicts = Counter(judging.verdict(one, run.log_of(one), run.engine_faults) for one in requests)
    waits = sorted(1000 * one.wait_s for one in requests if one.failure is None)
    return {
        "during": name,
        "faults": count,
        "requests": len(requests),
        "failed": verdicts[Verdict.FAILED],
        "cut": verdicts[Verdict.CUT],
        "late": verdicts[Verdict.LATE],
        "p50 ms": round(percentile(waits, 0.5) or 0),
        "p90 ms": round(percentile(waits, 0.9) or 0),
        "p99 ms": round(percentile(waits, 0.99) or 0),
        "worst ms": round(percentile(waits, 1.0) or 0),
    }


def notes(run: Run, result: Result) -> list[str]:
    """What a reader must know to judge the figures."""
    sessions, ledger = result.kept, run.ledger
    zero = "never" if ledger.zero_after_s is None else f"{ledger.zero_after_s:.1f} s after the load"
    return [
        f"ms: from sending to the first byte of the body, of whole answers; its deadline is {FIRST_BYTE_S:.0f} s",
        f"failed: any other answer than a whole 200; late: answered, but first byte after more than {LATE_S:.0f} s, "
        f"{result.late_elsewhere} of them although their engine had not stood still",
        f"cut ({result.cut_unseen} before a byte of the body): the engine was killed when the 200 was already out",
        f"{result.stood} requests went to an engine that stood still, {result.stood_noticed} of them when it had "
        f"done so for {NOTICED_S:.0f} s or more",
        f"{result.alone} requests went on without the sidecar's pick, {result.retried} took more than one try",
        f"sessions: {sessions.kept:,} of {sessions.turns:,} turns kept their engine; {sessions.left_out:,} left out: "
        f"theirs had been killed or stopped in between or up to {WAKE_S:.0f} s before; {sessions.alone} of the others "
        f"were Envoy's own picks, or came after one",
        f"ledger at 0: {zero}; charges of a killed worker last as long as its lease",
        f"{run.missed} faults found their part not back from an earlier one",
        *([] if run.asked.clock else ["no libfaketime could be had: no clock was misled"]),
    ]


def text(run: Run, result: Result, by_verdict: Mapping[Verdict, Sequence[Sent]]) -> str:
    """The whole report for people."""
    asked = run.asked
    lines = [
        f"== chaos: seed {asked.seed}, {asked.seconds:.0f} s, {asked.rate:g} requests/s, store: {asked.store}",
        summary(machine()),
        "",
        *table(rows(run)),
        "",
        *(f"{'held' if held else 'BROKEN':>6}  {what}" for what, held in result.criteria.items()),
        *(f"        {note}" for note in notes(run, result)),
        *_described("failed", by_verdict[Verdict.FAILED], run),
        *_described("late", [one for one in by_verdict[Verdict.LATE] if run.stood(one) is None], run),
        *_described("worst", sorted(run.sent, key=lambda one: -one.wait_s)[:3], run),
    ]
    return "\n".join(lines) + "\n"


def _described(what: str, requests: Sequence[Sent], run: Run) -> list[str]:
    began = run.sent[0].sent_s if run.sent else 0.0
    lines = []
    for one in requests[:_SHOWN]:
        seen = run.log_of(one)
        near = [f"{f.kind} {f.name}" for f in run.happened if f.from_s <= one.end_s and f.until_s >= one.sent_s]
        lines.append(
            f"{what}: #{one.number} at {one.sent_s - began:.2f} s, {one.end_s - one.sent_s:.2f} s, envoy {one.envoy}, "
            f"session {one.session}/{one.turn}, stream {one.stream}, status {one.status}, {one.failure or 'answered'}, "
            f"served {seen.served or '-'}, picked {seen.picked or '-'}, tries {seen.attempts}, {seen.flags or '-'}, "
            f"{seen.details or '-'}; during: {', '.join(near) or 'nothing'}"
        )
    return lines


def write(run: Run, result: Result) -> Path:
    """Write `bench-results/chaos.json` and return its path."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / "chaos.json"
    document = {
        "bench": "chaos",
        "machine": msgspec.to_builtins(machine()),
        "versions": versions(),
        "load_before": list(run.load_before),
        "load_after": list(load_average()),
        "asked": msgspec.to_builtins(run.asked),
        "result": msgspec.to_builtins(result),
        "kept_share": result.kept.share,
        "good": result.good,
        "ledger": msgspec.to_builtins(run.ledger),
        "rows": [dict(row) for row in rows(run)],
        "notes": notes(run, result),
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path
