"""Prompts without text: lengths and chained block hashes that share and part exactly as texts would."""

from array import array

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_digest


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a prompt.

    Attributes:
        tokens: its length.
        blocks: chained 64-bit hashes of its full blocks, `array('Q')`.
        identity: hash of everything in it, the tokens behind the last full block included.
    """

    tokens: int = 0
    blocks: "array[int]" = array("Q")
    identity: int = 0


def grown(prompt: Prompt, tokens: int, key: bytes, block_tokens: int) -> Prompt:
    """Return `prompt` with the first `tokens` tokens of an endless text behind it that `key` stands for.

    Behind equal prompts, equal keys give equal blocks as far as both reach, and other keys give none in common: a
    block that begins in the prompt and ends in the text belongs to both, as on an engine.

    Args:
        prompt: what stands in front; left as it is.
        tokens: how much of the text.
        key: identity of the text.
        block_tokens: tokens of a block.
    """
    total = prompt.tokens + tokens
    blocks = prompt.blocks[:]
    parent = begin = xxh3_64_intdigest(key, prompt.identity)
    for _ in range(total // block_tokens - len(blocks)):
        parent = xxh3_64_intdigest(key, parent)
        blocks.append(parent)
    return Prompt(total, blocks, xxh3_64_intdigest(tokens.to_bytes(8, "little"), begin))


def turn_id(conversation: str, turn: int) -> bytes:
    """Return the identity of a conversation after its `turn`-th request: 16 bytes."""
    return xxh3_128_digest(f"{conversation}\0{turn}".encode())
