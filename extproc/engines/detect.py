"""Which adapters there are, and which of them an endpoint's own pages speak for."""

from collections.abc import Sequence

from extproc.config_pools import EngineKind
from extproc.engines.adapter import Adapter
from extproc.engines.sglang import SglangAdapter
from extproc.engines.tensorrt_llm import TensorRtAdapter
from extproc.engines.vllm import VllmAdapter


def all_adapters() -> Sequence[Adapter]:
    """One adapter of each kind."""
    return (VllmAdapter(), SglangAdapter(), TensorRtAdapter())


def candidates(adapters: Sequence[Adapter], configured: EngineKind, owner: EngineKind = "auto") -> Sequence[Adapter]:
    """Adapters to try on an endpoint, the likeliest first.

    Args:
        adapters: those that there are.
        configured: what the configuration says; `auto` to find out.
        owner: kind that the endpoint's list of models names as its owner; `auto` for none. A proxy may have rewritten
            it, so that it decides the order alone.
    """
    if configured != "auto":
        return [adapter for adapter in adapters if adapter.kind == configured]
    return sorted(adapters, key=lambda adapter: adapter.kind != owner)
