"""The one value that every API call becomes; the rest of the system sees nothing else of a request."""

from enum import StrEnum
from typing import Final

import msgspec


class RouteKind(StrEnum):
    """Which API was called. `OTHER` is anything that is picked by load alone."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    SCORE = "score"
    OTHER = "other"


OPENED_EARLY: Final = frozenset({RouteKind.RESPONSES.value})
"""APIs whose streams open with events that stand for no token. vLLM (0.32) sends `response.created` before the prefill:
8 to 51 ms after the request for prompts that took it 340 to 780 ms, which made endpoints look twenty times faster."""


class Request(msgspec.Struct, frozen=True, gc=False):
    """One API call, reduced to what a decision needs.

    Attributes:
        kind: the API.
        model: model name as the client wrote it; empty when the body names none or could not be read.
        tenant: tenant as Envoy's authentication set it; empty when there is none.
        session: raw session id from a header or body field; empty when there is none. Never logged or stored.
        priority: as vLLM means it: lower is served first; 0 is normal.
        stream: whether the client asked for a streamed answer.
        max_tokens: limit of generated tokens, when the client set one.
        n: number of answers asked for, at least 1.
        segments: canonical prompt bytes in the order the engine renders them; an append-only conversation
            extends this sequence and never changes its beginning.
        opening: how many segments stand before a stored history: a request that continues a response repeats them, and
            the engine takes them in place of the stored ones.
        salt: what separates otherwise equal prompts (adapter, cache_salt), part of the first block's hash.
        turn: identity of the conversation so far, this request's messages included: a digest of 16 bytes; empty
            when the request is no conversation.
        follows: the `turn` of the request whose answer this one continues; empty for a first turn.
        previous_response: id of the stored response that this request continues (Responses API); empty without.
        response: id that the client chose for its response itself; empty when it left that to the engine.
        flaw: why the body could not be read, from a closed set; empty when it could.
    """

    kind: RouteKind = RouteKind.OTHER
    model: str = ""
    tenant: str = ""
    session: str = ""
    priority: int = 0
    stream: bool = False
    max_tokens: int | None = None
    n: int = 1
    segments: tuple[bytes, ...] = ()
    opening: int = 0
    salt: bytes = b""
    turn: bytes = b""
    follows: bytes = b""
    previous_response: str = ""
    response: str = ""
    flaw: str = ""

    @property
    def prompt_bytes(self) -> int:
        """Length of the canonical prompt in bytes."""
        return sum(map(len, self.segments))

    @property
    def opening_bytes(self) -> int:
        """Length in bytes of what a continued response repeats."""
        return sum(map(len, self.segments[: self.opening]))
