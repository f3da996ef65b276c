"""Texts and JSON values as canonical bytes: one spelling for each value."""

import json

import msgspec

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def text_bytes(text: str) -> bytes:
    """Return the UTF-8 of a text; half surrogate pairs are kept.

    JSON can spell half of a surrogate pair, and clients that cut texts at a length do send it.
    """
    return text.encode("utf-8", "surrogatepass")


def json_bytes(value: object, *, in_order: bool = True) -> bytes:
    """Return a JSON value without white space.

    Args:
        value: what a JSON reader gave.
        in_order: keep the order of keys; otherwise they are sorted.
    """
    try:
        return _encode(value) if in_order else _encode_sorted(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), sort_keys=not in_order).encode()


def plain_bytes(value: object) -> bytes:
    """Return a text as itself and any other value as JSON."""
    return text_bytes(value) if isinstance(value, str) else json_bytes(value)
