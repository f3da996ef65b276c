"""The text of an engine that decodes greedily, and the JSON that it comes in.

Each token follows from all text before it, prompt included, so an answer can be continued by any engine from any place
and comes out the same.
"""

import json
from collections.abc import Iterator
from typing import Any

import xxhash

MODEL = "sim"

_ENDS_ONE_IN = 32
"""Without `max_tokens`, one token in so many ends the answer."""
_MOST_TOKENS = 100_000
_BYTES_A_TOKEN = 4
_WORDS = ("the", "of", "to", "é", "日本", "🙂", '"', "\\", "{", "a", "in", "that", "1", "\n", "is", "on")


def prompt_of(body: dict[str, Any]) -> str:
    """The text that the answer continues: the prompt, or the messages as a template renders them.

    Raises KeyError, TypeError or ValueError for a body that has none.
    """
    if "messages" not in body:
        prompt = body["prompt"]
        if not isinstance(prompt, str):
            raise TypeError("one prompt of text")
        return prompt
    messages = [(str(each["role"]), _content(each.get("content"))) for each in body["messages"]]
    continued = ""
    if body.get("continue_final_message"):
        role, continued = messages.pop()
        if role != "assistant":
            raise ValueError("the final message is not the assistant's")
    return "".join(f"<{role}>{said}\n" for role, said in messages) + "<assistant>" + continued


def tokens_after(text: str) -> Iterator[tuple[str, bool]]:
    """Tokens that follow a text without end, and whether each may be the last."""
    state = xxhash.xxh3_64(text.encode("utf-8", "surrogatepass"))
    while True:
        number = state.intdigest()
        token = f"{_WORDS[number % len(_WORDS)]} " if number & 0x100 else _WORDS[number % len(_WORDS)]
        state.update(token.encode())
        yield token, (number >> 16) % _ENDS_ONE_IN == 0


def answer_of(body: dict[str, Any], text: str, tokens: int | None = None) -> tuple[list[str], str]:
    """The answer to a request whose prompt is `text`: its tokens, and its finish reason.

    Args:
        body: the request.
        text: see `prompt_of`.
        tokens: length that stands for the request's own; without any, the answer ends by itself.
    """
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    limit = tokens if tokens is not None else asked
    pieces: list[str] = []
    for token, ends in tokens_after(text):
        if len(pieces) >= (_MOST_TOKENS if limit is None else limit):
            break
        pieces.append(token)
        if limit is None and ends:
            return pieces, "stop"
    return pieces, "length"


def text_of(body: dict[str, Any], tokens: int | None = None) -> str:
    """The whole text that a healthy engine answers to a request."""
    return "".join(answer_of(body, prompt_of(body), tokens)[0])


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content)


def about(*, chat: bool, stream: bool) -> dict[str, Any]:
    """What every answer, or every chunk of one, begins with."""
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    return {"id": "chatcmpl-1" if chat else "cmpl-1", "object": kind, "created": 1, "model": MODEL}


def usage(text: str, pieces: list[str]) -> dict[str, Any]:
    """`usage` of an answer of these tokens to a prompt of this text."""
    prompt = max(1, len(text.encode("utf-8", "surrogatepass")) // _BYTES_A_TOKEN)
    total = prompt + len(pieces)
    details = {"cached_tokens": 0}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": len(pieces),
        "total_tokens": total,
        "prompt_tokens_details": details,
    }


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
