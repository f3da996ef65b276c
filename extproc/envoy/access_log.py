"""Envoy's gRPC access log into observations: who served, how long it took, what the engine said it cost.

Entries come in batches over one long stream a connection. A malformed one is counted and left out; nothing that
arrives here can end the stream or raise.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import grpc
import msgspec
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf.message import DecodeError

from extproc._pb.warmpath.v1 import token_usage_pb2
from extproc.envoy.changes import Changes, until
from extproc.envoy.contract import METADATA, Attempt, Observer, Served, Watcher
from extproc.envoy.replies import CHARGE_KEY, POOL_KEY
from extproc.envoy.running import running_from

_log = logging.getLogger(__name__)

SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
FIRST_BODY_TAG: Final = "first_body_us"
"""Custom tag with microseconds from the request's first byte to the first byte of the endpoint's body:
`%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%`. Envoy's own fields know only the first byte of the headers, which
a streaming engine sends before the prefill."""
USAGE_NAMESPACE: Final = "envoy.ai.token_usage"
"""Typed metadata that Envoy's ai_protocol_manager filter writes."""
_USAGE_TYPE: Final = "/envoy.data.ai.v3.TokenUsage"

_SHORT_FLAGS: Final[Mapping[str, str]] = {
    "failed_local_healthcheck": "LH",
    "no_healthy_upstream": "UH",
    "upstream_request_timeout": "UT",
    "local_reset": "LR",
    "upstream_remote_reset": "UR",
    "upstream_connection_failure": "UF",
    "upstream_connection_termination": "UC",
    "upstream_overflow": "UO",
    "no_route_found": "NR",
    "delay_injected": "DI",
    "fault_injected": "FI",
    "rate_limited": "RL",
    "unauthorized_details": "UAEX",
    "rate_limit_service_error": "RLSE",
    "downstream_connection_termination": "DC",
    "upstream_retry_limit_exceeded": "URX",
    "stream_idle_timeout": "SI",
    "invalid_envoy_request_headers": "IH",
    "downstream_protocol_error": "DPE",
    "upstream_max_stream_duration_reached": "UMSDR",
    "response_from_cache_filter": "RFCF",
    "no_filter_config_found": "NFCF",
    "duration_timeout": "DT",
    "upstream_protocol_error": "UPE",
    "no_cluster_found": "NC",
    "overload_manager": "OM",
    "dns_resolution_failure": "DF",
    "downstream_remote_reset": "DR",
}
_STAGES: Final[Mapping[str, str]] = {
    "upstream_per_try_timeout": "headers",
    "warmpath_time_limit_first_token": "first_token",
    "warmpath_time_limit_stall": "stall",
    "warmpath_time_limit": "request",
    "response_timeout": "request",
    "max_duration_timeout": "request",
    "stream_idle_timeout": "idle",
}
"""The time limit that each of Envoy's response code details tells of; those of our own answers begin with our name."""

Context = grpc.aio.ServicerContext[bytes, bytes]
_DONE: Final[bytes] = als_pb2.StreamAccessLogsResponse().SerializeToString()


class LogCounts(msgspec.Struct):
    """What came in since the start.

    Attributes:
        entries: finished requests handed to the observer.
        intermediate: entries of requests that were still running.
        malformed: batches or entries that could not be read.
        attempts: failed attempts handed to the observer.
        usage_unreadable: entries whose token usage could not be read; the rest of them was used.
    """

    entries: int = 0
    intermediate: int = 0
    malformed: int = 0
    attempts: int = 0
    usage_unreadable: int = 0


class AccessLog:
    """The service. Hands each finished request, and each that is tried anew, to an `Observer`.

    Attributes:
        counts: what came in so far.
    """

    def __init__(self, observer: Observer, watcher: Watcher | None = None) -> None:
        """`watcher` gets those that run and have limits; None where there are no limits."""
        self.counts = LogCounts()
        self._observer = observer
        self._watcher = watcher
        self._closing = Changes()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service for a gRPC server. Batches stay bytes, so that one that cannot be read ends no stream."""
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]]
        methods = {"StreamAccessLogs": grpc.stream_unary_rpc_method_handler(self._stream)}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def close(self) -> None:
        """End every stream; the gateway opens another, elsewhere."""
        self._closing.announce()

    async def _stream(self, _requests: Any, context: Context) -> bytes:
        while (raw := await until(self._closing, context.read())) is not None and isinstance(raw, bytes):
            self.take(raw)
        return _DONE

    def take(self, raw: bytes) -> None:
        """Take one batch, a serialised `StreamAccessLogsMessage`."""
        try:
            entries = als_pb2.StreamAccessLogsMessage.FromString(raw).http_logs.log_entry
        except DecodeError:
            self.counts.malformed += 1
            _log.warning("access log: a batch of %d bytes could not be read", len(raw))
            return
        self._take_entries(entries)

    def _take_entries(self, entries: Iterable[accesslog_pb2.HTTPAccessLogEntry]) -> None:
        for entry in entries:
            if entry.common_properties.access_log_type == accesslog_pb2.UpstreamEnd:
                self.counts.attempts += 1
                self._observer.attempt_failed(attempt_from(entry))
                continue
            running = is_intermediate(entry)
            try:
                if running and self._watcher is not None:
                    watched = running_from(entry)
                    if watched is not None:
                        self._watcher.running(watched)
                    if entry.common_properties.upstream_request_attempt_count <= 1:
                        self.counts.intermediate += 1
                        continue
                served = served_from(entry)
            except ValueError as error:
                self.counts.malformed += 1
                _log.warning("access log: an entry could not be read: %s", error)
                continue
            if running:
                self.counts.intermediate += 1
                if served.charge_id and served.attempts > 1:
                    self._observer.tried_again(served)
                continue
            if served.prompt_tokens < 0 and USAGE_NAMESPACE in entry.common_properties.metadata.typed_filter_metadata:
                self.counts.usage_unreadable += 1
            self.counts.entries += 1
            self._observer.observe(served)
            if self._watcher is not None:
                self._watcher.over(served)


def is_intermediate(entry: accesslog_pb2.HTTPAccessLogEntry) -> bool:
    """Whether the request was still running when the entry was written."""
    common = entry.common_properties
    running = (accesslog_pb2.DownstreamStart, accesslog_pb2.DownstreamPeriodic)
    return bool(common.intermediate_log_entry) or common.access_log_type in running


def attempt_from(entry: accesslog_pb2.HTTPAccessLogEntry) -> Attempt:
    """One attempt at an endpoint, by the router's own log: it has no metadata, and a status of 0 without an answer."""
    common = entry.common_properties
    return Attempt(
        pool=common.upstream_cluster,
        destination=_address(common.upstream_remote_address),
        status=entry.response.response_code.value,
        flags=_flags(common),
    )


