"""The ZMQ messages around KV events of vLLM and SGLang, live and replayed. No sockets here.

Formats: `vllm/distributed/kv_events.py` of vLLM 0.10 to 0.33; SGLang's `disaggregation/kv_events.py` sends the same.
"""

import struct
from collections.abc import Sequence

import msgspec

from extproc.errors import EngineError

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""Longest payload that is read: one scheduler step's events. A million token ids take 5 MB at most."""

_MAX_TOPIC_BYTES = 1024
_SEQ = struct.Struct(">q")
_END = -1
"""Sequence number that ends a replay."""


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One published batch, not decoded yet.

    Attributes:
        seq: its number; counts from 0 since the engine started, without a gap.
        payload: what `kv_decode.decode` takes.
        topic: what it was published under; empty when the message has no such part.
    """

    seq: int
    payload: bytes
    topic: bytes = b""


def live(parts: Sequence[bytes]) -> Frame:
    """Read a message of the publishing socket: `[topic, seq, payload]`, or the same without the topic.

    Raises:
        EngineError: the message has other parts, or one of them is malformed or too long.
    """
    if len(parts) not in {2, 3}:
        raise EngineError(f"a KV event message has {len(parts)} parts; 2 or 3 were expected")
    frame = _frame(parts)
    if frame.seq < 0:
        raise EngineError("a KV event message has a sequence number beyond the 63 bits that engines count to")
    return frame


def replayed(parts: Sequence[bytes]) -> Frame | None:
    """Read an answer of the replay socket, as a DEALER receives it; None is the end of the replay.

    Up to vLLM 0.25 an answer is `["", seq, payload]`, from 0.26 on `["", topic, seq, payload]`. The end has the number
    -1 in either form.

    Raises:
        EngineError: the answer has other parts, or one of them is malformed or too long.
    """
    if len(parts) not in {3, 4}:
        raise EngineError(f"an answer of the replay socket has {len(parts)} parts; 3 or 4 were expected")
    if parts[0]:
        raise EngineError("an answer of the replay socket does not begin with an empty part")
    frame = _frame(parts[1:])
    if frame.seq == _END:
        return None
    if frame.seq < 0:
        raise EngineError("an answer of the replay socket has a negative sequence number")
    return frame


def replay_request(start: int) -> list[bytes]:
    """Message that asks a replay socket for every batch it still has from number `start` on; to be sent by a DEALER.

    The engine answers one message per batch, so that a REQ socket would see only the first.

    Raises:
        ValueError: `start` is not within 0 and 2**63 - 1.
    """
    if not 0 <= start < 1 << 63:
        raise ValueError(f"start must be within 0 and 2**63 - 1, got {start}")
    return [b"", _SEQ.pack(start)]


def _frame(parts: Sequence[bytes]) -> Frame:
    """Read `[topic, seq, payload]` or `[seq, payload]`; the sequence number as signed."""
    seq, payload = parts[-2], parts[-1]
    topic = parts[0] if len(parts) > 2 else b""
    if len(seq) != _SEQ.size:
        raise EngineError(f"the sequence number of a KV event message has {len(seq)} bytes; 8 were expected")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EngineError(f"the payload of a KV event message is longer than {MAX_PAYLOAD_BYTES} bytes")
    if len(topic) > _MAX_TOPIC_BYTES:
        raise EngineError(f"the topic of a KV event message is longer than {_MAX_TOPIC_BYTES} bytes")
    return Frame(_SEQ.unpack(seq)[0], payload, topic)
