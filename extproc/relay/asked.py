"""What a client asks for, as far as a relay needs it: whether its answer can be continued, and how it will look."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal

import msgspec

Api = Literal["chat", "completion"]
Fields = Mapping[str, msgspec.Raw]
Hindrance = Literal[
    "tools",
    "format",
    "choices",
    "logprobs",
    "echo",
    "reasoning",
    "stop",
    "beams",
    "prompt",
    "transfer",
    "size",
    "engine",
    "extras",
]
"""Why an answer cannot be continued once some of it was sent."""

PATHS: Final[Mapping[str, Api]] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
"""What is relayed, by the end of the path."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_COMPLETION_TOKENS: Final = 16
"""Length of a completion whose client names none, as OpenAI defined it; of chats it is what the context holds."""

_FORMATS: Final = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
    "json_schema", "regex", "ebnf", "structural_tag",
)  # fmt: skip
"""Fields of vLLM and SGLang that hold an answer to a grammar, beside OpenAI's `response_format`."""
_NOTHING: Final = (b"null", b"false", b"[]", b'""', b"{}", b"0")


class Asked(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        api: which API.
        fields: the top-level fields of the body, values as they were written; empty when it is no JSON object.
        stream: whether the answer is a stream.
        model: model that it names; empty for none.
        choices: answers that are asked for.
        limit: most tokens of the answer; None where the context is the limit.
        stops: texts that end the answer.
        usage: the client gets usage at the end of a stream.
        usage_always: and in each of its events.
        ids: the client itself asked for token ids.
        hindrance: why the answer cannot be continued, by the request alone; None when it can.
    """

    api: Api
    fields: Fields = {}
    stream: bool = False
    model: str = ""
    choices: int = 1
    limit: int | None = None
    stops: tuple[str, ...] = ()
    usage: bool = False
    usage_always: bool = False
    ids: bool = False
    hindrance: Hindrance | None = None

    def of_model(self, model: str) -> "Asked":
        """The same request to another model."""
        fields = {**self.fields, "model": msgspec.Raw(msgspec.json.encode(model))}
        return msgspec.structs.replace(self, model=model, fields=fields)

    def value(self, name: str) -> Any:
        """A field's value; None when it is absent or null."""
        return value_of(self.fields, name)


def read(api: Api, body: bytes, telling: AbstractSet[str] = frozenset()) -> Asked:
    """Read a request. One that cannot be read is none that streams: the engine says what is wrong with it.

    Args:
        api: which API was called.
        body: the body, without content encoding.
        telling: models whose streams report usage although the client did not ask (`ask_usage` of their pool).
    """
    try:
        fields = _fields(body)
        values = {name: value_of(fields, name) for name in ("stream", "model", "stop", "stream_options", "n")}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Asked(api)
    model = values["model"] if isinstance(values["model"], str) else ""
    options = values["stream_options"] if isinstance(values["stream_options"], dict) else {}
    told = options.get("include_usage")
    usage = bool(told) if told is not None else model in telling
    try:
        return Asked(
            api=api,
            fields=fields,
            stream=values["stream"] is True,
            model=model,
            choices=values["n"] if isinstance(values["n"], int) else 1,
            limit=_limit(api, fields),
            stops=_texts(values["stop"]),
            usage=usage,
            usage_always=usage and bool(options.get("continuous_usage_stats")),
            ids=value_of(fields, "return_token_ids") is True,
            hindrance=_hindrance(api, fields),
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Asked(api)


def value_of(fields: Fields, name: str) -> Any:
    """A field's value; None when it is absent or null. Raises msgspec.MsgspecError when it cannot be read."""
    return msgspec.json.decode(fields[name]) if name in fields else None


def _given(fields: Fields, name: str) -> bool:
    """Whether a field says anything: it is there, and neither null, false, zero nor empty."""
    return name in fields and bytes(fields[name]).replace(b" ", b"") not in _NOTHING


def _limit(api: Api, fields: Fields) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if api == "chat" else ("max_tokens",)
    for name in names:
        if isinstance(limit := value_of(fields, name), int):
            return limit
    return None if api == "chat" else _COMPLETION_TOKENS


def _texts(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = [stop]
    return tuple(text for text in stop if isinstance(text, str) and text) if isinstance(stop, list) else ()


def _hindrance(api: Api, fields: Fields) -> Hindrance | None:
    """Why an answer to this request cannot be continued; what its events will show is looked for later.

    Penalties, seeds and temperatures are no hindrance: see docs/relay.md for what they then mean.
    """
    return next((why for why, holds in _hindrances(api, fields) if holds), None)


def _hindrances(api: Api, fields: Fields) -> Iterator[tuple[Hindrance, bool]]:
    tools = _given(fields, "tools") and value_of(fields, "tool_choice") != "none"
    yield "tools", tools or _given(fields, "functions")
    form = value_of(fields, "response_format")
    yield "format", form is not None and (not isinstance(form, dict) or form.get("type") != "text")
    yield "format", any(_given(fields, name) for name in _FORMATS)
    yield "choices", any(isinstance(n := value_of(fields, name), int) and n > 1 for name in ("n", "best_of"))
    # `logprobs: 0` asks for the log probabilities of a completion's own tokens.
    yield "logprobs", _given(fields, "logprobs") or bytes(fields.get("logprobs", b"")) == b"0"
    yield "logprobs", _given(fields, "prompt_logprobs")
    yield "echo", _given(fields, "echo")
    yield "reasoning", value_of(fields, "include_reasoning") is False or _given(fields, "thinking_token_budget")
    yield "beams", _given(fields, "use_beam_search")
    yield "transfer", _given(fields, "kv_transfer_params") or _given(fields, "ec_transfer_params")
    yield "prompt", _given(fields, "suffix") or _given(fields, "prompt_embeds")
    yield "prompt", api == "completion" and prompt_of(value_of(fields, "prompt")) is None


def prompt_of(prompt: Any) -> str | list[int] | None:
    """The one prompt of a completion, as text or token ids; None when there are several, or something else."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
        return prompt
    return None
