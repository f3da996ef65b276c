"""The top-level fields of a JSON body, and that body with some of them changed and every other byte as it was."""

import json
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

_OPENING: Final = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\n\r]*\{")
"""RFC 8259 section 2: whitespace may surround the opening brace; section 8.1: a reader may skip a byte order mark."""
_KEY: Final = re.compile(rb'[ \t\n\r]*"(?:[^"\\]|\\.)*"[ \t\n\r]*:[ \t\n\r]*', re.DOTALL)
_END: Final = re.compile(rb"[ \t\n\r]*[,}]")
_BLANK: Final = re.compile(r"[ \t\n\r]*")
_MARK: Final = b"\xef\xbb\xbf"
_LENIENT_BYTES: Final = 1 << 20
"""The lenient reader is ten times slower than the first one, and whoever sends such a body chooses its size."""

Values = Mapping[str, msgspec.Raw]
"""Fields of an object by name, in their order, each value as the bytes that stand for it; of equal names the last."""

_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def values_of(body: bytes) -> Values | None:
    """Read the fields of a JSON object without reading what they hold.

    Takes what the engines take, whose reader is Python's: a byte order mark, NaN, half of a surrogate pair, UTF-16;
    such a body is read leniently, up to 1 MiB.

    Returns:
        The fields; None when `body` is no JSON object, or nested too deep.
    """
    try:
        return _decoder.decode(memoryview(body)[len(_MARK) :] if body.startswith(_MARK) else body)
    except msgspec.ValidationError:
        return None
    except msgspec.DecodeError:
        return _lenient(body) if len(body) <= _LENIENT_BYTES else None
    except RecursionError:
        return None


def edited(body: bytes, values: Values, edits: Mapping[str, bytes | None]) -> bytes:
    """The body with some fields changed.

    Where each name stands once, every other byte stays, white space and escapes included. Where a name is repeated,
    the object is written anew from what its readers take: the last of each, its value byte for byte.

    Args:
        body: a JSON object.
        values: its fields, as `values_of` gives them.
        edits: JSON of the new value by field; None takes the field out. One that the body has not is put first.
    """
    new = [_encoded(name) + b":" + value for name, value in edits.items() if value is not None and name not in values]
    places = _places(body, values)
    if places is None:
        kept = ((name, edits.get(name, bytes(raw))) for name, raw in values.items())
        written = [_encoded(name) + b":" + value for name, value in kept if value is not None]
        return b"{" + b",".join(new + written) + b"}"
    # Pieces are views until the one join: at 525 KB each further copy took 0.3 ms.
    whole, pieces = memoryview(body), [memoryview(each) for each in new]
    for name, place in zip(values, places, strict=True):
        if name not in edits:
            pieces.append(whole[place.start : place.end])
        elif (value := edits[name]) is not None:
            pieces.append(memoryview(body[place.start : place.value] + value + body[place.after : place.end]))
    first, last = (places[0].start, places[-1].end) if places else (_opening(body), _opening(body))
    joined: list[memoryview | bytes] = [whole[:first]]
    for number, piece in enumerate(pieces):
        joined += (b",", piece) if number else (piece,)
    return b"".join([*joined, whole[last:]])


class _Place(NamedTuple):
    """Where a field stands in the body: its white space and key, its value, its white space up to comma or brace."""

    start: int
    value: int
    after: int
    end: int


def _opening(body: bytes) -> int:
    """Index behind the opening brace; 0 when the body, being of UTF-16, has none."""
    opening = _OPENING.match(body)
    return opening.end() if opening else 0


def _places(body: bytes, values: Values) -> list[_Place] | None:
    """Where each field stands.

    Each value is found by what is known of it, so its inside need not be read again. None when a name is repeated, or
    when the body is not UTF-8: there are other values then, or more, than those that are known.
    """
    at = _opening(body)
    places = []
    for number, raw in enumerate(values.values(), start=1):
        key = _KEY.match(body, at)
        if key is None or not body.startswith(raw, key.end()):
            return None
        after = key.end() + len(memoryview(raw))
        end = _END.match(body, after)
        if end is None or (body[end.end() - 1] == ord("}")) is not (number == len(values)):
            return None
        places.append(_Place(at, key.end(), after, end.end() - 1))
        at = end.end()
    return places if at else None


def _lenient(body: bytes) -> Values | None:
    """The fields as Python's own reader finds them, value by value."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        return _walked(text)
    except (ValueError, RecursionError):
        return None


def _walked(text: str) -> Values | None:
    """Raises ValueError where the text is no JSON."""
    read = json.JSONDecoder().raw_decode
    found: dict[str, msgspec.Raw] = {}
    at = _skipped(text, 0)
    if text[at : at + 1] != "{":
        return None
    at = _skipped(text, at + 1)
    closed = text[at : at + 1] == "}"
    while not closed:
        name, at = read(text, at)
        at = _skipped(text, at)
        if not isinstance(name, str) or text[at : at + 1] != ":":
            return None
        start = _skipped(text, at + 1)
        _, at = read(text, start)
        found[name] = msgspec.Raw(text[start:at].encode("utf-8", "surrogatepass"))
        at = _skipped(text, at)
        closed = text[at : at + 1] == "}"
        if not closed and text[at : at + 1] != ",":
            return None
        at = at if closed else _skipped(text, at + 1)
    return found if _skipped(text, at + 1) == len(text) else None


def _skipped(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


def _encoded(name: str) -> bytes:
    # Half of a surrogate pair has no UTF-8; written as an escape it is what the client sent.
    return (
        json.dumps(name).encode() if any("\ud800" <= each <= "\udfff" for each in name) else msgspec.json.encode(name)
    )
