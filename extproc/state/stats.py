"""What the store of one process counts of its dealings with the shared store."""

import msgspec

from extproc.state.trouble import Trouble


class Stats(msgspec.Struct):
    """Counters since the start, over all pools, for metrics.

    Attributes:
        calls: calls that were sent to the shared store, probes left out.
        failures: of these, those that failed, by trouble.
        opens: times a circuit opened.
        replayed: settles delivered late.
        dropped: settles not delivered one by one, because too many were waiting; their charges were given up wholesale.
        asserted: open charges told again to the shared store.
        lost: open charges that heartbeats found missing in the shared store.
        emptied: times that heartbeats found that the shared store had lost everything.
        strays: charges that heartbeats found in the shared store, twice, which this worker has not.
        pins_merged: pins made without the shared store and written to it later.
        pins_dropped: pins made without it and given up, for newer ones or for another replica's decision.
    """

    calls: int = 0
    failures: dict[Trouble, int] = msgspec.field(default_factory=dict)
    opens: int = 0
    replayed: int = 0
    dropped: int = 0
    asserted: int = 0
    lost: int = 0
    emptied: int = 0
    strays: int = 0
    pins_merged: int = 0
    pins_dropped: int = 0
