"""Sockets for KV events: what is bound and connected to, and how much is fetched."""

import asyncio
from collections.abc import Callable

import pytest
import zmq

from extproc.errors import EngineError
from extproc.fleet import kv_zmq
from extproc.fleet.kv_address import Place
from extproc.fleet.kv_zmq import Sockets
from tests.ports import free_port
from tests.waiting import until


def test_two_sources_under_one_topic_cannot_share_an_address() -> None:
    """Nothing would tell their messages apart; the first one keeps it, and gives it back when it closes."""
    sockets, at = Sockets(), Place(f"tcp://127.0.0.1:{free_port()}", True)
    try:
        first = sockets.subscribe(at, "")
        with pytest.raises(EngineError, match="give each a topic of its own"):
            sockets.subscribe(at, "")
        other = sockets.subscribe(at, "kv@b")
        first.close()
        sockets.subscribe(at, "").close()
        other.close()
        sockets.subscribe(at, "").close()
    finally:
        sockets.close()


def test_a_port_that_an_engine_of_this_host_has_bound_is_connected_to() -> None:
    """An engine on the keeper's own host may tell the loopback address that it bound."""
    sockets, at = Sockets(), Place(f"tcp://127.0.0.1:{free_port()}", True)
    engines = Sockets()
    try:
        engines.subscribe(at, "")
        sockets.subscribe(at, "").close()
    finally:
        sockets.close()
        engines.close()


def test_an_address_of_nobody_is_said_to_be_unreachable() -> None:
    """A socket that libzmq refuses is an error of the engine's address, not of ours."""
    sockets = Sockets()
    try:
        with pytest.raises(EngineError, match="cannot be subscribed to"):
            sockets.subscribe(Place("tcp://no host:1", False), "")
        stream = sockets.subscribe(Place("tcp://127.0.0.1:1", False), "")
        with pytest.raises(EngineError, match="cannot be asked for"):
            stream.ask("tcp://no host:1", 0)
        assert stream.answers(10) == []
        stream.close()
    finally:
        sockets.close()


def test_a_fleet_of_many_ranks_finds_a_socket_for_each() -> None:
    """A rank takes up to four sockets; libzmq has 1023 by default."""
    sockets = Sockets()
    try:
        streams = [sockets.subscribe(Place(f"tcp://127.0.0.1:{port}", False), "") for port in range(20_000, 20_400)]
        for stream in streams:
            stream.ask("tcp://127.0.0.1:1", 0)
    finally:
        sockets.close()


async def test_long_messages_are_fetched_a_few_at_a_time() -> None:
    """What one engine sends must not take the memory and the turn of all others; nothing of it is lost."""
    sockets, at = Sockets(), Place(f"tcp://127.0.0.1:{free_port()}", True)
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.linger = 0
        stream = sockets.subscribe(at, "")
        engine.connect(at.address)

        def subscribed() -> bool:
            engine.send_multipart([b"", bytes(8), b""])
            return len(stream.frames(256)) > 0

        try:
            await until(subscribed)
            for _ in range(12):
                engine.send_multipart([b"", bytes(8), bytes(1 << 20)])
            await asyncio.sleep(0.3)  # all of them have arrived by then
            turns: list[int] = []

            def all_came() -> bool:
                turns.append(sum(len(frame.payload) > 0 for frame in stream.frames(256)))
                return sum(turns) == 12

            await until(all_came)
            assert max(turns) <= 4
        finally:
            sockets.close()


def test_a_process_without_sockets_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the error of one source, not the end of the reader."""
    monkeypatch.setattr(kv_zmq, "_MOST_SOCKETS", 20)
    sockets, at = Sockets(), Place("tcp://127.0.0.1:1", False)
    streams = []

    def fill() -> None:
        for _ in range(20):
            streams.append(sockets.subscribe(at, ""))  # noqa: PERF401 -- those before the error are to be kept

    def ask() -> None:
        for stream in streams:
            stream.ask(at.address, 0)

    try:
        with pytest.raises(EngineError, match="cannot be subscribed to: Too many open files"):
            fill()
        with pytest.raises(EngineError, match="cannot be asked for: Too many open files"):
            ask()
        assert len(streams) > 2
    finally:
        sockets.close()


LONG = [b"", bytes(8), bytes(1 << 20)]
"""A message of 1 MiB."""


async def test_what_is_published_and_not_fetched_is_bounded() -> None:
    """An engine that tells more than is fetched keeps the rest itself: libzmq takes so many messages, and no more."""
    sockets, at = Sockets(), Place(f"tcp://127.0.0.1:{free_port()}", True)
    stream = sockets.subscribe(at, "")
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.linger, engine.sndhwm = 0, 1000
        engine.connect(at.address)

        def subscribed() -> bool:
            engine.send_multipart(LONG)
            return len(stream.frames(256)) > 0

        try:
            await until(subscribed)
            for _ in range(200):
                engine.send_multipart(LONG)
            await asyncio.sleep(0.5)
            engine.close()
            await asyncio.sleep(0.2)
            # Those in the queue, and what the kernel's own buffers hold.
            assert 16 <= fetched(lambda: len(stream.frames(256))) <= 110
        finally:
            sockets.close()


async def test_what_is_replayed_and_not_fetched_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that turn out to be long are asked for again by a socket that keeps few of them."""
    monkeypatch.setattr(kv_zmq, "_REPLAYED_BYTES", 64 << 20)
    sockets = Sockets()
    stream = sockets.subscribe(Place("tcp://127.0.0.1:1", False), "")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as engine:
        engine.linger, engine.sndhwm = 0, 1000
        clients: list[bytes] = []
        stream.ask(f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}", 7)

        def asked(times: int) -> bool:
            if engine.poll(0):
                client, _, start = engine.recv_multipart()
                assert int.from_bytes(start, "big") == 7
                clients.append(client)
            stream.answers(256)
            return len(clients) == times

        try:
            await until(lambda: asked(1))
            for _ in range(6):
                engine.send_multipart([clients[0], b"", *LONG])
            await until(lambda: asked(2))
            for _ in range(200):
                engine.send_multipart([clients[1], b"", *LONG])
            await asyncio.sleep(0.5)
            engine.close()
            await asyncio.sleep(0.2)
            assert 32 <= fetched(lambda: len(stream.answers(256))) <= 96
        finally:
            sockets.close()


def fetched(fetch: Callable[[], int]) -> int:
    """How many come until none does."""
    came = 0
    while more := fetch():
        came += more
    return came


def test_replays_share_the_memory() -> None:
    """A keeper that starts beside a hundred engines asks all of them at once; what ends gives its part back."""
    sockets = Sockets()
    try:
        streams = [sockets.subscribe(Place(f"tcp://127.0.0.1:{port}", False), "") for port in range(20_000, 20_100)]
        kept = []
        for stream in streams:
            stream.ask("tcp://127.0.0.1:1", 0)
            assert stream._dealer is not None
            kept.append(int(stream._dealer.rcvhwm))
        assert kept[0] == kv_zmq._REPLAYED
        assert sum(kept) * kv_zmq._USUAL_BYTES <= 6 * kv_zmq._REPLAYED_BYTES
        for stream in streams:
            stream.close()
        again = sockets.subscribe(Place("tcp://127.0.0.1:1", False), "")
        again.ask("tcp://127.0.0.1:1", 0)
        assert again._dealer is not None
        assert again._dealer.rcvhwm == kv_zmq._REPLAYED
    finally:
        sockets.close()
