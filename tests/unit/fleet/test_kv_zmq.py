"""Sockets for KV events: what is bound and connected to, and how much is fetched."""

import asyncio

import pytest
import zmq

from extproc.errors import EngineError
from extproc.fleet import kv_inlet, kv_zmq
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


@pytest.mark.parametrize("way", ["published", "replayed"])
async def test_what_is_queued_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """An engine that tells more than is fetched keeps the rest itself: libzmq counts messages, not what they take."""
    monkeypatch.setattr(kv_inlet, "QUEUED_BYTES", 16 << 20)
    sockets, at = Sockets(), Place(f"tcp://127.0.0.1:{free_port()}", True)
    stream = sockets.subscribe(at, "")
    message = [b"", bytes(8), bytes(1 << 20)]
    with zmq.Context() as context, context.socket(zmq.PUB) as engine, context.socket(zmq.ROUTER) as router:
        for socket in (engine, router):
            socket.linger, socket.sndhwm = 0, 1000
        engine.connect(at.address)
        replay = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        stream.ask(replay, 0)
        client: list[bytes] = []

        def asked() -> bool:
            if router.poll(0):
                client.append(router.recv_multipart()[0])
            return bool(client)

        await until(asked)

        def send() -> None:
            if way == "published":
                engine.send_multipart(message)
            else:
                router.send_multipart([client[0], b"", *message])

        def fetch() -> int:
            return len(stream.frames(256)) if way == "published" else len(stream.answers(256))

        def first() -> bool:
            send()
            return fetch() > 0

        try:
            await until(first)
            for _ in range(10):
                await asyncio.sleep(0.02)
                fetch()
            for _ in range(200):
                send()
            await asyncio.sleep(0.5)
            engine.close()
            router.close()
            await asyncio.sleep(0.2)
            came, more = 0, 1
            while more:
                more = fetch()
                came += more
            # 8 in the queue of each of two sockets, and what the kernel's own buffers hold.
            assert 4 <= came <= 48
        finally:
            sockets.close()


def test_sockets_share_the_memory() -> None:
    """A fleet of a hundred engines takes no more than one; what closes gives its part back."""
    sockets = Sockets()
    try:
        alone = sockets.subscribe(Place("tcp://127.0.0.1:20000", False), "")
        most = queued(alone)
        others = [sockets.subscribe(Place(f"tcp://127.0.0.1:{port}", False), "") for port in range(20_001, 20_100)]
        assert alone.frames(1) == []
        assert queued(alone) * 100 * kv_inlet._USUAL_BYTES <= kv_inlet.QUEUED_BYTES
        for each in others:
            each.close()
        assert alone.frames(1) == []
        assert queued(alone) == most == kv_inlet.QUEUED
    finally:
        sockets.close()


def queued(stream: kv_zmq.Stream) -> int:
    """How many messages libzmq queues for a stream."""
    return int(stream._subscription._socket.rcvhwm)
