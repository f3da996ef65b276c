"""Where an endpoint's KV events are to be had: as its engine tells, else as the configuration says."""

import re
from typing import Final

from extproc.config import EventSettings
from extproc.fleet.kv_address import of_rank
from extproc.state.endpoint import EndpointState, Source

_NAMED_SINCE: Final = (0, 5, 20)
"""SGLang's first version whose events name the LoRA adapter; 0.5.19 does not."""


def sources_of(
    name: str, state: EndpointState, settings: EventSettings, *, adapters: bool = False
) -> tuple[Source, ...]:
    """Sources of an endpoint, one for each data-parallel rank; none when it publishes nothing.

    Args:
        name: endpoint id.
        state: its state; what the engine tells goes first.
        settings: those of its pool, for engines of the kinds that publish.
        adapters: the pool serves LoRA adapters. Where events do not name them, an adapter's blocks would be taken for
            those of the base model, so that there is no precise profile.
    """
    if (adapters or state.adapters) and not _names_adapters(state):
        return ()
    if state.sources or not settings.endpoint or state.kind not in {"vllm", "sglang"}:
        return state.sources
    topic = settings.topic.replace("{endpoint}", name)
    return tuple(
        Source(rank, "zmq", of_rank(settings.endpoint, rank), of_rank(settings.replay, rank), topic)
        for rank in range(max(1, state.ranks))
    )


def _names_adapters(state: EndpointState) -> bool:
    if state.kind == "sglang":
        version = re.match(r"(\d+)\.(\d+)\.(\d+)", state.version)
        return version is None or tuple(map(int, version.groups())) >= _NAMED_SINCE
    return state.kind != "tensorrt_llm"
