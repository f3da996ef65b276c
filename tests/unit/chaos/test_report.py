"""When a chaos run counts as good, and that its figures are those of its requests."""

from typing import Any

from extproc.sim.client import Failure
from tests.chaos.run import report
from tests.chaos.run.judge import Happened, Seen, Sent
from tests.chaos.run.plan import Kind
from tests.chaos.run.report import Asked, Ledger, Run

ONE, OTHER = "127.0.0.1:1", "127.0.0.1:2"


def sent(number: int, **fields: Any) -> Sent:
    """A turn of one session, answered within a second."""
    at = 10.0 * number
    plain: dict[str, Any] = {
        "number": number,
        "session": 0,
        "turn": number,
        "envoy": number % 2,
        "stream": True,
        "sent_s": at,
        "head_s": at + 0.1,
        "first_byte_s": at + 0.2,
        "end_s": at + 1.0,
        "status": 200,
        "failure": None,
    }
    return Sent(**{**plain, **fields})


def run(**fields: Any) -> Run:
    """A good run of twenty turns; `fields` replace its parts."""
    plain: dict[str, Any] = {
        "asked": Asked(1, 200.0, 0.1, "sentinel", clock=True),
        "sent": [sent(number) for number in range(20)],
        "seen": {number: Seen(served=ONE, picked=ONE, attempts=1) for number in range(20)},
        "happened": [],
        "missed": 0,
        "ledger": Ledger(0, 0.0, 1.0),
        "load_before": (0.0, 0.0, 0.0),
    }
    return Run(**{**plain, **fields})


def good(made: Run) -> bool:
    """Whether a run counts as good."""
    return report.judge(made)[0].good


def test_each_criterion_alone_decides() -> None:
    """A run is good with all of them, and not with any of them broken."""
    assert good(run())
    assert not good(run(sent=[sent(0, failure=Failure.BROKEN), *(sent(n) for n in range(1, 20))]))
    assert not good(run(ledger=Ledger(1, 0.0, None)))
    assert not good(run(ledger=Ledger(0, 0.5, None)))
    moved = {n: Seen(served=OTHER if n % 2 else ONE, attempts=1) for n in range(20)}
    assert not good(run(seen=moved))


def test_a_cut_answer_leaves_a_run_good() -> None:
    """Its engine was killed when the status was out: no healthy engine could have served it."""
    killed = Happened(Kind.KILL, "engine", ONE, 190.5, 193.0)
    cut = run(sent=[*(sent(n) for n in range(19)), sent(19, failure=Failure.BROKEN)], happened=[killed])
    assert good(cut)
    assert report.judge(cut)[0].verdicts["cut"] == 1


def test_each_kind_of_fault_has_a_row_of_the_requests_it_met() -> None:
    """A request that two faults of a kind met counts once."""
    faults = [Happened(Kind.STOP, "worker", "w", 10.5, 10.6), Happened(Kind.STOP, "worker", "w", 10.7, 20.5)]
    whole, stop = report.rows(run(happened=faults))
    assert (whole["requests"], stop["during"], stop["faults"], stop["requests"]) == (20, "stop worker", 2, 2)


def test_the_page_names_what_broke_and_the_request() -> None:
    """Who reads it finds the criterion, and the failed request with what Envoy said of it."""
    broken = run(sent=[sent(0, status=503, failure=Failure.STATUS), *(sent(n) for n in range(1, 20))])
    page = report.text(broken, *report.judge(broken))
    assert "BROKEN  no request failed: 1 did" in page
    assert f"failed: #0 at 0.00 s, 1.00 s, envoy 0, session 0/0, stream True, status 503, status, served {ONE}" in page
