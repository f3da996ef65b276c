"""Text to tokens without a model: four bytes are one token, so equal prefixes of text are equal prefixes of tokens.

A token id is its four bytes read as a little-endian number. Prompts are handled as bytes, never as lists of ids.
Every part of a rendered chat is padded to whole tokens, so a history that only grows gives prompts that only
grow, and an answer sent back is the very tokens that the engine generated.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import msgspec
import xxhash

from extproc.sim.bodies import Message

TOKEN_BYTES = 4
IMAGE_TOKENS = 256
"""Tokens an image, sound or file part stands for; about what a vision model makes of a small picture."""

PLACEHOLDER = b"\0im\0"
"""The token of all images, sounds and files where the engine names them apart from their tokens."""

_END = b"<|end|>\n"
ANSWER_HEADER = b"<|assistant|>\n\0\0"
"""What stands in front of an answer in a chat, and in front of each message of the assistant."""
_SYLLABLES = tuple(
    f"{a}{b}{c} ".encode() for a, b, c in product("bdfgklmn", "aeio", "lmnrstvx")
)  # 256 words of one token; the space comes last, so a client that strips an answer spoils only its last token
SYLLABLES = frozenset(_SYLLABLES)
"""All tokens that answers are made of."""


@dataclass(frozen=True, slots=True)
class Medium:
    """An image, a sound or a file in a prompt, `IMAGE_TOKENS` long.

    Attributes:
        identifier: what tells it from others.
        kind: `image`, `audio` or `video`.
        offset: its first token.
    """

    identifier: str
    kind: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt.

    Attributes:
        data: its tokens, those of media all alike.
        media: its images, sounds and files, in order.
    """

    data: bytes
    media: tuple[Medium, ...] = ()

    @property
    def spelled(self) -> bytes:
        """The same with tokens for each medium that are its own, as SGLang has them."""
        data, size = bytearray(self.data), IMAGE_TOKENS * TOKEN_BYTES
        for one in self.media:
            name = xxhash.xxh3_64_hexdigest(one.identifier.encode()).encode()
            start = one.offset * TOKEN_BYTES
            data[start : start + size] = name * (size // len(name))
        return bytes(data)


def padded(text: bytes) -> bytes:
    """Return `text` filled with zero bytes to whole tokens."""
    return text + b"\0" * (-len(text) % TOKEN_BYTES)


def token_count(data: bytes | bytearray) -> int:
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


def render(
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    generation_prompt: bool = True,
    open_ended: bool = False,
) -> Prompt:
    """Return a chat as one prompt: the tools, then each message in its frame, then the header of the answer.

    An `open_ended` chat has no end of its last message, which the answer then continues.
    """
    parts: list[bytes | Medium] = []
    if tools:
        parts += (b"<|tools|>\n\0\0", padded(msgspec.json.encode(tools)), _END)
    for message in messages:
        header = ANSWER_HEADER if message.role == "assistant" else padded(f"<|{message.role}|>\n".encode())
        parts += (header, *_content(message), _END)
    if open_ended:
        parts.pop()
    if generation_prompt:
        parts.append(ANSWER_HEADER)
    data, media = bytearray(), []
    for part in parts:
        if isinstance(part, Medium):
            media.append(replace(part, offset=token_count(data)))
            data += PLACEHOLDER * IMAGE_TOKENS
        else:
            data += part
    return Prompt(bytes(data), tuple(media))


def render_chat(
    messages: Sequence[Message], tools: Sequence[Any] | None = None, *, generation_prompt: bool = True
) -> bytes:
    """Return a chat as `render` does, with images spelled out."""
    return render(messages, tools, generation_prompt=generation_prompt).spelled


def _content(message: Message) -> list[bytes | Medium]:
    content = message.content
    parts: list[bytes | Medium] = []
    if isinstance(content, str):
        parts.append(padded(content.encode()))
    elif content is not None:
        parts += (_part(part) for part in content)
    extras = {"tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id, "name": message.name}
    if present := {name: value for name, value in extras.items() if value}:
        parts.append(padded(msgspec.json.encode(present)))
    return parts


def _part(part: dict[str, Any]) -> bytes | Medium:
    """The tokens of a text; a medium goes by its `uuid`, else by a hash of what it is, as in vLLM."""
    text = part.get("text")
    if isinstance(text, str):
        return padded(text.encode())
    name = part.get("uuid")
    if not isinstance(name, str) or not name:
        name = hashlib.sha256(msgspec.json.encode(part, order="deterministic")).hexdigest()
    kind = str(part.get("type"))
    return Medium(name, next((one for one in ("audio", "video") if one in kind), "image"))


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
    return answer_from(xxhash.xxh3_128_digest(prompt, seed & 0xFFFF_FFFF_FFFF_FFFF), tokens, choice=choice)


def answer_from(origin: bytes, tokens: int, *, choice: int = 0) -> bytes:
    """As `answer`, from the digest of the prompt under the seed."""
    return b"".join([_SYLLABLES[i] for i in hashlib.shake_128(origin + choice.to_bytes(4, "big")).digest(tokens)])


def embedding(prompt: bytes, dims: int) -> list[float]:
    """Return the unit vector that stands for `prompt`."""
    raw = [byte - 127.5 for byte in hashlib.shake_128(prompt).digest(dims)]
    norm = sum(value * value for value in raw) ** 0.5
    return [value / norm for value in raw]
