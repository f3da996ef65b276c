"""What a router works with, and whom it tells: plain values and protocols."""

import math
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import msgspec

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.config import Config
from extproc.deciding import Asked, Outcome
from extproc.envoy.contract import Call, Decision
from extproc.govern.quotas import Claim, Draw, Taken
from extproc.recent import Recent
from extproc.request.model import Request
from extproc.rollout.state import Rollout
from extproc.state.exact_blocks import TokenPrompt
from extproc.state.feed import Delta
from extproc.state.knowledge import PoolKnowledge
from extproc.state.store import Store


class Recorder(Protocol):
    """Who counts decisions."""

    def decided(self, outcome: Outcome) -> None:
        """Take in one decision."""
        ...

    def settled(self, pool: str) -> None:
        """A decided request is over."""
        ...


class Publisher(Protocol):
    """Who tells other replicas."""

    def publish(self, pool: str, delta: Delta) -> None:
        """Queue a delta for the pool's feed; returns at once."""
        ...


class Tokens(Protocol):
    """Who tells the token ids of prompts."""

    async def of(self, pool: str, path: str, body: bytes, request: Request) -> TokenPrompt | None:
        """The prompt of a request as the pool's engines see it; None when it cannot be told in time. Never raises."""
        ...


class Picks(Protocol):
    """Who wants to know which endpoints are picked."""

    def picked(self, pool: str, endpoint: Endpoint) -> None:
        """A decision went to this endpoint; returns at once."""
        ...


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """How a request of a pool goes on.

    Attributes:
        pool: the pool.
        sequences: answers that it asks for; 0 when it does not go to the pool.
        prompt_tokens: prompt tokens to prefill.
        waited_s: time that it waited.
        model: model that answers in place of its own; empty for its own.
    """

    pool: str
    sequences: int
    prompt_tokens: float = 0.0
    waited_s: float = 0.0
    model: str = ""


class Gate(Protocol):
    """Who lets requests through to pools that may be saturated."""

    def watches(self, pool: str) -> bool:
        """Whether the pool has any rule but to let all through."""
        ...

    async def admit(self, asked: Asked, pool: Pool, subset: AbstractSet[str] | None, call: Call) -> Admitted:
        """Return once the request may go on.

        Args:
            asked: the request.
            pool: pool that serves it.
            subset: `ip:port` of the endpoints that may be picked; None for all.
            call: the call, whose line is told when it has to wait.

        Raises:
            WarmpathError: it is refused.
        """
        ...

    def arrived(self, admitted: Admitted) -> None:
        """What was admitted was charged, or came to nothing."""
        ...

    def charged(self, pool: str, sequences: int) -> None:
        """A decision of this worker charged so many sequences."""
        ...

    def settled(self, pool: str, sequences: int) -> None:
        """One of these decisions is over."""
        ...


class Held(msgspec.Struct, frozen=True, gc=False):
    """What a request holds of limits of use, and the key that it alone may have.

    Attributes:
        draws: what it took.
        taken: when, and what is in use with it; None when no limit is for it.
        claim: its idempotency key; None without one.
    """

    draws: Sequence[Draw] = ()
    taken: Taken | None = None
    claim: Claim | None = None


class Meter(Protocol):
    """Who keeps up how much is used, and by whom."""

    def concerns(self, call: Call) -> bool:
        """Whether the call may have to take anything."""
        ...

    async def begin(self, call: Call, asked: Asked, pool: Pool) -> Held:
        """Take what the request is expected to use.

        Raises:
            RateLimitedError: a limit does not allow it.
            DuplicateRequestError: a request with its idempotency key still runs.
        """
        ...

    async def undo(self, held: Held) -> None:
        """The request comes to nothing: give all back. Never raises."""
        ...

    def marked(self, decision: Decision, held: Held) -> Decision:
        """The decision with what it takes to correct what was taken, and to tell the client."""
        ...

    def settled(self, decision: Decision) -> None:
        """A decision that was marked is over; returns at once."""
        ...


class Surroundings(msgspec.Struct):
    """What a router works with; the worker replaces `config` and `fleet` as they change.

    Attributes:
        config: current configuration.
        fleet: current snapshot.
        knowledge: by pool, what this worker knows.
        store: shared ledger and pins.
        replica: this worker's id.
        new_charge_id: gives a unique id at each call.
        new_response_id: gives an id at each call that nobody can guess: who knows it may read the response.
        recent: the last decisions, for `warmpath explain`.
        changes: by pool and reason, how many bodies were changed for their engine.
        tokens: tells token ids; None where nobody does.
        gate: lets requests through to saturated pools; None where nobody waits.
        picks: is told of each pick; None where nobody wants to know.
        meter: keeps up how much is used; None where nobody does.
        rollouts: by model, the last that is known of its rollout.
        fresh: whether a model's weights changed so lately that other workers may still go by those before.
        believed_until: until when what engines told may be believed without another look, in monotonic seconds.
    """

    config: Config
    fleet: Fleet
    knowledge: Mapping[str, PoolKnowledge]
    store: Store
    replica: str
    new_charge_id: Callable[[], str]
    new_response_id: Callable[[], str] = lambda: f"resp_{secrets.token_hex(16)}"
    recent: Recent = msgspec.field(default_factory=Recent)
    changes: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    tokens: Tokens | None = None
    gate: Gate | None = None
    picks: Picks | None = None
    meter: Meter | None = None
    rollouts: Mapping[str, Rollout] = {}
    fresh: Callable[[str], bool] = lambda _: False
    believed_until: float = math.inf
