"""Hash slots: the same as redis-py's, read from what real and odd clusters answer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from extproc.state.keys import Keys
from extproc.state.slots import SLOTS, parse_redirection, parse_slots, slot_of
from extproc.state.where import Address

ASKED = Address("asked", 7000)


@given(st.text("ab{}", max_size=12) | st.text(max_size=30))
def test_slots_are_those_of_redis(key: str) -> None:
    """CRC16 of the first hash tag that is not empty, or of the whole key."""
    assert slot_of(key) == key_slot(key.encode()) < SLOTS


@given(st.text("abcdefgh.-_0123", min_size=1, max_size=20))
def test_all_keys_of_a_pool_have_one_slot(pool: str) -> None:
    """One node has the whole of a pool, so that scripts can work on it."""
    keys = Keys().pool(pool)
    names = (keys.load, keys.leases, keys.feed, keys.flight("r"), keys.pin("s"), keys.void("c"), keys.holders("g"))
    assert len({slot_of(name) for name in names}) == 1


def test_a_map_is_read() -> None:
    """Only masters count; a host that is empty, unknown or missing is the one that was asked."""
    reply = [
        [0, 1, [b"10.0.0.1", 7001, b"id", []], [b"10.0.0.9", 7009, b"id", []]],
        [2, 2, [b"", 7002, b"id"]],
        [3, 3, [None, 7003, b"id", [b"hostname", b"x"]]],
        [4, 4, [b"?", 7004]],
        [16383, 16383, [b"node.example", 7005]],
    ]
    assert parse_slots(reply, ASKED) == {
        0: Address("10.0.0.1", 7001),
        1: Address("10.0.0.1", 7001),
        2: Address("asked", 7002),
        3: Address("asked", 7003),
        4: Address("asked", 7004),
        16383: Address("node.example", 7005),
    }


@pytest.mark.parametrize(
    "reply",
    [None, 1, b"x", [[0]], [[0, 1, b"x"]], [[0, 16384, [b"h", 1]]], [[5, 4, [b"h", 1]]], [[0, 1, [b"\xff", 1]]]],
)
def test_what_is_no_map_is_refused(reply: Any) -> None:
    """Another reply is a ValueError, whatever it is."""
    with pytest.raises(ValueError, match="slot"):
        parse_slots(reply, ASKED)


@pytest.mark.parametrize(
    ("to", "found"),
    [
        ("3999 127.0.0.1:6381", (3999, Address("127.0.0.1", 6381))),
        ("3999 node.example:6381", (3999, Address("node.example", 6381))),
        ("3999 fd00::7:6381", (3999, Address("fd00::7", 6381))),
        ("7 :6381", (7, Address("asked", 6381))),
        ("8 :6381", None),
        ("16384 h:1", None),
        ("x h:1", None),
        ("1 h:x", None),
        ("1 h:0", None),
        ("", None),
    ],
)
def test_redirections_are_read(to: str, found: tuple[int, Address] | None) -> None:
    """IPv6 hosts come without brackets; an empty host is the node that had the slot and was asked."""
    assert parse_redirection(to, {7: ASKED}) == found
