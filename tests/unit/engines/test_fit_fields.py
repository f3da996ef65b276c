"""Fields of a JSON body changed in place: what a reader then sees, and which bytes stay."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.fit_fields import edited, values_of

TEXT = st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.just("model"), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["model", "a", 'quoted"\\', "ü", "\ud83d", ""])
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=5)
BLANKS = st.text(alphabet=" \t\r\n", max_size=3)
EDITS = st.dictionaries(NAMES, st.none() | VALUES.map(lambda value: json.dumps(value).encode()), max_size=4)


def change(body: bytes, **edits: str | None) -> bytes:
    """The body with these fields set to this JSON, or taken out."""
    values = values_of(body)
    assert values is not None
    return edited(body, values, {name: None if value is None else value.encode() for name, value in edits.items()})


def applied(original: Mapping[str, Any], edits: Mapping[str, bytes | None]) -> dict[str, Any]:
    """What a reader should see."""
    kept = {name: value for name, value in original.items() if name not in edits}
    return kept | {name: json.loads(value) for name, value in edits.items() if value is not None}


@given(original=OBJECTS, edits=EDITS, ascii_only=st.booleans(), mark=st.booleans(), gap=BLANKS, lead=BLANKS)
def test_a_reader_sees_the_object_with_just_these_changes(
    original: dict[str, Any], edits: dict[str, bytes | None], ascii_only: bool, mark: bool, gap: str, lead: str
) -> None:
    """Whatever the object holds, however it is written, and whatever is changed, set or taken out."""
    text = lead + json.dumps(original, ensure_ascii=ascii_only, separators=(gap + "," + gap, gap + ":" + gap)) + gap
    body = text.encode("utf-8", "surrogatepass")
    body = b"\xef\xbb\xbf" + body if mark else body
    values = values_of(body)
    assert values is not None
    assert {name: json.loads(bytes(raw)) for name, raw in values.items()} == original
    assert json.loads(edited(body, values, edits)) == applied(original, edits)


@given(original=OBJECTS, gap=BLANKS)
def test_without_edits_every_byte_stays(original: dict[str, Any], gap: str) -> None:
    """White space, escapes and the order of the fields are as the client wrote them."""
    body = (gap + json.dumps(original, separators=(gap + ",", gap + ":" + gap)) + gap).encode()
    values = values_of(body)
    assert values is not None
    assert edited(body, values, {}) == body


def test_only_the_value_is_replaced() -> None:
    """Neither the same key further in nor the same text in a value is touched; numbers keep their digits."""
    body = b'\xef\xbb\xbf\r\n{ "a" : {"model":"m"}, "m\\u006fdel"\t:\n"m" ,"b":"\\"model\\":\\"m\\"", "c":1.0e+00 }\n'
    assert change(body, model='"x"') == body.replace(b'\n"m" ,', b'\n"x" ,')


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"a":1,"b":2,"c":3}', b'{"a":1,"c":3}'),
        (b'{ "b" : 2 , "a":1}', b'{ "a":1}'),
        (b'{"a":1, "b":[{"b":1}] }', b'{"a":1}'),
        (b'{ "b":2 } ', b"{} "),
    ],
)
def test_a_field_goes_with_its_comma(body: bytes, wanted: bytes) -> None:
    """First, in the middle, last and alone: what is left is an object."""
    assert change(body, b=None) == wanted


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b"{}", b'{"n":1}'),
        (b" { \n} ", b' {"n":1 \n} '),
        (b'{"a":1}', b'{"n":1,"a":1}'),
        (b'{"a":1,"b":2}', b'{"n":1,"a":1,"b":2}'),
    ],
)
def test_a_new_field_is_put_first(body: bytes, wanted: bytes) -> None:
    """Behind the brace, with a comma where something follows."""
    assert change(body, n="1") == wanted


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"x","a":1,"model":"m"}',
        b'{"model":"m","a":1,"model":"m"}',
        b'{"a":1,"mod\\u0065l":"x","model":"m"}',
        b'{"model":12,"a":1,"model":1}',
        b'{"a":1,"a":1,"model":"m"}',
        b'{"model":"1}","model":12}',
    ],
)
def test_of_repeated_names_the_last_counts(body: bytes) -> None:
    """As for Python's reader, and none of them is left: no other reader can see another request than we did."""
    original = json.loads(body)
    assert json.loads(change(body, model='"y"'), object_pairs_hook=list) == list((original | {"model": "y"}).items())
    assert "model" not in json.loads(change(body, model=None))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","text":"\\ud83d","n":NaN,"inner":{"model":"m"}}',
        b'\xef\xbb\xbf {"text":"\\udc00" , "model" : "m"}',
        '{"model":"m","text":"ü"}'.encode("utf-16"),
        '{"model":"m","text":"ü"}'.encode("utf-32-le"),
        "{}".encode("utf-16"),
    ],
)
def test_what_the_engines_reader_takes_can_be_changed(body: bytes) -> None:
    """Python's reader takes more than the standard allows: half surrogate pairs, NaN, UTF-16."""
    wanted = {**json.loads(body), "model": "x"}
    changed = json.loads(change(body, model='"x"'))
    assert json.dumps(changed, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def test_a_long_body_may_have_a_mark_but_no_other_oddity() -> None:
    """The lenient reader is not let loose on megabytes."""
    long = b'"' + b"x" * (1 << 20) + b'"'
    assert change(b'\xef\xbb\xbf{"model":"m","a":' + long + b"}", model="1").endswith(b'{"model":1,"a":' + long + b"}")
    assert values_of(b'{"model":"\\ud800","a":' + long + b"}") is None


BROKEN = [b"", b" ", b"[]", b'"x"', b"null", b'{"a":1', b'{"a":1}}', b'{"a":1,}', b"{1:2}", b'{"a" 1}', b'{"a":}']
TOO_DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("body", [*BROKEN, b"{,}", b"\xef\xbb\xbf", b'{"a":tru}', b'{"a":"\xff\\ud800"}', TOO_DEEP])
def test_what_is_no_object_has_no_fields(body: bytes) -> None:
    """Broken or too deep: None, and no exception."""
    assert values_of(body) is None


@given(
    body=st.binary(max_size=60)
    | st.text(alphabet='{}[]":,\\ \n1eanulmod\ud800', max_size=30).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )
)
def test_any_bytes_are_read_or_passed_over(body: bytes) -> None:
    """Nothing raises; what Python's reader takes for an object has that object's fields."""
    values = values_of(body)
    try:
        expected = json.loads(body)
    except ValueError:
        return
    if isinstance(expected, dict):
        assert values is not None
        assert list(values) == list(expected)
        assert json.loads(edited(body, values, {"new": b"1"})).keys() == expected.keys() | {"new"}
    else:
        assert values is None
