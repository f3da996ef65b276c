"""What happens to requests of a saturated pool: they wait, are sent to another model, or are refused.

Implements `surroundings.Gate` for one worker. In calm times (no endpoint of the pool has shown a queue for half a
minute, and no backlog is half of what it may be) a request passes without a look at the store.
"""

import asyncio
import itertools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import partial

from extproc import deciding
from extproc.choose.fleet import Pool
from extproc.clock import Clock
from extproc.config import Config
from extproc.config_overload import TenantShare
from extproc.deciding import Asked
from extproc.envoy.contract import Call
from extproc.govern.queue import QUANTUM, Entry, band_of
from extproc.govern.saturation import UNKNOWN, Room
from extproc.queue_board import QueueBoard
from extproc.request.model import Request
from extproc.rules_overload import rules_in
from extproc.surroundings import Admitted, Surroundings
from extproc.telemetry.overload_metrics import OverloadMetrics
from extproc.waiting_line import WaitingLine

_PLAIN = TenantShare()


class Overload:
    """Stands before the decisions of one worker.

    Attributes:
        lines: by pool, what waits for it.
    """

    def __init__(self, around: Surroundings, metrics: OverloadMetrics, clock: Clock) -> None:
        self._around = around
        self._metrics = metrics
        self._clock = clock
        self._ids = itertools.count()
        self._own = f"{around.replica}-"
        self._known: Config | None = None
        self._watched: set[str] = set()
        self._shown: set[str] = set()
        self.lines: Mapping[str, WaitingLine] = {
            pool: WaitingLine(pool, around, QueueBoard(around.store, pool, around.replica, clock), metrics, clock)
            for pool in around.knowledge
        }
        for pool, known in around.knowledge.items():
            known.hear(partial(self._heard, pool))

    def watches(self, pool: str) -> bool:
        """See `Gate.watches`."""
        config = self._around.config
        if config is not self._known:
            self._known = config
            self._watched = {name for name in config.pools if rules_in(config, name).action != "pass"}
        return pool in self._watched

    async def admit(self, asked: Asked, pool: Pool, subset: AbstractSet[str] | None, call: Call) -> Admitted:
        """See `Gate.admit`."""
        line, rules = self.lines[pool.name], rules_in(self._around.config, pool.name)
        sequences = asked.request.n
        if not len(line) and not line.full.room.near:
            line.full.passes(sequences, 0.0)
            return Admitted(pool.name, sequences)
        entry = self._entry(asked, pool)
        if rules.action == "queue":
            began = self._clock.monotonic()
            await line.wait(entry, call.line)
            return Admitted(pool.name, sequences, entry.prompt_tokens, self._clock.monotonic() - began)
        if (await line.full.look(pool, rules.saturation, subset)).open:
            line.full.passes(sequences, entry.prompt_tokens)
            return Admitted(pool.name, sequences, entry.prompt_tokens)
        # Only the pool that has a stored response can continue it.
        if rules.action == "fallback" and not asked.request.previous_response:
            self._metrics.shed(pool.name, "fell_back")
            return Admitted(pool.name, 0, model=rules.fallback)
        self._metrics.shed(pool.name, "rejected")
        raise line.overloaded("every endpoint of this model is saturated")

    def arrived(self, admitted: Admitted) -> None:
        """See `Gate.arrived`."""
        self.lines[admitted.pool].full.arrived(admitted.sequences, admitted.prompt_tokens)

    def charged(self, pool: str, sequences: int) -> None:
        """See `Gate.charged`."""
        line = self.lines[pool]
        line.full.in_flight += sequences
        if line.drain.idle:
            line.drain.at_work(self._clock.monotonic(), working=True)

    def settled(self, pool: str, sequences: int) -> None:
        """See `Gate.settled`."""
        line = self.lines[pool]
        line.full.in_flight -= sequences
        line.drain.note(self._clock.monotonic())
        line.wake()

    def use(self, pool: str) -> tuple[Room, int]:
        """Room of a pool as last seen, and how many requests wait for it here."""
        line = self.lines[pool]
        return line.full.room, len(line)

    async def run(self) -> None:
        """Keep in view how full the pools are; lasts until cancelled."""
        while True:
            await asyncio.sleep(self._around.config.telemetry.scrape_ms / 1000)
            for name, pool in self._around.fleet.pools.items():
                line = self.lines[name]
                if self.watches(name):
                    self._shown.add(name)
                    await line.full.look(pool, line.rules.saturation)
                    line.drain.at_work(self._clock.monotonic(), working=line.full.at_work)
                    line.show()
                elif name in self._shown:
                    # Nobody looks any more: what was seen last must not stand on the page for ever.
                    self._shown.discard(name)
                    line.full.room = UNKNOWN
                    line.drain.at_work(self._clock.monotonic(), working=True)
                    line.show()

    async def close_after(self, seconds: float) -> None:
        """Go on for so long, then refuse whoever waits or comes to wait: this worker stops."""
        await asyncio.sleep(seconds)
        for line in self.lines.values():
            await line.close()

    def _heard(self, pool: str, charge_id: str, _endpoint: str) -> None:
        """A request was answered; those of this worker are counted as they are settled."""
        if not charge_id.startswith(self._own):
            self.lines[pool].drain.note(self._clock.monotonic())
            self.lines[pool].wake()

    def _entry(self, asked: Asked, pool: Pool) -> Entry:
        around = self._around
        moment = deciding.moment_of(around.config, pool.name, 0, self._clock.monotonic())
        ask = deciding.ask_of(asked, around.knowledge[pool.name], moment)
        uncached = max(1.0, ask.prompt_tokens - max(ask.matched_tokens.values(), default=0.0))
        tenant = around.config.overload.tenants.get(asked.request.tenant, _PLAIN)
        return Entry(
            id=next(self._ids),
            band=band_of(self._priority(asked.request, tenant)),
            tenant=asked.request.tenant,
            # A small request is no less than one turn: else many of one tenant went before one of another.
            tokens=max(QUANTUM, uncached + ask.output_tokens),
            weight=tenant.weight,
            prompt_tokens=uncached,
            sequences=asked.request.n,
        )

    def _priority(self, request: Request, tenant: TenantShare) -> int:
        """A client says how urgent its request is only where it may."""
        sent = request.priority if self._around.config.overload.client_priority else 0
        return sent or tenant.priority
