"""What a relay does and holds, and why it gives an answer up."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final, Literal

import msgspec

from extproc.config_relay import OnDeath
from extproc.errors import OverloadedError
from extproc.relay.asked import Asked, Hindrance
from extproc.telemetry.relay_metrics import RelayMetrics

Failure = Hindrance | Literal["attempts", "refused", "mode"]
"""Why an answer was given up: it cannot be continued, every try was used, it was not taken over, or was not to be."""

WHY: Final[Mapping[Failure, str]] = {
    "tools": "it may call tools",
    "format": "it follows a format",
    "choices": "it has several choices",
    "logprobs": "it tells log probabilities",
    "echo": "it echoes its prompt",
    "reasoning": "it holds reasoning",
    "stop": "it was about to end in a stop text",
    "beams": "it comes from a beam search",
    "prompt": "its prompt cannot be added to",
    "transfer": "its blocks are transferred between engines",
    "size": "it is longer than relay.max_body",
    "engine": "these engines take no open message",
    "extras": "it holds more than text",
    "attempts": "as many were tried as relay.max_attempts allows",
    "refused": "the other engine did not take it over",
    "mode": "relay.on_death does not allow it",
}


def _unlimited(_asked: Asked) -> float:
    return 0.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a relay does and holds; fields as in the section `relay`.

    Attributes:
        silent: models whose engines tell no token ids, and take no open message of a chat (TensorRT-LLM).
        request_s: seconds that a request may take, all tries together; 0 for no limit.
    """

    on_death: OnDeath = "continue"
    max_attempts: int = 3
    max_body: int = 32 * 1024 * 1024
    silent: AbstractSet[str] = frozenset()
    request_s: Callable[[Asked], float] = _unlimited


class Room:
    """Bytes that one relay holds, of all requests together."""

    def __init__(self, longest: int, metrics: RelayMetrics) -> None:
        self._left = longest
        self._metrics = metrics

    def take(self, size: int) -> None:
        """Hold so many more. Raises OverloadedError when that is too much."""
        if size > self._left:
            raise OverloadedError("the relay holds as much as it may: try again, or without it")
        self._left -= size
        self._metrics.held(size)

    def give(self, size: int) -> None:
        """Hold so many less."""
        self._left += size
        self._metrics.held(-size)
