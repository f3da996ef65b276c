"""What tests of the operator API share: a model with two versions, its engines as published, and calls on both."""

import itertools
from typing import Any

import msgspec

from extproc.admin.rollouts import RolloutCalls
from extproc.clock import ManualClock
from extproc.config import Config
from extproc.fleet.rollout_documents import Known
from extproc.state.document_store import Document, Documents
from extproc.state.endpoint import EndpointState, encode
from extproc.state.memory import MemoryStore

POOLS = {"old": {"10.0.0.1:80": "10.0.0.1:80"}, "new": {"10.0.0.2:80": "10.0.0.2:80"}}


def config(model: dict[str, Any] | None = None, **sections: Any) -> Config:
    """Model `chat`, also called `gpt`: v1 in pool `old` has all weight, v2 in pool `new` none; and model `small`."""
    versions = {"v1": {"pool": "old", "weight": 1}, "v2": {"pool": "new"}}
    document = {
        "models": {"chat": {"versions": versions, "aliases": ["gpt"], **(model or {})}, "small": {"pool": "old"}},
        "pools": {name: {"endpoints": list(members), "engine": "vllm"} for name, members in POOLS.items()},
        **sections,
    }
    return msgspec.convert(document, Config)


def healthy(**fields: Any) -> EndpointState:
    """A vLLM that serves `chat`; fields replace those given."""
    base: dict[str, Any] = {"destination": "", "scraped_at": 1.0, "kind": "vllm", "models": ("chat",)}
    return EndpointState(**{**base, **fields})


class Stage:
    """Calls on a memory store, with all engines healthy."""

    def __init__(self, settings: Config | None = None) -> None:
        self.clock = ManualClock(1_800_000_000.0)
        self.store = MemoryStore(self.clock)
        self.config = settings or config()
        self.remembered: dict[str, Known] = {}
        numbers = itertools.count(1)
        self.calls = RolloutCalls(
            self.store, lambda: self.config, lambda: POOLS, lambda: self.remembered, lambda: f"r{next(numbers)}"
        )

    async def publish(self, **states: EndpointState) -> None:
        """Publish the state of the one endpoint of each pool; healthy ones of pools that are not named."""
        for pool, members in POOLS.items():
            state = states.get(pool, healthy())
            await self.store.put_states(pool, dict.fromkeys(members, encode(state)))

    async def kept(self) -> Documents:
        """The documents as the store has them."""
        return await self.store.documents("rollouts")

    async def put(self, payload: bytes, revision: int, model: str = "chat") -> None:
        """Write a document as somebody else."""
        assert await self.store.put_document("rollouts", model, Document(revision, payload))


async def stage(settings: Config | None = None) -> Stage:
    """A stage whose engines were published."""
    made = Stage(settings)
    await made.publish()
    return made
