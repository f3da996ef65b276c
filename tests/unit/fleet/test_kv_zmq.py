"""Where an engine's events are to be had: who binds, and what cannot be reached."""

import pytest

from extproc.errors import EngineError
from extproc.fleet.kv_zmq import Place, Sockets, place, replay_place
from tests.ports import free_port


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
