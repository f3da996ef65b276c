"""One result of a comparison as it is kept: what `keep` allows of it, and its bytes."""

from typing import Final

import msgspec

from extproc.config_rollouts import Keep
from extproc.errors import StoreError
from extproc.shadow.answer import Answer
from extproc.shadow.compare import Comparison, digest

LONGEST_ANSWER: Final = 8_000
"""Characters of each answer that are kept, where they may be."""
LONGEST_PROMPT: Final = 16_000
"""Characters of a request's body that are kept, where they may be."""
_LONGEST_ID: Final = 128
_MOST_BYTES: Final = 60_000
"""Bytes of a result: the store takes records of 65,536 at most."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The request that both answers are to.

    Attributes:
        id: its `x-request-id`.
        at: when it came, in seconds since the epoch.
        model: its model, by the configuration's name.
        primary: version that answered the client.
        shadow: version that it was sent to as well.
        api: API that was called, as `RouteKind` names it.
        streamed: whether a stream was asked for.
        prompt_tokens: tokens of its prompt, by estimate; None where it is not known.
        body: its body as the client sent it; kept only if everything may be.
    """

    id: str
    at: float
    model: str
    primary: str
    shadow: str
    api: str
    streamed: bool
    prompt_tokens: int | None = None
    body: bytes = b""


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A comparison and what it is of; see `About`.

    Attributes:
        prompt_digest: hash of the request's body under a key: equal requests are told by it.
        compared: the comparison.
        answers: text of the client's answer and of the shadow's, cut to `LONGEST_ANSWER`; None unless they may be kept.
        prompt: the request's body, cut to `LONGEST_PROMPT`; None unless it may be kept.
    """

    id: str
    at: float
    model: str
    primary: str
    shadow: str
    api: str
    streamed: bool
    prompt_tokens: int | None = None
    prompt_digest: str = ""
    compared: Comparison
    answers: tuple[str, str] | None = None
    prompt: str | None = None


def result(about: About, comparison: Comparison, primary: Answer, shadow: Answer, keep: Keep, key: bytes) -> Result:
    """What is kept of a comparison: `metrics` no text at all, `answers` both texts, `all` the prompt too.

    Args:
        about: the request.
        comparison: what came of it.
        primary: the client's answer.
        shadow: the other one.
        keep: what may be kept.
        key: key of hashes; empty leaves them out.
    """
    texts = (primary.text[:LONGEST_ANSWER], shadow.text[:LONGEST_ANSWER])
    body = about.body.decode("utf-8", "replace")
    return Result(
        id=about.id[:_LONGEST_ID],
        at=about.at,
        model=about.model,
        primary=about.primary,
        shadow=about.shadow,
        api=about.api,
        streamed=about.streamed,
        prompt_tokens=about.prompt_tokens,
        prompt_digest=digest(key, body) if body else "",
        compared=comparison,
        answers=texts if keep in ("answers", "all") else None,
        prompt=body[:LONGEST_PROMPT] if keep == "all" else None,
    )


_pack = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder(Result).decode


def encode(result: Result) -> bytes:
    """A result as one line of JSON, without its end; texts that make it too long for the store are cut shorter."""
    line = _pack(result)
    while len(line) > _MOST_BYTES and (result.answers or result.prompt):
        result = msgspec.structs.replace(
            result,
            answers=_halved(*result.answers) if result.answers else None,
            prompt=result.prompt[: len(result.prompt) // 2] if result.prompt else None,
        )
        line = _pack(result)
    return line


def _halved(one: str, other: str) -> tuple[str, str] | None:
    return (one[: len(one) // 2], other[: len(other) // 2]) if one or other else None


def decode(line: bytes) -> Result:
    """The result that bytes stand for. Raises StoreError for others."""
    try:
        return _read(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise StoreError(f"a result of a shadow comparison cannot be read: {error}") from error
