"""The parts of ZMQ messages: live ones with and without a topic, and both framings of replayed ones."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.kv_frames import MAX_PAYLOAD_BYTES, Frame, live, replay_request, replayed
from extproc.errors import EngineError

_SEQ = (7).to_bytes(8, "big")
_END = b"\xff" * 8


@pytest.mark.parametrize(
    ("parts", "topic"), [([b"kv@a@m", _SEQ, b"load"], b"kv@a@m"), ([b"", _SEQ, b"load"], b""), ([_SEQ, b"load"], b"")]
)
def test_a_live_message_is_read_with_or_without_its_topic(parts: list[bytes], topic: bytes) -> None:
    """The number is eight bytes, big-endian, before the payload; a topic stands in front or does not."""
    assert live(parts) == Frame(7, b"load", topic)


@pytest.mark.parametrize(("parts", "topic"), [([b"", _SEQ, b"load"], b""), ([b"", b"kv", _SEQ, b"load"], b"kv")])
def test_both_framings_of_a_replay_are_read(parts: list[bytes], topic: bytes) -> None:
    """Up to vLLM 0.25 replays have no topic, from 0.26 on they have one; the empty part is the DEALER's."""
    assert replayed(parts) == Frame(7, b"load", topic)


@pytest.mark.parametrize("parts", [[b"", _END, b""], [b"", b"", _END, b""]])
def test_both_framings_end_a_replay_with_number_minus_one(parts: list[bytes]) -> None:
    """The end marker of either framing is no batch."""
    assert replayed(parts) is None


def test_a_replay_is_asked_for_in_two_parts() -> None:
    """With the identity that the ROUTER adds these are the three parts that it insists on."""
    assert replay_request(258) == [b"", b"\0\0\0\0\0\0\1\2"]


@pytest.mark.parametrize("start", [-1, 1 << 63])
def test_a_replay_cannot_begin_outside_the_numbers(start: int) -> None:
    """The end marker's number, or one too large for eight bytes, is no beginning."""
    with pytest.raises(ValueError, match="start must be within"):
        replay_request(start)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([b"load"], "1 parts"),
        ([b"", b"", _SEQ, b"load"], "4 parts"),
        ([b"", b"\0" * 7, b"load"], "7 bytes"),
        ([b"", _END, b"load"], "beyond the 63 bits"),
        ([b"", _SEQ, bytes(MAX_PAYLOAD_BYTES + 1)], "payload of a KV event message is longer"),
        ([bytes(1025), _SEQ, b"load"], "topic of a KV event message is longer"),
    ],
)
def test_a_malformed_live_message_is_refused_by_name(parts: list[bytes], fault: str) -> None:
    """Every way a message can be wrong is an engine error that says what was wrong."""
    with pytest.raises(EngineError, match=fault):
        live(parts)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([_SEQ, b"load"], "2 parts"),
        ([b"", b"", b"", _SEQ, b"load"], "5 parts"),
        ([b"kv", _SEQ, b"load"], "does not begin with an empty part"),
        ([b"", b"", b"\xff" * 7 + b"\xfe", b"load"], "negative sequence number"),
    ],
)
def test_a_malformed_answer_of_a_replay_is_refused_by_name(parts: list[bytes], fault: str) -> None:
    """A replay that answers something else is an engine error, not a batch."""
    with pytest.raises(EngineError, match=fault):
        replayed(parts)


@given(parts=st.lists(st.one_of(st.binary(max_size=12), st.just(_SEQ), st.just(b"")), max_size=6))
def test_any_parts_are_a_frame_or_an_engine_error(parts: list[bytes]) -> None:
    """Nothing that arrives on a socket raises anything else."""
    for read in (live, replayed):
        with contextlib.suppress(EngineError):
            frame = read(parts)
            assert frame is None or (frame.seq >= 0 and frame.payload == parts[-1])
