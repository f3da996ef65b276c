"""Batches that wait for a replay take bounded memory, of one stream and of all."""

from extproc.fleet.kv_held import MOST, MOST_BYTES, Held, Room
from extproc.fleet.kv_order import Apply


def test_one_stream_keeps_so_many_batches_and_bytes() -> None:
    """The first ones stay: what is missing after them is asked for."""
    held = Held(Room())
    for seq in range(MOST + 5):
        held.put(Apply(seq, b"x"))
    assert [each.seq for each in held.take()] == list(range(MOST))
    for seq in range(5):
        held.put(Apply(seq, bytes(MOST_BYTES // 4 + 1)))
    assert [each.seq for each in held.take()] == [0, 1, 2]


def test_all_streams_share_one_room() -> None:
    """What one takes the others lack, until it lets go of it."""
    room = Room(10)
    first, second = Held(room), Held(room)
    first.put(Apply(0, bytes(6)))
    second.put(Apply(1, bytes(6)))
    second.put(Apply(2, bytes(4)))
    assert (room.used, [each.seq for each in second.take()]) == (10, [2])
    assert [each.seq for each in first.take()] == [0]
    assert room.used == 0
    second.put(Apply(3, bytes(10)))
    assert room.used == 10
