"""Workers of several replicas without their network: each a router with its own knowledge, over one real Valkey."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import SystemClock
from extproc.config import Config
from extproc.deciding import Outcome
from extproc.envoy.contract import VERSION, Call
from extproc.gossip import Gossip
from extproc.keeping import Keeping
from extproc.request.conversation import turns_before
from extproc.rollout.state import GROUP, Rollout, encode
from extproc.rollout_following import Following
from extproc.router import Router, Surroundings
from extproc.splits import splits_of
from extproc.state.document_store import Document
from extproc.state.feed import Answered
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from extproc.telemetry.families import Families
from extproc.telemetry.rollout_metrics import VersionMetrics
from tests.acceptance.local import CHAT, POOL
from tests.acceptance.rollouts.stand import MODEL, NEW, NEXT, OLD
from tests.waiting import until

POOLS = {OLD: POOL, NEW: NEXT}
CONFIG = msgspec.convert(
    {
        "models": {MODEL: {"versions": {OLD: {"pool": POOL, "weight": 1}, NEW: {"pool": NEXT, "weight": 0}}}},
        "pools": {POOL: {"endpoints": ["10.0.0.1:8000"]}, NEXT: {"endpoints": ["10.0.0.2:8000"]}},
    },
    Config,
)


class Silent:
    """Counts nothing."""

    def decided(self, outcome: Outcome) -> None:
        """See `Recorder.decided`."""

    def settled(self, pool: str) -> None:
        """See `Recorder.settled`."""


class Worker:
    """One replica's worker.

    Attributes:
        store: its way to Valkey, which goes on without.
    """

    def __init__(self, url: str, name: str) -> None:
        clock, numbers = SystemClock(), itertools.count()
        self._redis = RedisStore(url, 2000.0)
        self.store = ResilientStore(self._redis, MemoryStore(clock))
        knowledge = {pool: PoolKnowledge(Priors()) for pool in POOLS.values()}
        members = {POOL: "10.0.0.1:8000", NEXT: "10.0.0.2:8000"}
        pools = {pool: Pool(pool, "predicted_ttft", (Endpoint(at, at, 8000.0),)) for pool, at in members.items()}
        self._gossip = Gossip(self.store, knowledge, name, 200_000)
        self.around = Surroundings(
            config=CONFIG,
            fleet=Fleet(pools, {MODEL: POOL}, POOL, splits=splits_of(CONFIG, {})),
            knowledge=knowledge,
            store=self.store,
            replica=name,
            new_charge_id=lambda: f"{name}-{next(numbers):x}",
        )
        self._router = Router(self.around, self._gossip, Silent(), clock)
        self.following = Following(self.around, VersionMetrics(Families(CollectorRegistry())), clock)
        self._keeping = Keeping(self.around, self._gossip, clock)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Follow the others and the documents."""
        await self._redis.ping()
        self._tasks = [asyncio.create_task(each.run()) for each in (self._gossip, self.following, self._keeping)]
        assert await self._gossip.caught_up(60.0)

    async def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()

    async def version_of(self, session: str, turn: int) -> str:
        """Decide for a turn of a session, whose answer ends well; the version that got it."""
        decision = await self._router.decide(_call(session, turn))
        await self._router.settle(decision)
        self._gossip.learn(decision.pool, _answered(decision.charge_id, str(decision.metadata["endpoint"])))
        return str(decision.metadata[VERSION])

    def knows(self, sessions: Sequence[str], turn: int) -> bool:
        """Whether it was told by now where the turns before this one ran."""
        known = self.around.knowledge.values()
        asked = (self._router.read(_call(session, turn))[0].request for session in sessions)
        return all(any(each.continued(one) for one in turns_before(request) for each in known) for request in asked)

    def follows(self, share: float) -> bool:
        """Whether it gives the new version this share, also of what begins now."""
        splits = self.around.fleet.splits[MODEL]
        return splits.weights.get(NEW, 0.0) == share and not self.around.fresh(MODEL)


def _call(session: str, turn: int) -> Call:
    said = [{"role": role, "content": f"{session} {at}"} for at in range(turn) for role in ("user", "assistant")]
    body = {"model": MODEL, "messages": [*said, {"role": "user", "content": f"{session} {turn}"}]}
    return Call("POST", CHAT, {"x-session-id": session}, json.dumps(body).encode(), None)


def _answered(charge_id: str, endpoint: str) -> Answered:
    return Answered(
        charge_id=charge_id,
        endpoint=endpoint,
        work_tokens=10.0,
        ttft_s=0.01,
        prompt_bytes=40.0,
        prompt_tokens=10.0,
        cached_tokens=0.0,
        output_tokens=5.0,
    )


class Fleetful:
    """Workers that share a Valkey, and the document that they follow.

    Attributes:
        workers: the workers.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self._revision = 0

    async def use(self, rollout: Rollout) -> None:
        """Put the next revision of the rollout, as its controller does, and wait until every worker follows it."""
        self._revision += 1
        document = Document(self._revision, encode(rollout))
        assert await self.workers[0].store.put_document(GROUP, MODEL, document)
        await until(lambda: all(worker.follows(rollout.share) for worker in self.workers))

    async def versions(self, sessions: Sequence[str], turn: int) -> dict[str, str]:
        """The version of each session's turn, which goes to another worker than the turn before."""
        found: dict[str, str] = {}

        async def one(at: int) -> None:
            for number in range(at, len(sessions), len(self.workers)):
                worker = self.workers[(number + turn) % len(self.workers)]
                found[sessions[number]] = await worker.version_of(sessions[number], turn)

        await asyncio.gather(*(one(at) for at in range(len(self.workers))))
        return found


@contextlib.asynccontextmanager
async def workers(url: str, count: int) -> AsyncIterator[Fleetful]:
    """So many workers on one Valkey."""
    fleet = Fleetful([Worker(url, f"w{at}") for at in range(count)])
    try:
        for worker in fleet.workers:
            await worker.start()
        yield fleet
    finally:
        for worker in fleet.workers:
            await worker.stop()
