"""A request's body into what a source of token ids needs of it."""

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from extproc.config import EngineKind
from extproc.request.apis.chat import Chat as ChatBody
from extproc.request.model import RouteKind
from extproc.tokens.values import Asked, Chat, Given, NoTokensError, Text, Wanted, Whole, Why

MAX_BODY_BYTES = 8 << 20
"""Two million tokens of text, more than any engine takes; what is longer is refused, or holds large images, which would
be sent and read once more for their names."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
_SHOWN = frozenset({"image", "input_image", "input_audio", "input_file", "document"})
"""Media as the Messages and the Responses API have them, beside parts that are neither texts nor media."""
_WITHOUT_PROMPT_IDS = ("vllm", "sglang")


class _Body(ChatBody, gc=False):
    prompt: Any = None
    input: Any = None
    prompt_embeds: Any = None
    tool_choice: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    use_beam_search: Any = None
    kv_transfer_params: Any = None


_decoder = msgspec.json.Decoder(_Body)


def read(kind: RouteKind, path: str, body: bytes, engine: EngineKind) -> Asked:
    """Read what the prompt of a request is made of.

    Args:
        kind: the API.
        path: the request's path.
        body: the request's body.
        engine: what the engines are, where that is known.

    Raises:
        NoTokensError: the body cannot be read, or holds what no source can turn into exact token ids.
    """
    if len(body) > MAX_BODY_BYTES:
        raise NoTokensError(Why.TOO_LONG)
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise NoTokensError(Why.UNREADABLE) from None
    if _is_special(fields, engine):
        raise NoTokensError(Why.UNSUPPORTED)
    lora = fields.lora_request.get("lora_name") if isinstance(fields.lora_request, dict) else None
    adapter = fields.lora_path or lora
    # TensorRT-LLM has no salt on completions: it refuses the field there.
    salted = not (engine == "tensorrt_llm" and kind is RouteKind.COMPLETION)
    wanted = _wanted(kind, path, fields, engine)
    media = [] if kind is RouteKind.COMPLETION else [*_media(fields.messages), *_media(fields.input)]
    is_whole = isinstance(wanted, Whole)
    if media and isinstance(wanted, Given):
        raise NoTokensError(Why.IMAGES)
    return Asked(
        kind=kind,
        body=body,
        wanted=wanted,
        adapter=adapter if isinstance(adapter, str) else "",
        salt=fields.cache_salt if salted and isinstance(fields.cache_salt, str) else "",
        truncated=fields.truncate_prompt_tokens is not None,
        media=any(part.get("type") in _SHOWN for part in media) if is_whole else bool(media),
        lasting=not is_whole and all(map(_is_lasting, media)),
    )


def _is_special(fields: _Body, engine: EngineKind) -> bool:
    """Whether the engine takes its prompt from elsewhere, or keeps it apart in a way that its events do not tell."""
    transferred = fields.kv_transfer_params
    return bool(
        fields.prompt_embeds is not None
        or fields.use_beam_search
        or (isinstance(transferred, dict) and "prompt_token_ids" in transferred)
        or (fields.extra_key and engine != "vllm")
        or isinstance(fields.lora_path, list)
    )


def _wanted(kind: RouteKind, path: str, fields: _Body, engine: EngineKind) -> Wanted:
    bare = path.partition("?")[0].rstrip("/")
    if kind is RouteKind.COMPLETION:
        return _completion(fields.prompt, special_tokens=fields.add_special_tokens is not False)
    if kind is RouteKind.CHAT and bare.endswith("/chat/completions"):
        if fields.prompt_token_ids is None or engine in _WITHOUT_PROMPT_IDS:
            return _chat(fields)
        return Given(packed(fields.prompt_token_ids))
    if kind is RouteKind.MESSAGES or (
        kind is RouteKind.RESPONSES and not (fields.previous_response_id or fields.conversation)
    ):
        return Whole()
    raise NoTokensError(Why.UNSUPPORTED)


def packed(ids: object) -> "array[int]":
    """Token ids as 32-bit numbers.

    Raises:
        NoTokensError: they are no list of token ids, or empty.
    """
    if not isinstance(ids, list) or not ids:
        raise NoTokensError(Why.UNREADABLE)
    try:
        return array("I", ids)
    except (TypeError, OverflowError):
        raise NoTokensError(Why.UNREADABLE) from None


def _completion(prompt: object, *, special_tokens: bool) -> Wanted:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise NoTokensError(Why.SEVERAL)
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Text(prompt, special_tokens)
    return Given(packed(prompt))


def _chat(fields: _Body) -> Chat:
    messages, given, template = fields.messages, fields.chat_template_kwargs, fields.chat_template
    if not isinstance(messages, list) or not messages or not isinstance(given, dict | None):
        raise NoTokensError(Why.UNREADABLE)
    return Chat(
        messages=messages,
        tools=fields.tools,
        tool_choice=fields.tool_choice,
        reasoning_effort=fields.reasoning_effort,
        variables=_variables(fields, given or {}),
        template=template if isinstance(template, str) else None,
        special_tokens=fields.add_special_tokens is True,
    )


def _variables(fields: _Body, given: dict[str, Any]) -> dict[str, Any]:
    """Variables of the template as vLLM merges them: fields of the body win over `chat_template_kwargs` when set.

    Whoever names an effort wants the model to think, unless it says otherwise.
    """
    fixed = {
        "add_generation_prompt": fields.add_generation_prompt is not False,
        "continue_final_message": fields.continue_final_message is True,
        "documents": fields.documents,
        "reasoning_effort": fields.reasoning_effort,
    }
    if fields.reasoning_effort is not None and "enable_thinking" not in given:
        fixed["enable_thinking"] = fields.reasoning_effort != "none"
    return given | {name: value for name, value in fixed.items() if value is not None and value != "auto"}


def _media(messages: object) -> Iterator[dict[str, Any]]:
    """Parts of messages that are no texts."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") not in _TEXT_PARTS:
                yield part


def _is_lasting(part: dict[str, Any]) -> bool:
    """Whether a part brings its medium along, in the forms that clients use."""
    kind = part.get("type")
    named = part.get(kind) if isinstance(kind, str) else None
    url = named.get("url") if isinstance(named, dict) else named
    return kind == "input_audio" or (isinstance(url, str) and url.startswith("data:"))
