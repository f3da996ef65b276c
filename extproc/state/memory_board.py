"""What a `MemoryStore` publishes of endpoints, their breakers, and the work that its holders share."""

from collections import defaultdict
from collections.abc import Collection, Mapping

from extproc.clock import Clock
from extproc.govern.breaker import Verdict
from extproc.state.breakers import Kept, after, probed, state_of, view
from extproc.state.holdings import Holdings
from extproc.state.values import Breaker, BreakerRules


class MemoryBoard:
    """States of endpoints, breakers and holdings, with time from `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._breakers: defaultdict[str, dict[str, Kept]] = defaultdict(dict)
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

    async def judge(self, pool: str, endpoint: str, verdict: Verdict, rules: BreakerRules) -> Breaker:
        """See `Store.judge`."""
        kept, now = self._breakers[pool], self._clock.monotonic() * 1000
        changed = after(kept.get(endpoint, Kept()), verdict, rules, now)
        if changed == Kept():
            kept.pop(endpoint, None)
        else:
            kept[endpoint] = changed
        return view(changed, now)

    async def probe(self, pool: str, endpoint: str, lease_ms: float) -> bool:
        """See `Store.probe`."""
        allowed = probed(self._breakers[pool].get(endpoint, Kept()), lease_ms, self._clock.monotonic() * 1000)
        if allowed is not None:
            self._breakers[pool][endpoint] = allowed
        return allowed is not None

    async def breakers(self, pool: str) -> Mapping[str, Breaker]:
        """See `Store.breakers`."""
        now = self._clock.monotonic() * 1000
        return {
            name: view(kept, now)
            for name, kept in self._breakers[pool].items()
            if kept.strikes or state_of(kept, now) != "closed"
        }

    async def drop_breakers(self, pool: str, endpoints: Collection[str]) -> None:
        """See `Store.drop_breakers`."""
        for endpoint in endpoints:
            self._breakers[pool].pop(endpoint, None)
