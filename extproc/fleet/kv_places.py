"""Where an endpoint's KV events are to be had: as its engine tells, else as the configuration says."""

from extproc.config import EventSettings
from extproc.state.endpoint import EndpointState, Source


def sources_of(name: str, state: EndpointState, settings: EventSettings) -> tuple[Source, ...]:
    """Sources of an endpoint, one for each data-parallel rank; none when it publishes nothing.

    Args:
        name: endpoint id.
        state: its state; what the engine tells goes first.
        settings: those of its pool, for engines of the kinds that publish.
    """
    if state.sources or not settings.endpoint or state.kind not in {"vllm", "sglang"}:
        return state.sources
    topic = settings.topic.replace("{endpoint}", name)
    return tuple(
        Source(rank, "zmq", _of_rank(settings.endpoint, rank), _of_rank(settings.replay, rank), topic)
        for rank in range(max(1, state.ranks))
    )


def _of_rank(address: str, rank: int) -> str:
    """The address of a data-parallel rank: its port is the first one's and the rank's number (vLLM, SGLang)."""
    if not rank or not address:
        return address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"
