"""One prompt and its answer on their way through an engine."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from extproc.sim.adapters import Adapter
from extproc.sim.tokens import IMAGE_TOKENS, Medium


class Listener(Protocol):
    """Who hears about a sequence."""

    def progress(self, sequence: "Sequence") -> None:
        """`sequence` has new tokens or has finished."""
        ...


@dataclass(frozen=True, slots=True)
class Content:
    """What the blocks of a sequence hold, for engines that tell of it.

    Attributes:
        data: the tokens of prompt and answer, as `tokens` has them.
        adapter: whose namespace it is; None for the base model's.
        salt: parts it from equal tokens under another salt; empty for none.
        media: images, sounds and files whose tokens do not tell what they are.
    """

    data: bytes
    adapter: Adapter | None = None
    salt: str = ""
    media: tuple[Medium, ...] = ()

    def keys(self, start: int, stop: int) -> list[tuple[str, int]]:
        """Return name and place, counted from `start`, of the media with a token from `start` to `stop` (exclusive)."""
        return [
            (one.identifier, one.offset - start)
            for one in self.media
            if one.offset < stop and start < one.offset + IMAGE_TOKENS
        ]


class Sequence:
    """One prompt and the answer it will get.

    The answer is known from the start, so the hashes of all full blocks are too: `hashes` covers prompt and
    answer. `answer_tokens` 0 is a pooling request, which ends with its prefill. `adapter` is the name of the adapter it
    runs under; `content` is only there where the engine tells of its blocks.
    """

    __slots__ = (
        "aborted",
        "adapter",
        "admitted_at",
        "answer_tokens",
        "arrived_at",
        "blocks",
        "cached_tokens",
        "changed",
        "chunk",
        "computed",
        "content",
        "end_reason",
        "finished",
        "finished_at",
        "first_token_at",
        "hashes",
        "last_token_at",
        "listener",
        "preemptions",
        "produced",
        "prompt_tokens",
        "registered",
        "streamed",
    )

    def __init__(
        self,
        prompt_tokens: int,
        answer_tokens: int,
        hashes: Items[int],
        *,
        end_reason: str = "length",
        streamed: bool = True,
        listener: Listener | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = answer_tokens
        self.hashes = hashes
        self.end_reason = end_reason
        self.streamed = streamed
        self.listener = listener
        self.adapter = ""
        self.content: Content | None = None
        self.blocks: list[int] = []
        self.computed = 0
        self.registered = 0
        self.produced = 0
        self.chunk = 0
        self.cached_tokens = -1
        self.preemptions = 0
        self.changed = False
        self.aborted = False
        self.finished: str | None = None
        self.arrived_at = self.admitted_at = self.first_token_at = 0.0
        self.last_token_at = self.finished_at = 0.0

    @property
    def known(self) -> int:
        """Tokens that exist so far: the prompt and what was produced."""
        return self.prompt_tokens + self.produced

    @property
    def in_prefill(self) -> bool:
        """Whether the last chunk computed tokens of the prompt, seen from the end of its step."""
        return self.computed - self.chunk < self.prompt_tokens
