"""Where KV events are to be had: what engines tell goes before what is configured."""

import msgspec
import pytest

from extproc.config import EventSettings
from extproc.fleet.kv_places import sources_of
from extproc.state.endpoint import EndpointState, Source

ADDRESS = "10.0.0.1:8000"
SETTINGS = EventSettings(endpoint="tcp://*:5557", replay="tcp://*:5657", topic="kv@{endpoint}@m")


def test_an_engine_that_tells_is_believed() -> None:
    """The configuration is for engines that tell nothing."""
    told = (Source(0, "zmq", "tcp://10.0.0.1:4000"),)
    state = EndpointState(ADDRESS, kind="vllm", sources=told)
    assert sources_of("10.0.0.1:8000", state, SETTINGS) == told


def test_each_rank_of_a_silent_engine_has_the_next_port() -> None:
    """VLLM and SGLang add the rank to the configured port, of the replay socket too; the endpoint is in the topic."""
    state = EndpointState(ADDRESS, kind="vllm", ranks=2)
    assert sources_of("10.0.0.1:8000", state, SETTINGS) == (
        Source(0, "zmq", "tcp://*:5557", "tcp://*:5657", "kv@10.0.0.1:8000@m"),
        Source(1, "zmq", "tcp://*:5558", "tcp://*:5658", "kv@10.0.0.1:8000@m"),
    )


def test_nothing_is_expected_of_engines_that_publish_nothing() -> None:
    """TensorRT-LLM has no sockets, an unknown engine may have none, and nothing configured is nothing to read."""
    for kind in ("tensorrt_llm", ""):
        assert sources_of("e", EndpointState(ADDRESS, kind=kind), SETTINGS) == ()
    assert sources_of("e", EndpointState(ADDRESS, kind="vllm"), EventSettings()) == ()


def test_without_a_replay_socket_none_is_made_up() -> None:
    """A rank's replay address is empty when the first one's is."""
    state = EndpointState(ADDRESS, kind="sglang", ranks=2)
    found = sources_of("e", state, EventSettings(endpoint="tcp://*:5557"))
    assert [(each.endpoint, each.replay) for each in found] == [("tcp://*:5557", ""), ("tcp://*:5558", "")]


@pytest.mark.parametrize(
    ("kind", "version", "named"),
    [
        ("vllm", "0.11.2", True),
        ("sglang", "0.5.19", False),
        ("sglang", "0.5.20.post1", True),
        ("sglang", "", True),
        ("tensorrt_llm", "1.3.0", False),
    ],
)
def test_events_that_name_no_adapter_make_no_profile_where_adapters_are_served(
    kind: str, version: str, named: bool
) -> None:
    """Else the base model's prompts would be promised the blocks of an adapter; it holds of loaded ones too."""
    sources = (Source(0, "zmq", "tcp://10.0.0.1:4000"),)
    state = EndpointState(ADDRESS, kind=kind, version=version, sources=sources)
    expected = sources if named else ()
    assert sources_of(ADDRESS, state, EventSettings(), adapters=True) == expected
    assert sources_of(ADDRESS, state, EventSettings()) == sources
    loaded = msgspec.structs.replace(state, adapters=("sql",))
    assert sources_of(ADDRESS, loaded, EventSettings()) == expected
