"""What is asked of a source of token ids, and why there may be none."""

from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import msgspec

from extproc.errors import WarmpathError
from extproc.request.model import RouteKind
from extproc.state.exact_blocks import Medium


class Why(StrEnum):
    """Why a prompt has no token ids: a closed set, shown as a metric's label."""

    LATE = "late"
    FAILED = "failed"
    REFUSED = "refused"
    UNSUPPORTED = "unsupported"
    UNREADABLE = "unreadable"
    SEVERAL = "several"
    IMAGES = "images"
    TOO_LONG = "too_long"
    NO_SOURCE = "no_source"
    BUSY = "busy"
    RESTING = "resting"


class NoTokensError(WarmpathError):
    """A prompt cannot be turned into token ids exactly; the request is routed without them.

    Attributes:
        why: the reason.
    """

    reason = "no_tokens"

    def __init__(self, why: Why) -> None:
        super().__init__(f"no token ids: {why}")
        self.why = why


class Given(msgspec.Struct, frozen=True):
    """A prompt that the client turned into token ids itself."""

    ids: "array[int]"


class Text(msgspec.Struct, frozen=True):
    """A text that no template is put around.

    Attributes:
        text: the text.
        special_tokens: whether the tokenizer adds its own, such as a beginning of text.
    """

    text: str
    special_tokens: bool


class Chat(msgspec.Struct, frozen=True):
    """A conversation that a chat template renders.

    Attributes:
        messages: as the client wrote them.
        tools: as the client wrote them; None without.
        tool_choice: as the client wrote it.
        reasoning_effort: as the client wrote it.
        variables: what the template is given besides messages and tools.
        template: the client's own template; None without.
        special_tokens: whether the tokenizer adds its own as well.
    """

    messages: list[Any]
    tools: object
    tool_choice: object
    reasoning_effort: object
    variables: dict[str, Any]
    template: str | None
    special_tokens: bool


class Whole(msgspec.Struct, frozen=True):
    """A body that only its own engine can turn into a conversation."""


Wanted: TypeAlias = Given | Text | Chat | Whole


class Asked(msgspec.Struct, frozen=True):
    """One prompt to turn into token ids.

    Attributes:
        kind: the API that was called.
        body: the request's body.
        wanted: what its prompt is made of.
        adapter: LoRA adapter that the body names outside its model; empty without.
        salt: `cache_salt`, where the API has it; empty without.
        truncated: whether the body asks for a part of its prompt only.
        model: name of the model that engines know; empty to leave the body's own out.
        media: whether it shows images, sounds or films, which only a render route can turn into tokens.
        lasting: whether the body holds all that it shows: what a URL names may change behind it.
    """

    kind: RouteKind
    body: bytes
    wanted: Wanted
    adapter: str = ""
    salt: str = ""
    truncated: bool = False
    model: str = ""
    media: bool = False
    lasting: bool = False


class Made(msgspec.Struct, frozen=True, gc=False):
    """What a prompt was turned into.

    Attributes:
        ids: its token ids; not to be changed.
        media: its images, sounds and films, by their offsets.
    """

    ids: "array[int]"
    media: Sequence[Medium] = ()


class Source(Protocol):
    """Where token ids come from."""

    @property
    def incremental(self) -> bool:
        """Whether a late answer makes the next turn of its conversation an early one."""
        ...

    async def made(self, asked: Asked) -> Made:
        """Token ids of a prompt, exactly those that the engine computes.

        Raises:
            NoTokensError: there are none.
        """
        ...


class Tally(Protocol):
    """Who counts how much of prompts was found in the cache."""

    def reused(self, pool: str, found: int, made: int) -> None:
        """Of one prompt, so many token ids were found and so many made."""
        ...
