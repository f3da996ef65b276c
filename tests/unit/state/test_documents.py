"""What Redis answers to questions for documents and parts, read whatever it is."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import StoreError
from extproc.state.document_store import MAX_REVISION, Document, Documents
from extproc.state.keys import Keys
from extproc.state.redis_calls import rows
from extproc.state.redis_documents import document_or_none, parse_documents, parse_scan

TIME = [b"1764517000", b"250000"]

# All that a reply of Redis can be made of.
leaves = st.none() | st.integers() | st.binary(max_size=30) | st.floats() | st.booleans()
replies = st.recursive(leaves, lambda inner: st.lists(inner, max_size=5), max_leaves=15)


@given(st.integers(1, MAX_REVISION), st.binary())
def test_what_is_put_is_read(revision: int, payload: bytes) -> None:
    """Digits, one space, and any bytes, those that look like a document, too."""
    kept = str(revision).encode() + b" " + payload
    assert document_or_none(kept) == Document(revision, payload)


@given(leaves | st.from_regex(rb"[0-9 ]{0,20}.{0,3}", fullmatch=True))
def test_a_field_is_a_document_or_nothing(value: Any) -> None:
    """A document's revision and payload make up exactly the field; anything else is none."""
    found = document_or_none(value)
    if found is not None:
        assert 1 <= found.revision <= MAX_REVISION
        assert str(found.revision).encode() + b" " + found.payload == value


def test_documents_are_read_with_redis_time() -> None:
    """Seconds and microseconds are one time; what cannot be read is passed over."""
    flat = [b"m", b"2 x", b"\xff", b"1 y", b"n", b"junk", "ö".encode(), b"1 "]
    assert parse_documents([TIME, flat]) == Documents(1764517000.25, {"m": Document(2, b"x"), "ö": Document(1, b"")})
    assert parse_documents([TIME, []]) == Documents(1764517000.25, {})


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"OK",
        7,
        [],
        [TIME],
        [TIME, None],
        [TIME, [b"m"]],
        [TIME, [], []],
        [None, []],
        [[b"1"], []],
        [[b"x", b"1"], []],
        [[b"1", 2], []],
        [[b"9" * 400, b"0"], []],
    ],
)
def test_other_replies_are_errors_of_the_store(reply: Any) -> None:
    """A reply of another shape is told as such."""
    with pytest.raises(StoreError, match="something"):
        parse_documents(reply)


@given(replies)
def test_no_reply_is_a_crash(reply: Any) -> None:
    """Whatever is answered ends with a value or a `StoreError`."""
    for parse in (parse_documents, parse_scan, lambda each: rows(each, "a question")):
        try:
            parse(reply)
        except StoreError:
            continue


@given(replies, replies)
def test_no_reply_of_about_the_right_shape_is_a_crash(first: Any, second: Any) -> None:
    """The same for those that look right from outside."""
    for reply in ([TIME, second], [first, [b"m", second]], [b"0", second], [first, second]):
        for parse in (parse_documents, parse_scan):
            try:
                parse(reply)
            except StoreError:
                continue


@given(st.dictionaries(st.text(), st.binary()), st.integers(0, 2**64 - 1))
def test_parts_are_read_with_the_next_cursor(parts: dict[str, bytes], cursor: int) -> None:
    """Any names, any bytes, and Redis' cursors of 64 bits."""
    flat = [each for name, value in parts.items() if _is_text(name) for each in (name.encode(), value)]
    assert parse_scan([str(cursor).encode(), flat]) == (cursor, {k: v for k, v in parts.items() if _is_text(k)})


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def test_a_groups_keys_share_one_hash_tag_with_no_pool() -> None:
    """Redis Cluster hashes what stands between the first braces: the group, in every key, and never a pool's name."""
    keys = Keys("warm")
    names = [keys.group("g").documents, keys.group("g").parts("{x}"), keys.group("g").records("{x}")]
    assert {name.partition("{")[2].partition("}")[0] for name in names} == {"documents/g"}
    assert len(set(names)) == 3
    assert keys.pool("g").load.partition("{")[2].partition("}")[0] == "g"
