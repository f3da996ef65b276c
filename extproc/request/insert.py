"""One more field in a JSON body, without reading the rest of it."""

import re
from typing import Final

import msgspec

_OPENING: Final = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\n\r]*\{")
"""RFC 8259 section 2: whitespace may surround the opening brace; section 8.1: a reader may skip a byte order mark."""
_WIDE: Final = re.compile(rb"\{[ \t\n\r]*\0")
"""No JSON in UTF-8 holds a zero byte; one behind the brace, or its white space, is of UTF-16 or UTF-32."""
_EMPTY: Final = re.compile(rb"[ \t\n\r]*\}")


def with_field(body: bytes, name: str, value: str) -> bytes | None:
    """Put `"name":"value"` first in a JSON object, every other byte as it was.

    Nothing is parsed beyond the opening brace, so a body of megabytes costs one copy. A reader keeps the last of two
    fields with one name (RFC 8259 section 4 leaves it open, engines' parsers agree), so a field that the client wrote
    itself wins: look first, and insert only what is absent.

    Args:
        body: UTF-8 JSON, with or without a byte order mark.
        name: field name, in any characters.
        value: its value, in any characters.

    Returns:
        The longer body; None when `body` does not begin as an object, or is UTF-16 or UTF-32.
    """
    opening = _OPENING.match(body)
    if opening is None or _WIDE.match(body, opening.end() - 1):
        return None
    at = opening.end()
    field = msgspec.json.encode(name) + b":" + msgspec.json.encode(value)
    comma = b"" if _EMPTY.match(body, at) else b","
    return b"".join((body[:at], field, comma, memoryview(body)[at:]))
