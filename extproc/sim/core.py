"""What the routes of one engine share, and what its dialect decides for the routes that generate."""

from dataclasses import dataclass
from typing import Any, Protocol

from extproc.sim.adapters import Adapter, Adapters
from extproc.sim.bodies import ChatBody, CompletionBody, EmbeddingBody, Sampling
from extproc.sim.ranks import Ranks
from extproc.sim.refusals import Refusal
from extproc.sim.settings import SimSettings
from extproc.sim.telling import Telling


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the events of one rank are to be had over ZMQ.

    Attributes:
        address: where it publishes, as the engine has it in its configuration.
        port: the port of that address; 0 if the engine connects to it.
        replay_port: where it replays; None if nowhere.
    """

    address: str
    port: int
    replay_port: int | None


@dataclass(frozen=True, slots=True)
class Core:
    """One engine from its start to its end.

    Attributes:
        settings: what it was told.
        ranks: its engine cores.
        adapters: what it serves beside the base model.
        started: seconds since the epoch.
        telling: where its events go; None if it tells of none.
    """

    settings: SimSettings
    ranks: Ranks
    adapters: Adapters
    started: float
    telling: Telling | None = None


class Dialect(Protocol):
    """How one engine reads requests and words what it says. Methods that read or admit raise `Refusal`."""

    def chat(self, body: bytes) -> ChatBody:
        """Read the body of a chat."""
        ...

    def completion(self, body: bytes) -> CompletionBody:
        """Read the body of a completion."""
        ...

    def adapter(self, body: Sampling | EmbeddingBody) -> Adapter | None:
        """Return the adapter that a request asks for, None for the base model."""
        ...

    def admit(self, count: int) -> None:
        """Refuse `count` more sequences if there are too many."""
        ...

    def prompt_too_long(self, tokens: int, limit: int) -> Refusal:
        """Return the refusal of a prompt that leaves no room for an answer."""
        ...

    def answer_too_long(self, asked: int, prompt_tokens: int, limit: int) -> Refusal:
        """Return the refusal of a `max_tokens` that the context cannot hold."""
        ...

    def details(self, cached: int, chat: bool) -> dict[str, Any] | None:
        """Return `usage.prompt_tokens_details`."""
        ...

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        """Return status and body of a refusal."""
        ...
