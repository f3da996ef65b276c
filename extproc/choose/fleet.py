"""Frozen snapshots of the fleet, as one decision sees it."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from extproc.rollout.split import Split

Breaker = Literal["closed", "open", "half_open", "probe"]
"""Whether an endpoint gets requests: as usual; none, as it answered too badly; none but others' probes; one, as a probe
of this worker's."""


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One engine's address and what is known of it.

    Attributes:
        id: the endpoint's identity in configuration, store and metrics.
        destination: `ip:port` that Envoy is told.
        rate: believed prefill speed in tokens a second; positive.
        running: requests in the engine's batch when it was last read.
        waiting: requests in the engine's queue when it was last read.
        kv_usage: share of its KV blocks in use, 0 to 1.
        block_tokens: tokens in one KV block; prefix hits come in whole blocks.
        floor_tokens: prefill work that the engine's own queue stands for; 0 when it has none or was not read lately.
        floor_running: sequences in its batch and queue, where they are more than the fleet's ledger can account for, or
            where it stands still; 0 otherwise.
        silent_ms: for how long it has stood still with work to do, or has not answered whoever reads it.
        stalled_tokens: prompt tokens that each of its sequences may still wait for while it stands still; 0 otherwise.
        overhead_ms: learnt part of the time to the first token that no prompt accounts for.
        slowed: share of its usual speed in `rate`: below 1 while it is slowed in, or nobody can read it.
        reachable: False when reading it failed to connect several times in a row.
        asleep: it takes requests and lets them hang.
        draining: it takes no new sessions.
        breaker: whether it gets requests, by how it answered.
        busy_ms: cost of having just refused a request for want of room.
        kind: kind of engine (`vllm`, `sglang`, `tensorrt_llm`); empty while unknown.
        adapters: LoRA adapters that it has loaded; empty when it does not tell.
    """

    id: str
    destination: str
    rate: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    block_tokens: int = 16
    floor_tokens: float = 0.0
    floor_running: int = 0
    silent_ms: float = 0.0
    stalled_tokens: float = 0.0
    overhead_ms: float = 0.0
    slowed: float = 1.0
    reachable: bool = True
    asleep: bool = False
    draining: bool = False
    breaker: Breaker = "closed"
    busy_ms: float = 0.0
    kind: str = ""
    adapters: tuple[str, ...] = ()


class Pool(msgspec.Struct, frozen=True):
    """Endpoints that serve the same weights.

    Attributes:
        name: pool name, also Envoy's cluster name.
        policy: name of the policy that orders its endpoints.
        endpoints: all members, usable or not.
    """

    name: str
    policy: str
    endpoints: tuple[Endpoint, ...]

    def id_at(self, destination: str) -> str:
        """Id of the endpoint at `ip:port`; empty when the pool has none there."""
        return next((each.id for each in self.endpoints if each.destination == destination), "")


class Fleet(msgspec.Struct, frozen=True):
    """Everything that can be chosen.

    Attributes:
        pools: pool by name.
        models: by the model's own name, the pool of its main version.
        default_pool: pool for requests that name no model.
        aliases: the model's own name by further names that clients use.
        splits: by the model's own name, its versions; models with one version are absent.
    """

    pools: Mapping[str, Pool]
    models: Mapping[str, str]
    default_pool: str
    aliases: Mapping[str, str] = {}
    splits: Mapping[str, Split] = {}
