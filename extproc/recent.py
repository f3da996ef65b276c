"""The last decisions of a worker, by charge id and by request id, for `warmpath explain`.

What is remembered is what the decision was a function of, as it stood: snapshots that exist anyway. They are taken
apart only when somebody asks (`explainer`), so that remembering one costs 4 µs.
"""

from collections import OrderedDict
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from extproc.choose.fleet import Pool
from extproc.choose.policies import Ask
from extproc.config import Config
from extproc.request.model import RouteKind
from extproc.rollout.split import Choice
from extproc.state.values import Reservation

_MOST_ENDPOINTS: Final = 100_000
"""Endpoints in the snapshots that remembered decisions hold on to: at about 250 bytes each, 25 MB. A pool of 64
never comes near with the default of 1,000 decisions; one of 1,000 endpoints keeps a hundred snapshots."""
_LONGEST_ID: Final = 128


class Remembered(msgspec.Struct, frozen=True, gc=False):
    """One decision. Holds no prompt, session id or tenant.

    Attributes:
        at: when it was made, seconds since the Unix epoch.
        charge_id: its charge.
        request_id: `x-request-id` of the request; empty when it had none.
        kind: API of the request.
        flaw: why its body could not be read; empty when it could.
        session: whether the request named its session, or one was recognised.
        ask: what the request asked of the pool.
        pool: the pool's snapshot.
        subset: `ip:port` of the endpoints that could be picked; None for all.
        config: configuration that was in use.
        reservation: what the store decided.
        choice: version of the model; None for a model with one.
    """

    at: float
    charge_id: str
    request_id: str
    kind: RouteKind
    flaw: str
    session: bool
    ask: Ask
    pool: Pool
    subset: AbstractSet[str] | None
    config: Config
    reservation: Reservation
    choice: Choice | None = None


class Recent:
    """The newest decisions, `telemetry.recent_decisions` of the last one's configuration at most."""

    def __init__(self, most_endpoints: int = _MOST_ENDPOINTS) -> None:
        """`most_endpoints` bounds the snapshots that are held, counted in endpoints."""
        self._most_endpoints = most_endpoints
        self._kept: OrderedDict[str, tuple[Remembered, int]] = OrderedDict()
        self._charges: dict[str, str] = {}
        self._newest: dict[str, Pool] = {}
        self._endpoints = 0

    def __len__(self) -> int:
        return len(self._kept)

    def remember(self, made: Remembered) -> None:
        """Keep a decision; the oldest ones go when there are too many."""
        pool, brought = made.pool, 0
        # Decisions between two refreshes share one snapshot: the first of them answers for its size.
        if self._newest.get(pool.name) is not pool:
            self._newest[pool.name] = pool
            brought = len(pool.endpoints)
            self._endpoints += brought
        self._kept[made.charge_id] = (made, brought)
        if made.request_id and len(made.request_id) <= _LONGEST_ID:
            self._charges[made.request_id] = made.charge_id
        limit = made.config.telemetry.recent_decisions
        while len(self._kept) > limit or (self._endpoints > self._most_endpoints and len(self._kept) > 1):
            self._forget_oldest()

    def find(self, name: str) -> Remembered | None:
        """The decision of this charge id or request id; of several with one request id the newest."""
        kept = self._kept.get(self._charges.get(name, name))
        return None if kept is None else kept[0]

    def _forget_oldest(self) -> None:
        charge_id, (oldest, brought) = self._kept.popitem(last=False)
        self._endpoints -= brought
        # A later decision may have come under the same request id.
        if self._charges.get(oldest.request_id) == charge_id:
            del self._charges[oldest.request_id]