def served_from(entry: accesslog_pb2.HTTPAccessLogEntry) -> Served:
    """One finished request.

    Raises:
        ValueError: a value is out of its range; the text names the field.
    """
    common, request, response = entry.common_properties, entry.request, entry.response
    metadata = _own_metadata(common)
    prompt, output, cached = _usage(common)
    return Served(
        charge_id=str(metadata.pop(CHARGE_KEY, "")),
        pool=str(metadata.pop(POOL_KEY, "") or common.upstream_cluster),
        destination=_address(common.upstream_remote_address),
        status=response.response_code.value,
        attempts=common.upstream_request_attempt_count,
        flags=_flags(common),
        ttft_s=_ttft(common),
        duration_s=_seconds(common, "duration"),
        request_bytes=request.request_body_bytes,
        response_bytes=response.response_body_bytes,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
        metadata=metadata,
        stage=_STAGES.get(response.response_code_details, ""),
    )


def _flags(common: Any) -> tuple[str, ...]:
    return tuple(_SHORT_FLAGS.get(field.name, field.name) for field, _ in common.response_flags.ListFields())


def _ttft(common: Any) -> float:
    """Seconds from the request's last byte to the first byte of the endpoint's body; of its headers without the tag."""
    began = _seconds(common, "time_to_last_rx_byte")
    tag = common.custom_tags.get(FIRST_BODY_TAG, "")
    if tag and tag != "-":
        if not tag.isascii() or not tag.isdigit():
            raise ValueError(f"custom tag {FIRST_BODY_TAG} is not a whole number")
        first = int(tag) / 1e6
    else:
        first = _seconds(common, "time_to_first_upstream_rx_byte")
    if first < 0:
        return -1.0
    return max(0.0, first - max(0.0, began))


def _seconds(common: Any, field: str) -> float:
    """A duration in seconds; -1 when it is absent."""
    if not common.HasField(field):
        return -1.0
    duration = getattr(common, field)
    return float(duration.seconds + duration.nanos / 1e9)


def _own_metadata(common: Any) -> dict[str, str | float]:
    """Flat values of our namespace; anything nested is not ours and is left out."""
    namespaces = common.metadata.filter_metadata
    if METADATA not in namespaces:
        return {}
    values: dict[str, str | float] = {}
    for key, value in namespaces[METADATA].fields.items():
        kind = value.WhichOneof("kind")
        if kind == "string_value":
            values[key] = value.string_value
        elif kind == "number_value":
            values[key] = value.number_value
    return values


def _usage(common: Any) -> tuple[int, int, int]:
    """Prompt, output and cached tokens as the engine reported them; -1 for each that is unknown."""
    typed = common.metadata.typed_filter_metadata
    if USAGE_NAMESPACE not in typed:
        return -1, -1, -1
    packed = typed[USAGE_NAMESPACE]
    if not packed.type_url.endswith(_USAGE_TYPE):
        return -1, -1, -1
    try:
        usage = token_usage_pb2.TokenUsage.FromString(packed.value)
    except DecodeError:
        return -1, -1, -1
    prompt = usage.input_tokens.value if usage.HasField("input_tokens") else -1
    output = usage.output_tokens.value if usage.HasField("output_tokens") else -1
    cached = usage.input_token_details.cached_tokens.value if prompt >= 0 else -1
    return prompt, output, cached


def _address(address: Any) -> str:
    """`ip:port`, brackets around IPv6; the path of a Unix socket; empty when there is none."""
    kind = address.WhichOneof("address")
    if kind == "socket_address":
        host = address.socket_address.address
        return (
            f"[{host}]:{address.socket_address.port_value}"
            if ":" in host
            else (f"{host}:{address.socket_address.port_value}")
        )
    return str(address.pipe.path) if kind == "pipe" else ""
