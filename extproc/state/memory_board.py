"""What a `MemoryStore` publishes of endpoints, and the work that its holders share."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from extproc.clock import Clock
from extproc.state.holdings import Holdings


class MemoryBoard:
    """States of endpoints and holdings, with time from `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._holdings: defaultdict[tuple[str, str], Holdings] = defaultdict(Holdings)

    async def put_states(self, pool: str, states: Mapping[str, bytes]) -> None:
        """See `Store.put_states`."""
        self._states[pool].update(states)

    async def drop_states(self, pool: str, endpoints: Collection[str]) -> None:
        """See `Store.drop_states`."""
        for endpoint in endpoints:
            self._states[pool].pop(endpoint, None)

    async def states(self, pool: str) -> Mapping[str, bytes]:
        """See `Store.states`."""
        return dict(self._states[pool])

    async def hold(self, pool: str, group: str, holder: str, names: Collection[str], lease_ms: int) -> Collection[str]:
        """See `Store.hold`."""
        return self._holdings[pool, group].hold(holder, names, lease_ms / 1000, self._clock.monotonic())
