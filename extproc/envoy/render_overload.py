"""Renders what Envoy does when it holds too much: connections and memory of all clients together.

Limits of one request do not bound their sum: a thousand clients that each send a megabyte and stall are all within
theirs.
"""

from envoy_data_plane.envoy.config.overload.v3 import (
    BufferFactoryConfig,
    OverloadAction,
    OverloadManager,
    ResourceMonitor,
    ScaledTrigger,
    ThresholdTrigger,
    Trigger,
)
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import DownstreamConnectionsConfig
from envoy_data_plane.envoy.extensions.resource_monitors.fixed_heap.v3 import FixedHeapConfig
from envoy_data_plane.google.protobuf import Any

from extproc.config import Gateway
from extproc.envoy.render_parts import milliseconds

_HEAP = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
_MIB = 1 << 20
_LOOK_EVERY_MS = 100
"""Clients go on sending between two looks; Envoy's default is a second."""
_REFUSE_AT = 0.9
_RESET_FROM, _RESET_ALL_AT = 0.95, 1.0
_TRACKED_FROM_POWER = 17
"""Streams that hold 128 KiB or more can be reset, the largest first: seven steps further up are 16 MiB."""


def overload_manager(gateway: Gateway) -> OverloadManager | None:
    """The overload manager; None when no limit is set."""
    manager = OverloadManager(refresh_interval=milliseconds(_LOOK_EVERY_MS))
    if gateway.max_connections:
        limit = DownstreamConnectionsConfig(max_active_downstream_connections=gateway.max_connections)
        manager.resource_monitors.append(ResourceMonitor(name=_CONNECTIONS, typed_config=Any.pack(limit)))
    if gateway.max_memory_mb:
        heap = FixedHeapConfig(max_heap_size_bytes=gateway.max_memory_mb * _MIB)
        manager.resource_monitors.append(ResourceMonitor(name=_HEAP, typed_config=Any.pack(heap)))
        manager.buffer_factory_config = BufferFactoryConfig(minimum_account_to_track_power_of_two=_TRACKED_FROM_POWER)
        manager.actions = [
            _at("shrink_heap", _REFUSE_AT),
            _at("stop_accepting_requests", _REFUSE_AT),
            _between("reset_high_memory_stream", _RESET_FROM, _RESET_ALL_AT),
        ]
    return manager if manager.resource_monitors else None


def _at(action: str, share: float) -> OverloadAction:
    trigger = Trigger(name=_HEAP, threshold=ThresholdTrigger(value=share))
    return OverloadAction(name=f"envoy.overload_actions.{action}", triggers=[trigger])


def _between(action: str, start: float, end: float) -> OverloadAction:
    trigger = Trigger(name=_HEAP, scaled=ScaledTrigger(scaling_threshold=start, saturation_threshold=end))
    return OverloadAction(name=f"envoy.overload_actions.{action}", triggers=[trigger])
