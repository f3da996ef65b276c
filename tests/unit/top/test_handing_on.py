"""Copies of answers reach the worker that waits for them, over real gRPC."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest_asyncio

from extproc import inner
from extproc.clock import ManualClock
from extproc.envoy.contract import Copy
from extproc.envoy.copies import LONGEST, MESSAGE, Copies
from extproc.envoy.server import bind, make_server
from extproc.handing_on import HandingOn
from tests.waiting import until

COPY = Copy(200, {"content-type": "text/event-stream"}, 1.0, ((1.5, b"\x00one"), (2.0, b"two")), 2.5, complete=True)


class Kept:
    """Takes copies."""

    def __init__(self) -> None:
        self.copies: list[Copy | None] = []

    def captured(self, copy: Copy | None) -> None:
        """See `Capture`."""
        self.copies.append(copy)


class Fleet:
    """Workers with the ids `a`, `b` and so on, each on a socket of its own."""

    def __init__(self, folder: Path) -> None:
        self.addresses: list[str] = []
        self.copies: dict[str, Copies] = {}
        self.parts: dict[str, HandingOn] = {}
        self.clock = ManualClock()
        self.asked = 0
        self._folder = folder
        self._cleanup = contextlib.AsyncExitStack()

    async def add(self, name: str) -> None:
        """Start a worker."""
        copies = self.copies[name] = Copies(self.clock)
        part = self.parts[name] = HandingOn(copies, name, self._resolve, self.clock)

        async def ended(_told: Mapping[str, str]) -> str:
            self.asked += 1
            return name

        server = make_server([inner.handler(bytes, None, ended, part.taken)], max_body_bytes=MESSAGE)  # type: ignore[arg-type]
        address = f"unix:{self._folder}/{name}"
        bind(server, address)
        await server.start()
        self._cleanup.push_async_callback(server.stop, 0.0)
        self._cleanup.push_async_callback(part.close)
        self.addresses.append(address)

    async def _resolve(self) -> Sequence[str]:
        return self.addresses

    async def close(self) -> None:
        """Stop all."""
        await self._cleanup.aclose()


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Three workers."""
    fleet = Fleet(tmp_path)
    for name in ("a", "b", "c"):
        await fleet.add(name)
    yield fleet
    await fleet.close()


async def test_a_copy_comes_whole_to_the_worker_that_decided(fleet: Fleet) -> None:
    """Its pieces, their times and all; and that there is none is told as well."""
    kept, none = Kept(), Kept()
    fleet.copies["b"].expect("b-1", kept)
    fleet.copies["b"].expect("b-2", none)
    assert fleet.copies["a"].hand_on is not None
    fleet.copies["a"].hand_on("b-1", COPY)
    fleet.copies["c"].hand_on("b-2", None)  # type: ignore[misc]
    await until(lambda: bool(kept.copies and none.copies))
    assert kept.copies == [COPY]
    assert none.copies == [None]


async def test_the_longest_copy_fits_into_one_message(fleet: Fleet) -> None:
    """Streams come token by token, and each piece has its time."""
    kept, piece = Kept(), b"x" * 64
    long = Copy(200, {}, 1.0, tuple((1.5, piece) for _ in range(LONGEST // len(piece))), 2.5, complete=True)
    fleet.copies["b"].expect("b-1", kept)
    fleet.parts["a"].hand_on("b-1", long)
    await fleet.parts["a"].idle()
    assert kept.copies == [long]


async def test_workers_are_asked_for_their_ids_once(fleet: Fleet) -> None:
    """Later copies go straight to their worker."""
    kept = Kept()
    for number in range(5):
        fleet.copies["b"].expect(f"b-{number}", kept)
        fleet.parts["a"].hand_on(f"b-{number}", COPY)
        await fleet.parts["a"].idle()
    assert len(kept.copies) == 5
    assert fleet.asked == 3


async def test_a_copy_that_nobody_waits_for_is_lost_quietly(fleet: Fleet) -> None:
    """Of a worker that is gone, of one's own request that is over, of a charge that is none."""
    for charge in ("gone-1", "a-1", "b-9", "nonsense", ""):
        fleet.parts["a"].hand_on(charge, COPY)
        await fleet.parts["a"].idle()
    fleet.clock.advance(10.0)
    fleet.addresses.append("unix:/nowhere/at-all")
    fleet.parts["a"].hand_on("gone-2", COPY)
    await fleet.parts["a"].idle()


async def test_nothing_is_kept_of_workers_that_left(fleet: Fleet) -> None:
    """Addresses come and go with hosts: a connection to each of them would stay open for good."""
    fleet.parts["a"].hand_on("b-1", COPY)
    await fleet.parts["a"].idle()
    assert len(fleet.parts["a"]) == 3
    del fleet.addresses[1:]
    fleet.clock.advance(2.5)
    fleet.parts["a"].hand_on("gone-1", COPY)
    await fleet.parts["a"].idle()
    assert len(fleet.parts["a"]) == 1
    fleet.parts["a"].hand_on("b-2", COPY)
    await fleet.parts["a"].idle()


async def test_a_worker_that_joined_is_found(fleet: Fleet) -> None:
    """Those who are there are asked again when somebody is not known, at most every two seconds."""
    kept = Kept()
    fleet.parts["a"].hand_on("b-1", COPY)
    await fleet.parts["a"].idle()
    await fleet.add("d")
    fleet.copies["d"].expect("d-1", kept)
    fleet.parts["a"].hand_on("d-1", COPY)
    await fleet.parts["a"].idle()
    assert kept.copies == []
    fleet.clock.advance(2.5)
    fleet.parts["a"].hand_on("d-1", COPY)
    await fleet.parts["a"].idle()
    assert kept.copies == [COPY]
