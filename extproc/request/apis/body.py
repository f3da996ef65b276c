"""The fields that bodies of all APIs share, and what separates two equal prompts."""

from typing import Any

import msgspec

from extproc.request.canonical import json_bytes, text_bytes
from extproc.request.prompt import Lead


class Body(msgspec.Struct, gc=False):
    """What every API may carry. Nothing is typed: a field of the wrong type must not spoil the others.

    Read by itself it skips the prompt, whatever its size.
    """

    model: Any = None
    stream: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    priority: Any = None
    # What separates caches: cache_salt everywhere, the next two in SGLang, the last in TensorRT-LLM.
    cache_salt: Any = None
    extra_key: Any = None
    lora_path: Any = None
    lora_request: Any = None
    # What names a session or a stored response.
    session_id: Any = None
    conversation_params: Any = None
    metadata: Any = None
    user: Any = None
    conversation: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None
    request_id: Any = None


class Tokenized(Body, gc=False):
    """What the APIs of prompts without a conversation share."""

    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None


class Templated(Tokenized, gc=False):
    """What the APIs share whose prompts a chat template renders."""

    chat_template: Any = None
    chat_template_kwargs: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


def salt_of(body: Body) -> bytes:
    """Return what separates otherwise equal prompts: two salts never share a block.

    It holds the model by the name the client wrote, because the name chooses the adapter: vLLM takes an adapter's
    name for the model, SGLang `base:adapter`. Two names of the same weights therefore share nothing here, although
    they would in the engine; give clients one name where that matters. The adapter may also be a field of its own
    (`lora_path` of SGLang, `lora_request.lora_name` of TensorRT-LLM), and `cache_salt` and SGLang's `extra_key`
    separate caches on purpose.

    Each value stands behind a letter and its length, so that no two sets of values give the same bytes. A value that
    no engine accepts counts as not sent.
    """
    adapter = body.lora_request.get("lora_name") if isinstance(body.lora_request, dict) else None
    framed: list[bytes] = []
    for letter, value in (
        (b"m", body.model),
        (b"s", body.cache_salt),
        (b"x", body.extra_key),
        (b"p", body.lora_path),
        (b"l", adapter),
    ):
        if value and isinstance(value, str | list):
            # SGLang takes a list for a batch: one value a prompt.
            encoded = text_bytes(value) if isinstance(value, str) else json_bytes(value)
            framed += letter, len(encoded).to_bytes(4, "big"), encoded
    return b"".join(framed)


def tokenized_lead(body: Tokenized, *, special_tokens: bool) -> Lead:
    """Return the lead of prompts without a conversation.

    Args:
        body: the body.
        special_tokens: whether the API adds special tokens when the body does not say.
    """
    return Lead(special_tokens=_unlike(special_tokens, body.add_special_tokens), truncation=_truncation(body))


def templated_lead(
    body: Templated, *, effort: object = None, documents: object = None, tools: object = None, history: object = None
) -> Lead:
    """Return the lead of a conversation; chat templates write special tokens themselves, so none are added."""
    return Lead(
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=effort,
        media_kwargs=_media_kwargs(body),
        special_tokens=_unlike(False, body.add_special_tokens),
        truncation=_truncation(body),
        documents=documents,
        tools=tools,
        history=history,
    )


def _unlike(default: bool, value: object) -> bool | None:
    return value if isinstance(value, bool) and value is not default else None


def _truncation(body: Tokenized) -> object:
    limit = body.truncate_prompt_tokens
    return None if limit is None else [limit, body.truncation_side]


def _media_kwargs(body: Templated) -> object:
    kwargs = {"processor": body.mm_processor_kwargs, "io": body.media_io_kwargs}
    return {name: value for name, value in kwargs.items() if value} or None
