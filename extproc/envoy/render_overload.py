"""Renders what Envoy does when it holds too much: connections and memory of all clients together.

Limits of one request do not bound their sum: a thousand clients that each send a megabyte and stall are all within
theirs. Near the limit the largest requests that are being received go first, so a client that sends little is served
on while others flood; at the limit nothing new comes in. Answers that run are left alone.
"""

from envoy_data_plane.envoy.config.overload.v3 import (
    BufferFactoryConfig,
    LoadShedPoint,
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
_LOOK_EVERY_MS = 20
"""Clients go on sending between two looks; Envoy's default is a second. At 100 ms they had sent 219 MB of 200."""

# Shares of the limit. Envoy resets streams only while the pressure changes, at most 50 each time, and the larger the
# pressure, the smaller the streams that it resets. A scale that ended at the limit would stop there: 1,000 streams of
# 1 MB then took 695 MB of 200. On one that goes on beyond it they took 171 MB.
_RESET_FROM, _RESET_ALL_AT = 0.8, 1.25
# Streams of HTTP/1 cannot be reset. Who still sends is cut a little before anybody is refused: what the others have
# sent by then stays below the point where new requests are.
_CUT_AT = 0.9
_REFUSE_AT = 0.95
_SMALLEST_POWER = 15
"""Streams that hold 32 KiB or more can be reset, in eight steps up to 4 MiB."""


def overload_manager(gateway: Gateway) -> OverloadManager | None:
    """The overload manager; None when no limit is set."""
    manager = OverloadManager(refresh_interval=milliseconds(_LOOK_EVERY_MS))
    if gateway.max_connections:
        limit = DownstreamConnectionsConfig(max_active_downstream_connections=gateway.max_connections)
        manager.resource_monitors.append(ResourceMonitor(name=_CONNECTIONS, typed_config=Any.pack(limit)))
    if gateway.max_memory_mb:
        # Pressure can be 1 at most, and has to go on beyond the limit.
        heap = FixedHeapConfig(max_heap_size_bytes=int(gateway.max_memory_mb * _MIB * _RESET_ALL_AT))
        manager.resource_monitors.append(ResourceMonitor(name=_HEAP, typed_config=Any.pack(heap)))
        manager.buffer_factory_config = BufferFactoryConfig(minimum_account_to_track_power_of_two=_SMALLEST_POWER)
        manager.actions = [
            _action("shrink_heap", _at(_RESET_FROM)),
            _action("reset_high_memory_stream", _from(_RESET_FROM)),
            _action("stop_accepting_requests", _at(_REFUSE_AT)),
        ]
        cut = LoadShedPoint(name="envoy.load_shed_points.http1_server_abort_dispatch", triggers=[_at(_CUT_AT)])
        manager.loadshed_points = [cut]
    return manager if manager.resource_monitors else None


def _action(name: str, trigger: Trigger) -> OverloadAction:
    return OverloadAction(name=f"envoy.overload_actions.{name}", triggers=[trigger])


def _at(share: float) -> Trigger:
    """Once this share of the limit is in use."""
    return Trigger(name=_HEAP, threshold=ThresholdTrigger(value=share / _RESET_ALL_AT))


def _from(share: float) -> Trigger:
    """The more, the further beyond this share of the limit."""
    return Trigger(name=_HEAP, scaled=ScaledTrigger(scaling_threshold=share / _RESET_ALL_AT, saturation_threshold=1.0))
