"""What a process shows of the shared store."""

from extproc.telemetry.metrics import Metrics
from extproc.telemetry.store_metrics import Dealings, NodeView


def lines(metrics: Metrics) -> set[str]:
    """Samples of the store on the page."""
    page = metrics.page().decode().splitlines()
    return {line.removeprefix("warmpath_store_") for line in page if line.startswith("warmpath_store_")}


def test_totals_told_twice_count_once() -> None:
    """Dealings are totals since the start: each page takes over what they grew by."""
    metrics = Metrics()
    metrics.store.dealt(Dealings(calls=5, opens=1, replayed=2, asserted=3), {"slow": 1})
    metrics.store.dealt(Dealings(calls=7, opens=1, replayed=2, asserted=3, lost=4, emptied=1), {"slow": 2, "full": 6})
    assert lines(metrics) == {
        "calls_total 7.0",
        "circuit_openings_total 1.0",
        "late_settles_total 2.0",
        "dropped_settles_total 0.0",
        "reasserted_charges_total 3.0",
        "lost_charges_total 4.0",
        "emptied_total 1.0",
        "stray_charges_total 0.0",
        "merged_pins_total 0.0",
        "dropped_pins_total 0.0",
        'failures_total{kind="slow"} 2.0',
        'failures_total{kind="full"} 6.0',
    }


def test_trouble_is_shown_while_it_lasts() -> None:
    """A trouble that went leaves no series behind: an alert on it ends."""
    metrics = Metrics()
    metrics.store.troubles([("chat", "slow"), ("code", "full")])
    assert {'trouble{kind="slow",pool="chat"} 1.0', 'trouble{kind="full",pool="code"} 1.0'} <= lines(metrics)
    metrics.store.troubles([("code", "full")])
    assert [line for line in lines(metrics) if line.startswith("trouble")] == ['trouble{kind="full",pool="code"} 1.0']


def test_a_pool_that_left_leaves_no_gauge() -> None:
    """Neither what this process knows of a pool nor what its node tells stays after it."""
    metrics = Metrics()
    for pool in ("chat", "code"):
        metrics.store.pool(pool, degraded=True, waiting=3)
        metrics.store.node(pool, NodeView(1000, 2000, 5, 7, is_master=True))
    metrics.store.forget("chat")
    left = {line for line in lines(metrics) if "{pool=" in line}
    assert left == {
        'degraded{pool="code"} 1.0',
        'settles_waiting{pool="code"} 3.0',
        'used_bytes{pool="code"} 1000.0',
        'max_bytes{pool="code"} 2000.0',
        'evicted_keys{pool="code"} 5.0',
        'clients{pool="code"} 7.0',
        'master{pool="code"} 1.0',
    }
