"""Copies of answers: Envoy sends them on streams of their own, which it never waits for.

A copy comes to any worker of the fleet. Whoever waits for it is known by the charge of its decision, and may be another
worker: then the copy is handed on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError

from extproc.clock import Clock
from extproc.envoy.contract import METADATA, Capture, Copy
from extproc.envoy.replies import CHARGE_KEY

LONGEST: Final = 8 << 20
"""Bytes of one answer; what is longer is not copied. Some 30,000 tokens of a chat that streams."""
MESSAGE: Final = 2 * LONGEST
"""Bytes of a copy that is handed on: its pieces, which may be short, each with the time when it came."""
MOST: Final = 64 << 20
"""Bytes of all copies that are being taken by a process."""
GRACE_S: Final = 10.0
"""How long after the end of its request a copy may come: Envoy closes the stream of one that was cut after 5 s."""
_KEPT_HEADERS: Final = frozenset({"content-type", "content-encoding"})

Context = grpc.aio.ServicerContext[bytes, bytes]
HandOn = Callable[[str, Copy | None], None]
"""Takes a copy that nobody here waits for, and the charge that it belongs to; returns at once."""


class Copies:
    """Takes copies from Envoy.

    Args:
        clock: when pieces come.
        longest: bytes of one answer that are kept.
        most: bytes of all.
        grace_s: see `GRACE_S`.

    Attributes:
        hand_on: see `HandOn`; None while there are no other workers.
        held: bytes that are held.
    """

    def __init__(self, clock: Clock, longest: int = LONGEST, most: int = MOST, grace_s: float = GRACE_S) -> None:
        self.hand_on: HandOn | None = None
        self.held = 0
        self._waiting: dict[str, Capture] = {}
        self._clock = clock
        self._longest = longest
        self._most = most
        self._grace_s = grace_s

    def __len__(self) -> int:
        """How many requests of this process wait for a copy."""
        return len(self._waiting)

    def expect(self, charge_id: str, capture: Capture) -> None:
        """A request is decided, and a copy of its answer is wanted."""
        self._waiting[charge_id] = capture

    def ended(self, charge_id: str) -> None:
        """A request is over; its copy comes within a while or never. Must be called in a loop."""
        if charge_id in self._waiting:
            asyncio.get_running_loop().call_later(self._grace_s, self.give, charge_id, None)

    def give(self, charge_id: str, copy: Copy | None) -> bool:
        """Hand over a copy, or that there is none; whether somebody waited for it here."""
        capture = self._waiting.pop(charge_id, None)
        if capture is None:
            return False
        capture.captured(copy)
        return True

    async def take(self, first: pb.ProcessingRequest, context: Context) -> None:
        """Read one copy to its end.

        It is given up, by ending the stream, once it is too long: Envoy sends no more of it then.

        Args:
            first: the stream's first message.
            context: the stream.
        """
        charge_id = _charge_of(first)
        if not charge_id:
            return
        taking = _Taking(self._clock)
        copy = None
        try:
            async for message in _messages(first, context):
                size = taking.add(message)
                self.held += size
                if taking.size > self._longest or self.held > self._most:
                    break
                if taking.complete:
                    copy = taking.copy()
                    break
            else:
                copy = taking.copy()
        finally:
            self.held -= taking.size
            if not self.give(charge_id, copy) and self.hand_on is not None:
                self.hand_on(charge_id, copy)


class _Taking:
    """One copy, while it comes."""

    def __init__(self, clock: Clock) -> None:
        self.size = 0
        self.complete = False
        self._clock = clock
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._began_at = self._over_at = clock.wall()
        self._pieces: list[tuple[float, bytes]] = []

    def add(self, message: pb.ProcessingRequest) -> int:
        """Take a message; returns the bytes that it added."""
        self._over_at = self._clock.wall()
        kind = message.WhichOneof("request")
        if kind == "response_headers":
            self._began_at = self._over_at
            self._status, self._headers = _head_of(message)
            self.complete = message.response_headers.end_of_stream
        elif kind == "response_body":
            piece: bytes = message.response_body.body
            self.complete = message.response_body.end_of_stream
            if piece:
                self.size += len(piece)
                self._pieces.append((self._over_at, piece))
                return len(piece)
        elif kind == "response_trailers":
            self.complete = True
        return 0

    def copy(self) -> Copy:
        """What came."""
        return Copy(self._status, self._headers, self._began_at, tuple(self._pieces), self._over_at, self.complete)


async def _messages(first: pb.ProcessingRequest, context: Context) -> AsyncIterator[pb.ProcessingRequest]:
    yield first
    while isinstance(raw := await context.read(), bytes):  # else grpc.aio.EOF
        if (message := _read(raw)) is not None:
            yield message


def _read(raw: bytes) -> pb.ProcessingRequest | None:
    with contextlib.suppress(DecodeError):
        return pb.ProcessingRequest.FromString(raw)
    return None


def _charge_of(first: pb.ProcessingRequest) -> str:
    found = first.metadata_context.filter_metadata
    if METADATA not in found:
        return ""
    fields = found[METADATA].fields
    return str(fields[CHARGE_KEY].string_value) if CHARGE_KEY in fields else ""


def _head_of(message: pb.ProcessingRequest) -> tuple[int, Mapping[str, str]]:
    status, headers = 0, dict[str, str]()
    for header in message.response_headers.headers.headers:
        value = header.raw_value.decode("latin-1") or header.value
        if header.key == ":status" and value.isdigit():
            status = int(value)
        elif header.key in _KEPT_HEADERS:
            headers[header.key] = value
    return status, headers
