"""Request bodies of the OpenAI API as vLLM reads them; fields that change nothing here are ignored."""

from typing import Any, Literal, TypeVar

import msgspec

from extproc.sim.refusals import Refusal, bad_value, invalid

MAX_CHOICES = 16_384
"""Most answers to one prompt: vLLM's `VLLM_MAX_N_SEQUENCES`."""

_T = TypeVar("_T")


class StreamOptions(msgspec.Struct):
    """What a stream carries besides tokens."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Message(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class Sampling(msgspec.Struct, kw_only=True):
    """What chat and completions share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    seed: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = False

    @property
    def namespace(self) -> str:
        """Return what parts the request's blocks from equal ones of others; empty for nothing."""
        return self.cache_salt or ""

    @property
    def token_ids(self) -> list[int] | None:
        """Return the prompt's token ids where a chat may bring them along; None to render its messages."""
        return None

    @property
    def longest(self) -> int | None:
        """Return the most tokens that the client accepts; None if it set no limit."""
        return self.max_tokens


class ChatBody(Sampling, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    tools: list[Any] | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    mm_payload: Literal["tensors", "none"] = "tensors"
    return_mm_kwargs: bool | None = True

    @property
    def longest(self) -> int | None:
        """See `Sampling.longest`; the newer of two names wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Sampling, kw_only=True):
    """`POST /v1/completions`; without `max_tokens` an answer has 16 tokens, as OpenAI defined it."""

    prompt: str | list[Any] | None = None
    max_tokens: int | None = 16


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str = "float"
    cache_salt: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`, in either form."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


def read(kind: type[_T], body: bytes) -> _T:
    """Return `body` as a `kind`.

    Raises:
        Refusal: 400, as vLLM words it, if it is no JSON or of another shape.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(f"1 validation error:\n  {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"1 validation error:\n  JSON decode error: {error}") from error


def prompts_of(value: str | list[Any] | None) -> list[str | list[int]]:
    """Return the prompts of a `prompt` or `input` field: a text, texts, token ids, or lists of token ids.

    Raises:
        Refusal: 400 for anything else, and for no prompt at all.
    """
    if isinstance(value, str):
        return [value]
    if not value:
        raise empty_prompt()
    if all(isinstance(one, str) for one in value):
        return value
    if all(isinstance(one, int) for one in value):
        return [value]
    if all(isinstance(one, list) for one in value):
        return value
    raise invalid("1 validation error:\n  prompt must be a text, a list of texts, or lists of token ids")


def empty_prompt() -> Refusal:
    """Return the 400 for a prompt without tokens."""
    return bad_value("The decoder prompt cannot be empty")


def check(body: Sampling) -> None:
    """Refuse values that no engine accepts.

    Raises:
        Refusal: 400 naming the field.
    """
    longest = body.longest
    if longest is not None and longest < 1:
        raise bad_value(f"max_tokens must be at least 1, got {longest}.", "max_tokens", longest)
    if body.n is not None and body.n < 1:
        raise bad_value(f"n must be at least 1, got {body.n}.", "n", body.n)
    if body.n is not None and body.n > MAX_CHOICES:
        raise bad_value(f"n must be at most {MAX_CHOICES}, got {body.n}.", "n", body.n)
    if body.stream_options is not None and not body.stream:
        raise invalid("1 validation error:\n  Stream options can only be defined when `stream=True`.")
    salt = body.cache_salt
    if salt is not None and (not 0 < len(salt) <= 128 or set(salt) & set("@/\\\0")):
        raise invalid("1 validation error:\n  cache_salt must be 1 to 128 characters without @, /, \\ and NUL")
