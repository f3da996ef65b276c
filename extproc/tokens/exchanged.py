"""What is sent to servers for the ids of a prompt, and what they answer."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, TypeVar

import msgspec
from xxhash import xxh3_128_digest

from extproc.config import EngineKind
from extproc.request.model import RouteKind
from extproc.state.exact_blocks import Medium
from extproc.tokens.http import Answer
from extproc.tokens.values import Asked, Chat, Made, NoTokensError, Text, Why

T = TypeVar("T")


class _Range(msgspec.Struct):
    """Where a medium stands among the ids."""

    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=0)]


class _Features(msgspec.Struct):
    """Images, sounds and films, by their kind (`entrypoints/scale_out/token_in_token_out/protocol.py` of vLLM)."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_rendered = msgspec.json.Decoder(_Rendered)
_rendered_list = msgspec.json.Decoder(list[_Rendered])
_tokenized = msgspec.json.Decoder(_Tokenized)


class Bodies(msgspec.Struct, frozen=True):
    """What is sent for a prompt.

    Attributes:
        render: to a render route; None where the engine has none.
        tokenize: to a tokenize route; None for what that cannot tell exactly.
        key: hash of all that the ids follow from.
    """

    render: bytes | None
    tokenize: bytes | None
    key: bytes


def bodies_of(asked: Asked, engine: EngineKind) -> Bodies:
    """Write the bodies that a kind of engine may be sent.

    Raises:
        NoTokensError: there is none.
    """
    render = render_body(asked) if engine in ("auto", "vllm") else None
    tokenize = tokenize_body(asked, engine)
    prompt = tokenize or render
    if prompt is None:
        raise NoTokensError(Why.IMAGES if asked.media else Why.UNSUPPORTED)
    return Bodies(render, tokenize, xxh3_128_digest(asked.kind.encode() + b"\0" + prompt))


def render_body(asked: Asked) -> bytes:
    """The body of a request for a render route: the client's own, with the model's name at the engine.

    `mm_payload`, and in older versions `return_mm_kwargs`, leaves out the tensors of images, not their hashes. What is
    streamed or sampled does not matter to the prompt.

    Raises:
        NoTokensError: the body is no JSON object.
    """
    try:
        fields = msgspec.json.decode(asked.body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise NoTokensError(Why.UNREADABLE) from None
    fields |= {"mm_payload": "none", "return_mm_kwargs": False}
    _name_model(fields, asked.model)
    return msgspec.json.encode(fields)


def tokenize_body(asked: Asked, engine: EngineKind) -> bytes | None:
    """The body of a request for `/tokenize`; None for what that route cannot tell exactly."""
    if asked.truncated or asked.media:
        return None
    match asked.wanted:
        case Text(text, _) if engine == "tensorrt_llm":
            return msgspec.json.encode({"prompt": text})
        case Text(text, special_tokens):
            fields: dict[str, Any] = {"prompt": text, "add_special_tokens": special_tokens}
        case Chat() as chat if engine != "tensorrt_llm":
            fields = _chat_fields(chat)
        case _:
            return None
    _name_model(fields, asked.model)
    return msgspec.json.encode(fields)


def _chat_fields(chat: Chat) -> dict[str, Any]:
    """A conversation for `/tokenize`, which has no documents and no effort: the template gets them as variables.

    vLLM passes over the last two fields, SGLang reads them.
    """
    own = ("add_generation_prompt", "continue_final_message")
    fields: dict[str, Any] = {
        "messages": [_with_reasoning(message) for message in chat.messages],
        "add_special_tokens": chat.special_tokens,
        **{name: chat.variables[name] for name in own},
    }
    optional = {
        "tools": chat.tools,
        "chat_template": chat.template,
        "chat_template_kwargs": {name: value for name, value in chat.variables.items() if name not in own} or None,
        "tool_choice": chat.tool_choice,
        "reasoning_effort": chat.reasoning_effort,
    }
    return fields | {name: value for name, value in optional.items() if value is not None}


def _with_reasoning(message: Any) -> Any:
    """A message with its thoughts by both names: vLLM's chat API renames the older one, `/tokenize` passes over it."""
    thought = message.get("reasoning_content") if isinstance(message, dict) else None
    if thought is None or message.get("reasoning") is not None:
        return message
    return {**message, "reasoning": thought}


def _name_model(fields: dict[str, Any], model: str) -> None:
    """An engine takes a request that names no model for its base model, whose tokens those of its adapters are."""
    fields.pop("model", None)
    if model:
        fields["model"] = model


def of_render(asked: Asked, answer: Answer) -> Made:
    """What a render route answered.

    Raises:
        NoTokensError: the server refused the prompt, failed, answered with several prompts, or did not name the media
            that the prompt shows.
    """
    several = asked.kind is RouteKind.COMPLETION
    found = _decoded(_rendered_list, answer) if several else [_decoded(_rendered, answer)]
    if len(found) != 1:
        raise NoTokensError(Why.SEVERAL)
    ids, features = _packed(found[0].token_ids), found[0].features
    if features is None and asked.media:
        raise NoTokensError(Why.IMAGES)
    return Made(ids, () if features is None else _media(features, len(ids)))


def _media(features: _Features, ids: int) -> Sequence[Medium]:
    """Media as vLLM orders them: by offset, and those of one by the order of the answer (`argsort_mm_positions`)."""
    if features.mm_hashes.keys() != features.mm_placeholders.keys():
        raise NoTokensError(Why.FAILED)
    media = list(chain.from_iterable(_of_kind(features, kind) for kind in features.mm_placeholders))
    if any(each.offset + each.tokens > ids for each in media):
        raise NoTokensError(Why.FAILED)
    return tuple(sorted(media, key=attrgetter("offset")))


def _of_kind(features: _Features, kind: str) -> Iterator[Medium]:
    names, ranges = features.mm_hashes[kind], features.mm_placeholders[kind]
    if len(names) != len(ranges):
        raise NoTokensError(Why.FAILED)
    return (Medium(name, each.offset, each.length) for name, each in zip(names, ranges, strict=True))


def of_tokenize(answer: Answer) -> Made:
    """What a tokenize route answered.

    Raises:
        NoTokensError: the server refused the prompt or failed.
    """
    return Made(_packed(_decoded(_tokenized, answer).tokens))


def _decoded(decoder: msgspec.json.Decoder[T], answer: Answer) -> T:
    if answer.status in (400, 422):
        raise NoTokensError(Why.REFUSED)
    if answer.status != 200:
        raise NoTokensError(Why.FAILED)
    try:
        return decoder.decode(answer.body)
    except (msgspec.DecodeError, RecursionError):
        raise NoTokensError(Why.FAILED) from None


def _packed(ids: list[int]) -> "array[int]":
    try:
        return array("I", ids)
    except OverflowError:
        raise NoTokensError(Why.FAILED) from None
