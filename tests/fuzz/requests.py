"""Atheris target for clients' requests: every API's parser, the hashes of prompts, sessions, and what engines get.

`python -m tests.fuzz.requests -atheris_runs=50000`. An input is either taken as it is, or edits one of the good bodies
below, which reaches deeper than bytes from nothing. Anything but a value or an error of our own tree is a crash; so is
JSON that is none any more once it was changed for an engine.
"""

import contextlib
import json
import sys
from typing import Any, Final

import atheris

from tests.edits import edited

with atheris.instrument_imports(include=["extproc.request", "extproc.engines.fit", "extproc.tokens.asked"]):
    from extproc.config import EngineKind
    from extproc.engines import fit
    from extproc.engines.fit import Wanted
    from extproc.errors import WarmpathError
    from extproc.request.blocks import chain
    from extproc.request.session import pin_key
    from extproc.request.shapes import parse, peek
    from extproc.tokens import asked

_CHAT: Final[dict[str, Any]] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You are \u00e9\U0001f600 terse."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "d:1"}}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "stream": True,
    "n": 2,
    "max_tokens": 9,
    "priority": -3,
    "cache_salt": "s",
    "user": "u",
    "metadata": {"user_id": '{"session_id":"x"}'},
}
_GOOD: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/chat/completions", _CHAT),
    ("/v1/completions", {"model": "m", "prompt": ["a", [1, 2, 3]], "suffix": "b", "echo": True}),
    ("/v1/messages", {"model": "m", "system": [{"type": "text", "text": "s"}], "messages": _CHAT["messages"][:2]}),
    ("/v1/responses", {"model": "m", "input": "hello", "instructions": "i", "previous_response_id": "resp_1"}),
    ("/v1/embeddings", {"model": "m", "input": [[1, 2], [3]], "dimensions": 8}),
    ("/v1/rerank", {"model": "m", "query": "q", "documents": ["a", {"text": "b"}]}),
    ("/v1/score", {"model": "m", "text_1": "a", "text_2": ["b"]}),
    ("/v1/models", {}),
)
_TRICKS: Final = (
    b"1e999",
    b"-0",
    b"9" * 400,
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b"\xff\xfe",
    b"[" * 300,
    b'{"a":' * 200,
    b'"messages":1,',
    b'"model":"n",',
    b"NaN",
    b"null",
    b"\x00",
)
_HEADERS: Final = ("x-session-id", "session_id", "x-warmpath-priority", "x-warmpath-tenant", "x-claude-code-session-id")
_KINDS: Final[tuple[EngineKind, ...]] = ("vllm", "sglang", "tensorrt_llm")
_LONGEST: Final = 8192
_BLOCK_BYTES: Final = 64


def one_input(data: bytes) -> None:
    """Run one request through all that reads it; its first bytes say which, and how it is to be used."""
    provider = atheris.FuzzedDataProvider(data)
    path, good = _GOOD[provider.ConsumeIntInRange(0, len(_GOOD) - 1)]
    headers = {name: provider.ConsumeUnicode(24) for name in _HEADERS[: provider.ConsumeIntInRange(0, len(_HEADERS))]}
    kind = _KINDS[provider.ConsumeIntInRange(0, 2)]
    if provider.ConsumeBool():
        body = edited(provider, json.dumps(good).encode(), _TRICKS)
    else:
        body = provider.ConsumeBytes(_LONGEST)
    request = parse(path, headers, body)
    peek(path, headers, body)
    chain(request.segments, request.salt, _BLOCK_BYTES)
    if request.session:
        pin_key(b"secret", "main", request.session)
    with contextlib.suppress(WarmpathError):
        asked.read(request.kind, path, body, kind)
    with contextlib.suppress(WarmpathError):
        fitted = fit.fit(body, request.kind.value, Wanted(kind, "other", usage=True))
        if fitted is not None:
            assert _is_object(fitted.body) or not _is_object(body)


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def main() -> None:
    """Fuzz until the flags on the command line say to stop."""
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
