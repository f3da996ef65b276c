"""A field inserted into a JSON body: what a reader sees, and which bytes stay."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from extproc.request.insert import with_field

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), VALUES, max_size=5)
BLANKS = st.text(alphabet=" \t\r\n", max_size=4)


@given(original=OBJECTS, name=st.text(), value=st.text(), ascii_only=st.booleans(), lead=BLANKS, mark=st.booleans())
def test_a_reader_sees_the_object_with_one_more_field(
    original: dict[str, Any], name: str, value: str, ascii_only: bool, lead: str, mark: bool
) -> None:
    """Whatever the object, the name and the value are, a JSON reader gets the object plus that field."""
    original.pop(name, None)
    body = (lead + json.dumps(original, ensure_ascii=ascii_only)).encode("utf-8-sig" if mark else "utf-8")
    changed = with_field(body, name, value)
    assert changed is not None
    assert json.loads(changed) == {**original, name: value}
    assert next(iter(json.loads(changed))) == name


@given(lead=BLANKS, mark=st.booleans(), rest=st.binary(max_size=40))
def test_all_other_bytes_stay(lead: str, mark: bool, rest: bytes) -> None:
    """The field and its comma are the only change, valid JSON or not; only an empty object gets no comma."""
    assume(not rest.lstrip(b" \t\n\r").startswith(b"\0"))
    opening = (lead + "{").encode("utf-8-sig" if mark else "utf-8")
    comma = b"" if rest.strip(b" \t\r\n").startswith(b"}") else b","
    assert with_field(opening + rest, "a", "b") == opening + b'"a":"b"' + comma + rest


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b"{}", b'{"a":"b"}'),
        (b"{ \n}", b'{"a":"b" \n}'),
        (b'{"x":1}', b'{"a":"b","x":1}'),
        (b'\xef\xbb\xbf {"x":1}', b'\xef\xbb\xbf {"a":"b","x":1}'),
    ],
)
def test_field_stands_right_after_the_brace(body: bytes, changed: bytes) -> None:
    """The field comes first; an empty object gets no comma."""
    assert with_field(body, "a", "b") == changed


@given(
    original=OBJECTS, lead=BLANKS, code=st.sampled_from(["utf-16", "utf-32"]), order=st.sampled_from(["", "-le", "-be"])
)
def test_what_is_not_utf_8_gets_no_field(original: dict[str, Any], lead: str, code: str, order: str) -> None:
    """JSON of two or four bytes a character, with or without a byte order mark, is never mixed with UTF-8."""
    assert with_field((lead + json.dumps(original)).encode(code + order), "a", "b") is None


@pytest.mark.parametrize("body", [b"", b"  ", b"[{}]", b'"{}"', b"null", b"\xef\xbb\xbf", b"x{}", b"\x0b{}"])
def test_what_is_no_object_has_no_fields(body: bytes) -> None:
    """Nothing is inserted into a body that does not begin as an object."""
    assert with_field(body, "a", "b") is None
