"""Events out of bytes: whole ones only, wherever the bytes were cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import RelayError
from extproc.relay.events import Splitter, event_of

TEXTS = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1, max_size=20)
LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


def fed(stream: bytes, cuts: list[int]) -> list[bytes]:
    """What a splitter finds in a stream that comes in pieces."""
    splitter = Splitter(1 << 20)
    at = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [data for start, end in itertools.pairwise(at) for data in splitter.feed(stream[start:end])]


@given(texts=st.lists(TEXTS, max_size=6), end=LINE_ENDS, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_a_stream_gives_the_same_events_wherever_it_is_cut(texts: list[str], end: bytes, cuts: list[int]) -> None:
    """Cuts fall anywhere: within a character of several bytes, a line end, or the empty line behind an event."""
    stream = b"".join(b"data: " + text.encode() + end + end for text in texts)
    assert fed(stream, cuts) == [text.encode() for text in texts]


@given(st.lists(st.binary(max_size=30), max_size=8))
def test_any_bytes_are_taken(pieces: list[bytes]) -> None:
    """Whatever an engine sends, a splitter finds events or none, and never fails."""
    splitter = Splitter(1 << 20)
    for piece in pieces:
        splitter.feed(piece)


def test_a_byte_order_mark_is_no_part_of_the_first_event() -> None:
    """The standard lets a stream begin with one; the text behind it must not be lost."""
    assert Splitter(100).feed(b"\xef\xbb\xbfdata: one\n\ndata: two\n\n") == [b"one", b"two"]


def test_what_has_no_end_is_no_event() -> None:
    """The half event that a dying engine leaves behind is never passed on."""
    assert Splitter(100).feed(b"data: one\n\ndata: tw") == [b"one"]


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        (b"data:no blank\n\n", [b"no blank"]),
        (b"data:  two blanks\n\n", [b" two blanks"]),
        (b"data: one\ndata: two\n\n", [b"one\ntwo"]),
        (b": keep-alive\n\n\n\ndata: x\n\n", [b"x"]),
        (b"event: error\nid: 7\ndata: x\nretry: 3\n\n", [b"x"]),
        (b"data: a\r\n\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    ],
)
def test_lines_mean_what_the_standard_says(stream: bytes, data: list[bytes]) -> None:
    """One blank behind the colon is dropped, several lines are joined, comments and other fields are passed over."""
    assert Splitter(100).feed(stream) == data


def test_an_event_is_not_held_without_bound() -> None:
    """An engine that never ends an event cannot fill the memory."""
    splitter = Splitter(100)
    splitter.feed(b"data: " + b"x" * 90)
    with pytest.raises(RelayError, match="100 bytes"):
        splitter.feed(b"x" * 90)


def test_an_event_reads_back() -> None:
    """What is written for the client is an event with one line of data."""
    assert Splitter(100).feed(event_of(b'{"a":1}')) == [b'{"a":1}']
