"""Workers that route a model with two versions: each with a store and knowledge of its own over what they share."""

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import ManualClock
from extproc.config import Config
from extproc.deciding import Outcome
from extproc.envoy.contract import Call, Decision
from extproc.rollout.state import Rollout
from extproc.router import Router, Surroundings
from extproc.splits import fleet_of, splits_of, with_splits
from extproc.state.feed import Answered, Delta
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.store import Store
from tests.unit.top.parts import config

POOLS = ("old", "new", "alone")


def settings(testers: Sequence[str] = (), policy: str = "predicted_ttft", **more: Any) -> Config:
    """Model `m` with the versions `old`, which has all traffic, and `new`; model `one` has no versions."""
    versions = {
        "old": {"pool": "old", "weight": 1.0, "served_as": "org/m-1"},
        "new": {"pool": "new", "weight": 0.0, "served_as": "org/m-2"},
    }
    return config(
        models={"m": {"versions": versions, "aliases": ["gpt"]}, "one": {"pool": "alone"}},
        pools={name: {"endpoints": ["10.0.0.1:80"]} for name in POOLS},
        rollouts={"testers": list(testers)},
        routing={"policy": policy},
        **more,
    )


def fleet(config: Config, rollouts: Mapping[str, Rollout] | None = None) -> Fleet:
    """Two endpoints in each pool."""
    pools = {
        pool: Pool(
            pool,
            config.policy_of(pool),
            tuple(Endpoint(f"{pool}-{n}", f"10.0.{at}.{n}:80", 10_000.0) for n in range(2)),
        )
        for at, pool in enumerate(POOLS)
    }
    return fleet_of(pools, config, splits_of(config, rollouts or {}))


class Notes:
    """Hears what one router tells. Deltas wait until they are handed out."""

    def __init__(self) -> None:
        self.deltas: list[tuple[str, Delta]] = []
        self.outcomes: list[Outcome] = []

    def publish(self, pool: str, delta: Delta) -> None:
        """See `router.Publisher`."""
        self.deltas.append((pool, delta))

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""
        self.outcomes.append(outcome)

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""


class Worker:
    """One of several routers."""

    def __init__(self, name: str, config: Config, store: Store, clock: ManualClock) -> None:
        self.notes = Notes()
        numbers = itertools.count()
        self.around = Surroundings(
            config=config,
            fleet=fleet(config),
            knowledge={pool: PoolKnowledge(Priors()) for pool in POOLS},
            store=store,
            replica=name,
            new_charge_id=lambda: f"{name}-{next(numbers)}",
        )
        self.router = Router(self.around, self.notes, self.notes, clock)

    def follow(self, rollouts: Mapping[str, Rollout]) -> None:
        """Go by these rollouts from now on."""
        self.around.rollouts = rollouts
        self.around.fleet = with_splits(self.around.fleet, self.around.config, rollouts)

    async def answered(self, call: Call) -> Decision:
        """Decide; the endpoint answers with 100 prompt and 20 output tokens."""
        decision = await self.router.decide(call)
        endpoint = str(decision.metadata["endpoint"])
        told = Answered(
            decision.charge_id,
            endpoint,
            work_tokens=-1.0,
            ttft_s=-1.0,
            prompt_bytes=-1.0,
            prompt_tokens=100.0,
            output_tokens=20.0,
        )
        self.notes.publish(decision.pool, told)
        for correction in self.around.knowledge[decision.pool].apply(told):
            self.notes.publish(decision.pool, correction)
        await self.router.settle(msgspec.structs.replace(decision, body=None))
        return decision


def hand_out(workers: Sequence[Worker]) -> None:
    """Have each worker hear what the others learnt, as through the feed."""
    for worker in workers:
        told, worker.notes.deltas = worker.notes.deltas, []
        for other in workers:
            if other is not worker:
                for pool, delta in told:
                    other.around.knowledge[pool].apply(delta, origin=worker.around.replica)


class Conversation:
    """A client: every turn carries the whole conversation.

    Attributes:
        versions: the versions that answered so far, turn by turn.
    """

    def __init__(self, name: str, *, named: bool, draw: Random, path: str = "/v1/chat/completions") -> None:
        self.name = name
        self.versions: list[str] = []
        self._headers = {"x-session-id": name} if named else {}
        self._draw = draw
        self._path = path
        self._messages = [{"role": "user", "content": f"first question of {name}"}]

    @property
    def call(self) -> Call:
        """The next turn."""
        headers = {**self._headers, "x-request-id": str(self._draw.random())}
        field = "input" if self._path.endswith("responses") else "messages"
        body = {"model": "m", field: self._messages, "max_tokens": 20}
        return Call("POST", self._path, headers, json.dumps(body).encode())

    async def turn(self, worker: Worker) -> Decision:
        """Send the next turn to a worker, and take in its answer."""
        decision = await worker.answered(self.call)
        self.versions.append(str(decision.metadata["version"]))
        answer = f"answer {len(self.versions)} {self._draw.random()}"
        self._messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
        return decision


def split_by_version(conversations: Sequence[Conversation]) -> Mapping[str, set[str]]:
    """Names of conversations by the versions that answered their last turn."""
    found = defaultdict[str, set[str]](set)
    for each in conversations:
        if each.versions:
            found[each.versions[-1]].add(each.name)
    return found


def memory() -> tuple[MemoryStore, ManualClock]:
    """A store, and its clock."""
    clock = ManualClock()
    return MemoryStore(clock), clock
