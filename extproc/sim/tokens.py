"""Text to tokens without a model: four bytes are one token, so equal prefixes of text are equal prefixes of tokens.

A token id is its four bytes read as a little-endian number. Prompts are handled as bytes, never as lists of ids.
Every part of a rendered chat is padded to whole tokens, so a history that only grows gives prompts that only
grow, and an answer sent back is the very tokens that the engine generated.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import msgspec
import xxhash

from extproc.sim.bodies import Message

TOKEN_BYTES = 4
IMAGE_TOKENS = 256
"""Tokens an image, sound or file part stands for; about what a vision model makes of a small picture."""

_END = b"<|end|>\n"
_ASSISTANT = b"<|assistant|>\n\0\0"
_SYLLABLES = tuple(
    f"{a}{b}{c} ".encode() for a, b, c in product("bdfgklmn", "aeio", "lmnrstvx")
)  # 256 words of one token; the space comes last, so a client that strips an answer spoils only its last token


def padded(text: bytes) -> bytes:
    """Return `text` filled with zero bytes to whole tokens."""
    return text + b"\0" * (-len(text) % TOKEN_BYTES)


def token_count(data: bytes) -> int:
    """Return the number of tokens of padded bytes."""
    return len(data) // TOKEN_BYTES


def from_ids(ids: Iterable[int]) -> bytes:
    """Return the bytes of token ids.

    Raises:
        ValueError: an id is negative or has more than 32 bits, or is no whole number.
    """
    try:
        values = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ValueError("token ids must be whole numbers from 0 to 4294967295") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def to_ids(data: bytes) -> list[int]:
    """Return the token ids of padded bytes."""
    values = array("I", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def render_chat(
    messages: Sequence[Message], tools: Sequence[Any] | None = None, *, generation_prompt: bool = True
) -> bytes:
    """Return a chat as one prompt: the tools, then each message in its frame, then the header of the answer."""
    parts: list[bytes] = []
    if tools:
        parts += (b"<|tools|>\n\0\0", padded(msgspec.json.encode(tools)), _END)
    for message in messages:
        header = _ASSISTANT if message.role == "assistant" else padded(f"<|{message.role}|>\n".encode())
        parts += (header, _content(message), _END)
    if generation_prompt:
        parts.append(_ASSISTANT)
    return b"".join(parts)


def _content(message: Message) -> bytes:
    content = message.content
    parts: list[bytes] = []
    if isinstance(content, str):
        parts.append(padded(content.encode()))
    elif content is not None:
        parts += (_part(part) for part in content)
    extras = {"tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id, "name": message.name}
    if present := {name: value for name, value in extras.items() if value}:
        parts.append(padded(msgspec.json.encode(present)))
    return b"".join(parts)


def _part(part: dict[str, Any]) -> bytes:
    text = part.get("text")
    if isinstance(text, str):
        return padded(text.encode())
    identity = xxhash.xxh3_64_hexdigest(msgspec.json.encode(part, order="deterministic"))
    return identity.encode() * (IMAGE_TOKENS * TOKEN_BYTES // len(identity))


def block_hashes(data: bytes, block_size: int, *, adapter: str = "", salt: str = "") -> list[int]:
    """Return the chained hashes of the full blocks of `data`, 64 bits each.

    A block's hash covers its tokens and its parent's hash. Adapter and salt go into the parent of the first
    block; through the chain they part every block from its like without them.
    """
    stride = block_size * TOKEN_BYTES
    digest = xxhash.xxh3_64_intdigest
    parent = digest(f"{adapter}\0{salt}".encode()) if adapter or salt else 0
    hashes: list[int] = []
    for start in range(0, len(data) - stride + 1, stride):
        parent = digest(data[start : start + stride], parent)
        hashes.append(parent)
    return hashes


def answer(prompt: bytes, tokens: int, *, choice: int = 0, seed: int = 0) -> bytes:
    """Return the `tokens` tokens that the engine says after `prompt`: always the same for the same arguments."""
    origin = xxhash.xxh3_128_digest(prompt, seed & 0xFFFF_FFFF_FFFF_FFFF)
    return b"".join([_SYLLABLES[i] for i in hashlib.shake_128(origin + choice.to_bytes(4, "big")).digest(tokens)])


def embedding(prompt: bytes, dims: int) -> list[float]:
    """Return the unit vector that stands for `prompt`."""
    raw = [byte - 127.5 for byte in hashlib.shake_128(prompt).digest(dims)]
    norm = sum(value * value for value in raw) ** 0.5
    return [value / norm for value in raw]
