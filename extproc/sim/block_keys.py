"""The names engines give to blocks of tokens: chained hashes, each engine by its own recipe.

A key is what the chain goes on from; `wire` turns it into what events carry.
"""

import hashlib
import pickle
from typing import Protocol

from extproc.sim.profiles import Profile
from extproc.sim.sequence import Content
from extproc.sim.tokens import to_ids, token_count

Key = bytes | int
Wire = bytes | int
"""A hash as events carry it."""
Extra = str | tuple[str, int]
"""What beside tokens is in a block's hash: a name, or that of a medium with its place in the block."""

_CONSTANT_SEED = "vllm-none-hash"
_MASK = (1 << 64) - 1
_MIX = 0x9E37_79B9


class Keys(Protocol):
    """How one engine names blocks."""

    def key(self, parent: Key | None, block: bytes, content: Content, start: int = 0) -> Key:
        """Return the key of `block`, the tokens of one block, after `parent` (None: it begins a prompt).

        Args:
            parent: key of the block before it.
            block: its tokens.
            content: what it is part of.
            start: the place of its first token there.
        """
        ...

    def wire(self, key: Key, content: Content) -> Wire:
        """Return what events call that block."""
        ...


def extras(profile: Profile, content: Content, start: int, stop: int, *, first: bool) -> tuple[Extra, ...]:
    """Return what beside tokens is in a block's hash, as vLLM publishes it: adapter, media, then the first one's salt.

    Args:
        profile: whose.
        content: what the block is part of.
        start: its first token there.
        stop: the token behind its last one.
        first: whether it begins a prompt.
    """
    adapter = () if content.adapter is None else (content.adapter.name,)
    media: list[Extra] = [*content.keys(start, stop)]
    if not profile.media_places:
        media = [name for name, _ in content.keys(start, stop)]
    return (*adapter, *media, content.salt) if content.salt and first else (*adapter, *media)


class VllmKeys:
    """vLLM's `sha256` (`vllm/v1/core/kv_cache_utils.py`): SHA-256 of the pickled parent, tokens and extra keys."""

    def __init__(self, profile: Profile, entropy: bytes, *, int_hashes: bool) -> None:
        """`entropy` is the origin of all hashes in versions that begin each start with another one."""
        self._origin = _pickled(_CONSTANT_SEED) if profile.constant_seed else entropy
        self._profile = profile
        self._int_hashes = int_hashes

    def key(self, parent: Key | None, block: bytes, content: Content, start: int = 0) -> Key:
        """See `Keys.key`."""
        stop = start + token_count(block)
        entered: tuple[object, ...] = extras(self._profile, content, start, stop, first=parent is None)
        if self._profile.tagged_extras:
            adapter = content.adapter
            lora = () if adapter is None else (("lora", adapter.name, adapter.path),)
            media = [("mm", *each) for each in content.keys(start, stop)]
            salt = (("cache_salt", content.salt),) if content.salt and parent is None else ()
            entered = (*lora, *media, *salt)
        return _pickled((self._origin if parent is None else parent, tuple(to_ids(block)), entered or None))

    def wire(self, key: Key, content: Content) -> Wire:
        """See `Keys.wire`: the low 64 bits, read big-endian."""
        del content
        if isinstance(key, int) or not self._int_hashes:
            return key
        return int.from_bytes(key[-8:], "big")


class SglangKeys:
    """SGLang's chain of SHA-256 over 4-byte tokens; the wire has the first 8 bytes as a signed number.

    Blocks of an adapter or under a salt are renamed by the hash of their namespace.
    """

    def key(self, parent: Key | None, block: bytes, content: Content, start: int = 0) -> Key:
        """See `Keys.key`."""
        del content, start
        prior = parent if isinstance(parent, bytes) else b""
        return hashlib.sha256(prior + block).digest()

    def wire(self, key: Key, content: Content) -> Wire:
        """See `Keys.wire`."""
        head = key[:8] if isinstance(key, bytes) else key.to_bytes(8, "big")
        if content.adapter is not None or content.salt:
            name = "" if content.adapter is None else content.adapter.name
            seed = hashlib.sha256(b"sglang-kv-event-namespace-v1" + f"{name}\0{content.salt}".encode()).digest()
            head = hashlib.sha256(seed + head).digest()[:8]
        return int.from_bytes(head, "big", signed=True)


class TrtllmKeys:
    """TensorRT-LLM's `v1_block_key` (`cpp/tensorrt_llm/batch_manager/blockKey.cpp`): 64 bits, no cryptography."""

    def key(self, parent: Key | None, block: bytes, content: Content, start: int = 0) -> Key:
        """See `Keys.key`."""
        del start
        tokens = to_ids(block)
        before = parent if isinstance(parent, int) else 0
        seed = len(tokens) ^ (before * 0xBF58_476D_1CE4_E5B9 & _MASK)
        if not before and content.salt:
            digest = hashlib.sha256(content.salt.encode()).digest()
            seed = _mix_64(int.from_bytes(digest[:8], "little"), seed)
        for token in tokens:
            seed = _mix_32(token, seed)
        return seed if content.adapter is None else _mix_64(content.adapter.id, seed)

    def wire(self, key: Key, content: Content) -> Wire:
        """See `Keys.wire`: the key itself."""
        del content
        return key


def keys_of(profile: Profile, entropy: bytes, *, int_hashes: bool = True) -> Keys:
    """Return how an engine of `profile` names blocks; `entropy` is 32 random bytes of this start."""
    if profile.engine == "trtllm":
        return TrtllmKeys()
    if profile.engine == "sglang":
        return SglangKeys()
    return VllmKeys(profile, entropy, int_hashes=int_hashes)


def _pickled(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _mix_32(value: int, seed: int) -> int:
    value = ((value >> 16) ^ value) * 0x45D9_F3B & 0xFFFF_FFFF
    value = ((value >> 16) ^ value) * 0x45D9_F3B & 0xFFFF_FFFF
    value = (value >> 16) ^ value
    return (seed ^ ((value + _MIX & 0xFFFF_FFFF) + (seed << 6) + (seed >> 2))) & _MASK


def _mix_64(value: int, seed: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB & _MASK
    value ^= value >> 31
    return (seed ^ (value + _MIX + (seed << 6) + (seed >> 2))) & _MASK
