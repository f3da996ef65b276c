"""Copies of answers, taken off streams of their own: whole ones, cut ones, too long ones."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from extproc.clock import ManualClock
from extproc.envoy.contract import METADATA, Copy
from extproc.envoy.copies import Context, Copies


class Stream:
    """The messages of one stream, and its end."""

    def __init__(self, messages: Sequence[pb.ProcessingRequest], clock: ManualClock | None = None) -> None:
        self._left = [message.SerializeToString() for message in messages]
        self._clock = clock
        self.read_messages = 0

    async def read(self) -> object:
        """See `grpc.aio.ServicerContext`."""
        if self._clock is not None:
            self._clock.advance(1.0)
        if not self._left:
            return grpc.aio.EOF
        self.read_messages += 1
        return self._left.pop(0)


class Kept:
    """Takes copies."""

    def __init__(self) -> None:
        self.copies: list[Copy | None] = []

    def captured(self, copy: Copy | None) -> None:
        """See `Capture`."""
        self.copies.append(copy)


def head(charge: str = "r-1", *, end: bool = False) -> pb.ProcessingRequest:
    """The first message: headers of an answer, and whose they are."""
    message = pb.ProcessingRequest(observability_mode=True)
    message.metadata_context.filter_metadata[METADATA].update({"charge_id": charge})
    for name, value in ((":status", b"200"), ("content-type", b"text/event-stream"), ("x-secret", b"1")):
        header = message.response_headers.headers.headers.add()
        header.key, header.raw_value = name, value
    message.response_headers.end_of_stream = end
    return message


def body(piece: bytes, *, end: bool = False) -> pb.ProcessingRequest:
    """A piece of the body."""
    message = pb.ProcessingRequest(observability_mode=True)
    message.response_body.body, message.response_body.end_of_stream = piece, end
    return message


async def taken(copies: Copies, first: pb.ProcessingRequest, *rest: pb.ProcessingRequest) -> Kept:
    """What somebody gets who waits for a stream's copy."""
    kept = Kept()
    copies.expect("r-1", kept)
    await copies.take(first, cast(Context, Stream(rest)))
    return kept


async def test_a_whole_answer() -> None:
    """Status, the two headers that tell how to read it, each piece with its time, and that it is whole."""
    clock, kept = ManualClock(), Kept()
    copies = Copies(clock)
    copies.expect("r-1", kept)
    began = clock.wall()
    rest = Stream([body(b"one"), body(b""), body(b"two"), body(b"", end=True)], clock)
    await copies.take(head(), cast(Context, rest))
    [copy] = kept.copies
    assert copy is not None
    assert (copy.status, copy.complete) == (200, True)
    assert copy.headers == {"content-type": "text/event-stream"}
    assert copy.began_at == began
    assert [(at - began, piece) for at, piece in copy.pieces] == [(1.0, b"one"), (3.0, b"two")]
    assert copy.over_at - began == 4.0
    assert (copies.held, len(copies)) == (0, 0)


@pytest.mark.parametrize(
    ("messages", "complete"),
    [
        ([head(end=True)], True),
        ([head(), pb.ProcessingRequest(response_trailers={})], True),
        ([head()], False),
        ([head(), body(b"half")], False),
    ],
)
async def test_an_answer_is_whole_once_its_end_was_seen(messages: list[pb.ProcessingRequest], complete: bool) -> None:
    """Headers alone, or trailers, may be the end; a stream that ends before is half an answer."""
    kept = await taken(Copies(ManualClock()), *messages)
    [copy] = kept.copies
    assert copy is not None
    assert copy.complete is complete


@pytest.mark.parametrize(("longest", "most"), [(5, 100), (100, 5)])
async def test_what_is_too_long_is_given_up(longest: int, most: int) -> None:
    """One answer, or all of them together: nothing is kept, and the rest is not read."""
    copies, kept = Copies(ManualClock(), longest, most), Kept()
    copies.expect("r-1", kept)
    rest = Stream([body(b"abc"), body(b"def"), body(b"ghi"), body(b"", end=True)])
    await copies.take(head(), cast(Context, rest))
    assert kept.copies == [None]
    assert rest.read_messages == 2
    assert copies.held == 0


async def test_a_copy_that_nobody_waits_for_is_handed_on() -> None:
    """It may belong to another worker; without other workers it is dropped."""
    copies = Copies(ManualClock())
    told: list[tuple[str, Copy | None]] = []
    await copies.take(head("q-7"), cast(Context, Stream([body(b"x", end=True)])))
    copies.hand_on = lambda charge, copy: told.append((charge, copy))
    await copies.take(head("q-8"), cast(Context, Stream([body(b"x", end=True)])))
    [(charge, copy)] = told
    assert charge == "q-8"
    assert copy is not None
    assert copy.complete


async def test_after_a_while_there_is_no_copy() -> None:
    """Who waits is told, once, after the request was over for as long as a copy may take."""
    copies, kept = Copies(ManualClock(), grace_s=0.0), Kept()
    copies.expect("r-1", kept)
    copies.ended("r-1")
    copies.ended("r-2")
    await asyncio.sleep(0.01)
    assert kept.copies == [None]
    assert copies.give("r-1", None) is False
    assert len(copies) == 0


async def test_a_stream_that_is_cancelled_leaves_nothing_behind() -> None:
    """The gateway, or this worker, goes away in the middle."""

    class Stuck(Stream):
        async def read(self) -> object:
            if self._left:
                return await super().read()
            await asyncio.sleep(60)
            return grpc.aio.EOF

    copies, kept = Copies(ManualClock()), Kept()
    copies.expect("r-1", kept)
    taking = asyncio.create_task(copies.take(head(), cast(Context, Stuck([body(b"half")]))))
    await asyncio.sleep(0.01)
    assert copies.held == 4
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert kept.copies == [None]
    assert copies.held == 0


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(b"\x08\x01")), max_size=6))
def test_no_messages_break_it(raw: list[bytes]) -> None:
    """What cannot be read is passed over."""

    class Raw:
        def __init__(self) -> None:
            self._left: list[Any] = list(raw)

        async def read(self) -> object:
            return self._left.pop(0) if self._left else grpc.aio.EOF

    copies, kept = Copies(ManualClock()), Kept()
    copies.expect("r-1", kept)
    asyncio.run(copies.take(head(), cast(Context, Raw())))
    assert len(kept.copies) == 1
