"""Images, sounds, films and files: what tells two of them apart, and how much of a prompt each takes up."""

from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_128_hexdigest

from extproc.request.canonical import json_bytes, text_bytes

_LONG_URL = 512

# Sizes are counted at four bytes a token, the ratio that holds for text; only an engine knows the true ones.
_BYTES_PER_TOKEN = 4
# 24 x 24 patches of 14 pixels: a picture of 336 x 336, as LLaVA-1.5 encodes every image.
_IMAGE_TOKENS = 24 * 24
# Whisper's window of 30 s at the 25 embeddings a second that Qwen2-Audio leaves of it.
_AUDIO_TOKENS = 30 * 25
# The 32 frames that vLLM samples by default, at the 196 tokens LLaVA-OneVision gives a frame.
_VIDEO_TOKENS = 32 * 196
# One page, as Anthropic's documentation of PDF support counts it at the least.
_FILE_TOKENS = 1500

_TOKENS = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_embeds"), _IMAGE_TOKENS),
    **dict.fromkeys(("input_audio", "audio_url", "audio_embeds"), _AUDIO_TOKENS),
    "video_url": _VIDEO_TOKENS,
    **dict.fromkeys(("file", "input_file", "document"), _FILE_TOKENS),
}

PADDED_BYTES = 4 << 20
"""All padding of one request together: a million tokens, the longest contexts that engines are given. Without a limit,
a body of 7.4 MB in 200,000 films would be a prompt of 5 GB."""

# Fields that describe what a part carries, and carry nothing themselves.
_DESCRIBING = frozenset({"type", "cache_control", "detail", "format", "media_type", "filename", "title", "context"})

# What an engine does not read of a part: clients move their cache_control mark from turn to turn.
_UNREAD = frozenset({"cache_control"})
_UNREAD_IMAGE = _UNREAD | {"type", "image_url"}


class Room:
    """What is left of the padding of one request; parts use it up in the order the engine renders them.

    The limit is the same for every request, so that a conversation that grows keeps the bytes it began with.
    """

    __slots__ = ("_left",)

    def __init__(self, padded_bytes: int = PADDED_BYTES) -> None:
        self._left = padded_bytes

    def take(self, wanted: int) -> int:
        """Use up `wanted` bytes, or what is left of them, and return how many."""
        taken = min(wanted, self._left)
        self._left -= taken
        return taken


def media_bytes(part: Mapping[str, Any], room: Room) -> bytes:
    """Return what stands for a part that is no text: a digest of it, filled up to the room its tokens take.

    Another picture gives other bytes from its first one on, and so another hash for the block it begins in and every
    later one. Zero bytes fill the rest, so that sizes and the place of what follows are about right. A part that
    carries nothing, and one for which no room is left, is its digest alone.

    Args:
        part: a part of a message's content. Kinds that are not known take no room beyond their identity.
        room: what the padding is taken from.
    """
    kind = part.get("type")
    tokens = _TOKENS.get(kind, 0) if isinstance(kind, str) else 0
    identity = _image(part) if tokens == _IMAGE_TOKENS else _read(part, _UNREAD)
    digest = xxh3_128_hexdigest(json_bytes(identity, in_order=False)).encode()
    if not tokens or not _carries(part):
        return digest
    return digest + bytes(room.take(tokens * _BYTES_PER_TOKEN - len(digest)))


def _carries(fields: Mapping[str, Any]) -> bool:
    """Whether there is any data, URL or name of something stored, at whatever depth the API puts it."""
    return any(
        _carries(value) if isinstance(value, dict) else value for key, value in fields.items() if key not in _DESCRIBING
    )


def _image(part: Mapping[str, Any]) -> dict[str, Any]:
    """One identity for an image in each API's spelling: its URL, or a hash of the data the URL carries."""
    source = part.get("image_url")
    fields = _read(part, _UNREAD_IMAGE)
    if isinstance(source, dict):
        fields.update(source)
    elif source is not None:
        fields["url"] = source
    if fields.get("detail") == "auto":
        del fields["detail"]
    url = fields.get("url")
    if isinstance(url, str) and len(url) > _LONG_URL:
        # Hashed by itself first: text of megabytes is hashed faster than it is written as JSON.
        del fields["url"]
        fields["hash"] = xxh3_128_hexdigest(text_bytes(url))
    return fields


def _read(part: Mapping[str, Any], unread: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in unread and value is not None}
