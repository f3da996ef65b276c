"""One pool's side of the shared store: its circuit, what the store was not told, and the task that tells it.

Each pool has its own. In a cluster a pool lives on one node, and a node that is gone leaves the other pools alone.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Final, TypeVar

from extproc.errors import StoreError
from extproc.state.circuit import Circuit, pause_s
from extproc.state.telling import Telling, Tools
from extproc.state.trouble import AnsweredError, Trouble, UnreachableError, trouble_of
from extproc.state.unsent import LatePin, Unsent
from extproc.state.values import Settle

log = logging.getLogger(__name__)
T = TypeVar("T")

# Workers that lost the store together find it again together: they begin to tell it within this time.
_SPREAD_S: Final = 0.5
# How long a refusal is trouble "now": every pool renews its lease within 5 s, and is refused again if it still is.
_RECENT_S: Final = 10.0
_STRAYS_SEEN: Final = 2
_FAREWELL_S: Final = 1.0


class Sharing:
    """One pool's side of the shared store.

    Args:
        pool: its name.
        tools: the stores, clock and counters.

    Attributes:
        unsent: what the shared store was not told.
        circuit: whether calls are sent.
        alone: the last reservation failed.
    """

    def __init__(self, pool: str, tools: Tools) -> None:
        self._pool = pool
        self._tools = tools
        self._refused: Trouble | None = None
        self._refused_at = float("-inf")
        self._mending: asyncio.Task[None] | None = None
        self._closed = False
        self._said = False
        self._strays = 0
        self.alone = False
        self.circuit = Circuit(tools.longest_s)
        self.unsent = Unsent(tools.most)
        self._telling = Telling(pool, tools, self.unsent, self)

    @property
    def degraded(self) -> bool:
        """Decisions are made on the local ledger."""
        return self.circuit.open or self.alone

    @property
    def asks(self) -> bool:
        """See `telling.Asking.asks`."""
        return not self.circuit.open

    @property
    def settled(self) -> bool:
        """The shared store answers and was told everything."""
        return not (self.circuit.open or self.unsent)

    @property
    def trouble(self) -> Trouble | None:
        """What the shared store is in trouble with now, for this pool."""
        if self.circuit.open:
            return self.circuit.trouble
        recent = self._tools.clock.monotonic() - self._refused_at < _RECENT_S
        return self._refused if recent else None

    def require(self) -> None:
        """Raise `UnreachableError` while the circuit is open."""
        if self.circuit.open:
            raise UnreachableError("the shared store does not answer", self.circuit.trouble or Trouble.GONE)

    async def ask(self, call: Awaitable[T], *, bulk: bool = False) -> T:
        """Await a call to the shared store and learn from how it ends.

        Args:
            call: the call.
            bulk: it moves much data, so that a missed deadline says nothing of how soon a decision is answered.
        """
        self._tools.stats.calls += 1
        try:
            return await call
        except StoreError as error:
            trouble = self.count(error)
            if not isinstance(error, AnsweredError) and not (bulk and trouble is Trouble.SLOW):
                self.trip(trouble)
            raise

    def count(self, error: StoreError) -> Trouble:
        """Count a failed call; returns what the shared store is in trouble with."""
        trouble, failures = trouble_of(error), self._tools.stats.failures
        failures[trouble] = failures.get(trouble, 0) + 1
        if isinstance(error, AnsweredError):
            self._refused, self._refused_at = trouble, self._tools.clock.monotonic()
        return trouble

    def trip(self, trouble: Trouble) -> None:
        """Open the circuit."""
        if self.circuit.trip(trouble, self._tools.clock.monotonic()):
            self._tools.stats.opens += 1
        # After a mere stall every call still gets its answer, late; a lost connection may be a lost store.
        self.unsent.lost = self.unsent.lost or trouble is not Trouble.SLOW
        self.mend_soon()

    def mend_soon(self) -> None:
        """Tell the shared store what it was not told, as soon as it answers."""
        if not self._closed and not self.settled and (self._mending is None or self._mending.done()):
            self._mending = asyncio.get_running_loop().create_task(self._mend())

    def doubt(self, charge_id: str) -> None:
        """The shared store may know this charge otherwise than it is, or not at all."""
        self.unsent.doubt(charge_id, self._tools.clock.monotonic())
        self.mend_soon()

    def end(self, settle: Settle) -> None:
        """Deliver an end later."""
        self._tools.stats.dropped += self.unsent.end(settle)
        self.mend_soon()

    def pin(self, key: str, endpoint: str, ttl_ms: int, max_pins: int, before: str) -> None:
        """Merge a pin later."""
        until = self._tools.clock.monotonic() + ttl_ms / 1000
        self._tools.stats.pins_dropped += self.unsent.pin(key, LatePin(endpoint, until, max_pins, before))
        self.mend_soon()

    def emptied(self) -> None:
        """A heartbeat found that the shared store lost everything."""
        self._tools.stats.emptied += 1
        self.unsent.lost = True
        self.mend_soon()

    def compared(self, replica: str, *, missing: int, strays: int) -> None:
        """A heartbeat compared open charges.

        Args:
            replica: whose they are.
            missing: how many the shared store lacks; not above 0 when it has all.
            strays: how many more it has than can be explained; not above 0 for none. Seen once, they may be calls under
                way. Seen twice, their end will not come: a call that was given up was executed after its settle.
        """
        if missing > 0:
            self._tools.stats.lost += missing
            self.unsent.lost = True
        self._strays = self._strays + 1 if strays > 0 else 0
        if self._strays == _STRAYS_SEEN:
            self._tools.stats.strays += strays
            self.unsent.wiped.add(replica)
        self.mend_soon()

    async def close(self) -> None:
        """Stop mending, and try once, for a second at most, to tell what waits."""
        self._closed = True
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.gather(self._mending, return_exceptions=True)
        if not self.circuit.open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._telling.round()
        self._tools.stats.dropped += len(self.unsent.settles)

    async def _mend(self) -> None:
        """Probe until the shared store answers, then tell it everything; ends when nothing is left to do."""
        failed = 0
        while not self.settled:
            chance = self._tools.chance.random()
            if self.circuit.open:
                await asyncio.sleep(self.circuit.wait_s(chance))
                if await self._probe():
                    failed = 0
                continue
            await asyncio.sleep(pause_s(failed, self._tools.longest_s, chance))
            failed = 0 if await self._telling.round() else failed + 1
        self.alone = False

    async def _probe(self) -> bool:
        """Ask whether the shared store answers, and close the circuit if it does."""
        clock = self._tools.clock
        try:
            await self._tools.primary.ping(self._pool)
        except AnsweredError as error:
            log.debug("the shared store refuses a probe, and so it answers", extra={"trouble": trouble_of(error)})
        except StoreError as error:
            self._missed(trouble_of(error))
            return False
        open_s = self.circuit.close(clock.monotonic())
        if self._said:
            self._said = False
            log.warning("the shared store answers again", extra={"pool": self._pool, "after_s": round(open_s, 3)})
        await asyncio.sleep(min(open_s, _SPREAD_S) * self._tools.chance.random())
        return True

    def _missed(self, trouble: Trouble) -> None:
        # Who comes to a new connection may have come to another server.
        self.unsent.lost = self.unsent.lost or trouble is not Trouble.SLOW
        self.circuit.missed(trouble)
        if not self._said:
            self._said = True
            log.warning(
                "the shared store does not answer; deciding on the local ledger",
                extra={"pool": self._pool, "trouble": trouble},
            )
