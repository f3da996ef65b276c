"""The decisions under test: the router of a worker, with its memory store and its learning, on the virtual clock."""

import itertools
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from extproc import snapshot
from extproc.choose.fleet import Fleet
from extproc.clock import ManualClock
from extproc.config import Config
from extproc.deciding import Asked, Outcome
from extproc.envoy.contract import Decision, Served
from extproc.learner import answered
from extproc.replay.cache_events import CacheEvents
from extproc.replay.rows import Row
from extproc.replay.world import Ended, Picked
from extproc.request.model import Request, RouteKind
from extproc.router import Router, Surroundings
from extproc.sightings import Sightings
from extproc.sim.virtual import VirtualEngine
from extproc.state.endpoint import EndpointState, encode
from extproc.state.exact_blocks import TokenPrompt
from extproc.state.feed import Cached, Delta, Evicted, Exact, pack
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore

POOL = "engines"
MODEL = "replayed"
_STARTED_AT = 1.0
"""When the engines started, in seconds since the epoch: before the replay, and never again."""
_TELLER = "replay"
_T = TypeVar("_T")


class _Ear:
    """Hears what the router tells: the last outcome. Nobody else is there to be told deltas."""

    outcome: Outcome

    def publish(self, pool: str, delta: Delta) -> None:
        """See `router.Publisher`."""

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""
        self.outcome = outcome

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""


class Routed:
    """Implements `world.Chooser` with the decision code of a worker."""

    def __init__(
        self,
        config: Config,
        engines: Sequence[VirtualEngine],
        block_tokens: int,
        events: CacheEvents | None = None,
    ) -> None:
        """Begin without any knowledge.

        Args:
            config: has one pool, `POOL`, with an endpoint `e<i>:1` for each engine.
            engines: the engines.
            block_tokens: tokens in a block of theirs, and of rows.
            events: what the engines tell of their caches; None where all profiles are estimated.
        """
        pool = config.pools[POOL]
        # A row's prompt is counted in tokens: one byte stands for one token, and a block holds so many.
        priors = Priors(
            prefill_tokens_per_s=pool.prefill_tokens_per_s,
            bytes_per_token=1.0,
            kv_tokens=pool.kv_tokens,
            block_bytes=block_tokens,
        )
        self._clock = ManualClock(0.0)
        self._names = [f"e{index}:1" for index in range(len(engines))]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._members = {POOL: {name: name for name in self._names}}
        self._knowledge = PoolKnowledge(priors)
        self._ear = _Ear()
        self._sightings = Sightings()
        self._introduced = False
        self._events = events
        self._block_tokens = block_tokens
        for name in self._names if events else ():
            self._knowledge.apply(Exact(name, 0, block_tokens), origin=_TELLER)
        numbers = itertools.count()
        self.around = Surroundings(
            config=config,
            fleet=Fleet({}, {}, POOL),
            knowledge={POOL: self._knowledge},
            store=MemoryStore(self._clock),
            replica="replay",
            new_charge_id=lambda: f"c{next(numbers)}",
        )
        self._router = Router(self.around, self._ear, self._ear, self._clock)

    def choose(self, row: Row, now: float) -> Picked:
        """See `world.Chooser.choose`."""
        self._began(now)
        request = Request(
            kind=RouteKind.CHAT,
            session=row.session,
            stream=row.stream,
            max_tokens=row.max_tokens,
            n=row.n,
            turn=row.turn,
            follows=row.follows,
        )
        asked = Asked(request, row.blocks, float(row.prompt_tokens))
        if self._events:
            # Rows have no token ids, and need none: their blocks are chained over the tokens already.
            tokens, chains = TokenPrompt(range(row.prompt_tokens)), {self._block_tokens: row.blocks}
            asked = msgspec.structs.replace(asked, tokens=tokens, chains=chains)
        decision = finished(self._router.choose(asked, self.around.fleet.pools[POOL], None, now))
        outcome = self._ear.outcome
        return Picked(
            engine=self._index[str(decision.metadata["endpoint"])],
            token=decision,
            cached_tokens=outcome.cached_tokens,
            ttft_ms=outcome.predicted_ttft_ms,
            moved=outcome.moved,
            precise=outcome.rung == "precise",
        )

    def settled(self, picked: Picked, now: float) -> None:
        """See `world.Chooser.settled`."""
        self._began(now)
        finished(self._router.settle(_decision(picked)))

    def learn(self, ended: Ended, now: float) -> None:
        """See `world.Chooser.learn`."""
        self._began(now)
        decision, name = _decision(ended.picked), self._names[ended.picked.engine]
        served = Served(
            charge_id=decision.charge_id,
            pool=POOL,
            destination=name,
            status=200,
            ttft_s=ended.ttft_s,
            duration_s=ended.finished_s - ended.at_s,
            prompt_tokens=ended.row.prompt_tokens,
            output_tokens=ended.row.output_tokens * ended.row.n,
            cached_tokens=ended.cached_tokens,
            metadata=decision.metadata,
        )
        ttft_s = ended.ttft_s if ended.row.stream else -1.0
        self._knowledge.apply(answered(served, name, ttft_s))

    def scrape(self, engines: Sequence[VirtualEngine], now: float) -> None:
        """See `world.Chooser.scrape`."""
        self._began(now)
        if not self._introduced:
            self._introduced = True
            for name, engine in zip(self._names, engines, strict=True):
                settings = engine.settings
                self._knowledge.engine_seen(name, settings.capacity_tokens, _STARTED_AT, settings.block_size)
        states = {
            name: EndpointState(
                destination=name,
                scraped_at=now,
                running=engine.running,
                waiting=engine.waiting,
                kv_usage=engine.cache_usage,
                block_tokens=engine.settings.block_size,
                kv_blocks=engine.settings.blocks,
                started_at=_STARTED_AT,
            )
            for name, engine in zip(self._names, engines, strict=True)
        }
        self._knowledge.age(now, self.around.config.routing.profile_ttl_s)
        payloads = {name: encode(state) for name, state in states.items()}
        self._sightings.saw(payloads, states, finished(self.around.store.loads(POOL)), now)
        self.around.fleet = snapshot.build(
            self.around.config, self._members, {POOL: self._sightings.all}, {POOL: self._knowledge}, now
        )

    def _began(self, now: float) -> None:
        """It is `now`, and what the engines have told until now is known."""
        self._clock.now = now
        for index, stored, blocks in self._events.told(now) if self._events else ():
            name, packed = self._names[index], pack(blocks)
            self._knowledge.apply(Cached(name, 0, 0, packed) if stored else Evicted(name, 0, 0, packed), origin=_TELLER)


def finished(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never waits for anything, such as one over a memory store, to its end.

    Raises:
        RuntimeError: it waited.
    """
    try:
        work.send(None)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    raise RuntimeError("a replayed decision waited for something outside the replay")


def _decision(picked: Picked) -> Decision:
    decision = picked.token
    if not isinstance(decision, Decision):
        raise TypeError(f"a routed pick carries its decision, not {type(decision).__name__}")
    return decision
