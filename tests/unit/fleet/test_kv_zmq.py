"""Where an engine's events are to be had: who binds, and what cannot be reached."""

import asyncio

import pytest
import zmq

from extproc.errors import EngineError
from extproc.fleet import kv_zmq
from extproc.fleet.kv_zmq import Place, Sockets, place, replay_place
from tests.ports import free_port
from tests.waiting import until


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.1", Place("tcp://10.0.0.1:5557", False)),
        ("tcp://0.0.0.0:5558", "10.0.0.1", Place("tcp://10.0.0.1:5558", False)),
        ("tcp://[::]:5557", "fd00::1", Place("tcp://[fd00::1]:5557", False)),
        ("tcp://:::5557", "fd00::1", Place("tcp://[fd00::1]:5557", False)),
        ("tcp://10.0.0.1:41234", "10.0.0.1", Place("tcp://10.0.0.1:41234", False)),
        ("tcp://[fd00::7]:5557", "fd00::1", Place("tcp://[fd00::7]:5557", False)),
        ("tcp://router.svc:5557", "10.0.0.1", Place("tcp://*:5557", True)),
        ("tcp://10.0.0.9:5557", "10.0.0.1", Place("tcp://10.0.0.9:5557", True)),
        ("tcp://127.0.0.1:5557", "127.0.0.1", Place("tcp://127.0.0.1:5557", True)),
        ("ipc:///run/kv", "10.0.0.1", Place("ipc:///run/kv", False)),
    ],
)
def test_an_engine_binds_wildcards_and_its_own_host(endpoint: str, host: str, expected: Place) -> None:
    """We connect to those at the engine's host; what it connects to is ours to bind."""
    assert place(endpoint, host) == expected


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5558", "10.0.0.1", "tcp://10.0.0.1:5558"),
        ("tcp://[::]:5558", "fd00::1", "tcp://[fd00::1]:5558"),
        ("tcp://10.0.0.7:5558", "10.0.0.1", "tcp://10.0.0.7:5558"),
        ("ipc:///run/replay", "10.0.0.1", "ipc:///run/replay"),
    ],
)
def test_the_replay_socket_is_always_the_engines(endpoint: str, host: str, expected: str) -> None:
    """Engines bind it, whoever binds the other."""
    assert replay_place(endpoint, host) == expected


@pytest.mark.parametrize(
    "endpoint",
    [
        "inproc://kv",
        "tcp://*",
        "tcp://*:",
        "tcp://*:x",
        "tcp://*:0",
        "tcp://*:70000",
        "tcp://a\0b:1",
        "tcp://\ud800:1",
        "",
    ],
)
def test_an_address_that_cannot_be_reached_says_what_to_do(endpoint: str) -> None:
    """The text names the address and the remedy."""
    with pytest.raises(EngineError, match=r"let the engine publish to tcp://\*:<port>"):
        place(endpoint, "10.0.0.1")


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
