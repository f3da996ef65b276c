"""Where an engine's events are to be had: who binds, what an engine may name, and what cannot be reached."""

import pytest

from extproc.config import EventSettings
from extproc.errors import EngineError
from extproc.fleet.kv_address import Place, check, place, replay_place
from extproc.state.endpoint import Source

HOST = "10.0.0.1"


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


@pytest.mark.parametrize("host", [HOST, "fd00::1", "127.0.0.1"])
@pytest.mark.parametrize("told", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://:::5557", "own"])
def test_an_engine_may_name_its_own_host(told: str, host: str) -> None:
    """Any port of it, by a wildcard or by its address."""
    address = told if told != "own" else f"tcp://[{host}]:5557" if ":" in host else f"tcp://{host}:5557"
    check(Source(0, "zmq", address, address), host, EventSettings())


def test_one_address_may_be_written_in_several_ways() -> None:
    """IPv6 has long and short forms."""
    check(Source(0, "zmq", "tcp://[fd00:0:0::0:1]:5557"), "fd00::1", EventSettings())


@pytest.mark.parametrize(
    "told",
    [
        "tcp://10.0.0.9:6379",
        "tcp://169.254.169.254:80",
        "tcp://127.0.0.1:5557",
        "tcp://localhost:5557",
        "tcp://keeper.svc:5557",
        "tcp://[fd00::7]:5557",
        "ipc:///run/other.sock",
    ],
)
@pytest.mark.parametrize("part", ["endpoint", "replay"])
def test_an_engine_may_not_name_another_host(told: str, part: str) -> None:
    """A keeper would connect to it, or bind a port for it: the text names the address and the remedy."""
    source = Source(0, "zmq", *((told, "") if part == "endpoint" else ("tcp://*:5557", told)))
    with pytest.raises(EngineError, match=rf"not its own host.*events\.{part}"):
        check(source, HOST, EventSettings())


def test_the_configuration_may_name_another_host() -> None:
    """That very address, and for data-parallel ranks the ports after it: nothing else of that host."""
    settings = EventSettings(endpoint="tcp://keeper.svc:5557", replay="tcp://10.0.0.9:5657")
    for rank in (0, 3):
        source = Source(rank, "zmq", f"tcp://keeper.svc:{5557 + rank}", f"tcp://10.0.0.9:{5657 + rank}")
        check(source, HOST, settings)
        for changed in (
            Source(rank, "zmq", f"tcp://keeper.svc:{5558 + rank}"),
            Source(rank, "zmq", f"tcp://10.0.0.9:{5657 + rank}"),
            Source(rank, "zmq", "tcp://*:1", f"tcp://keeper.svc:{5557 + rank}"),
        ):
            with pytest.raises(EngineError, match="not its own host"):
                check(changed, HOST, settings)


def test_events_that_are_taken_out_are_a_path_of_the_engine() -> None:
    """What follows `ip:port` in a URL must not make another host of it."""
    check(Source(0, "drain", "/kv_cache_events"), HOST, EventSettings())
    with pytest.raises(EngineError, match="no path"):
        check(Source(0, "drain", "@10.0.0.9:80/"), HOST, EventSettings())
