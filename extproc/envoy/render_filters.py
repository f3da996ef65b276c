"""Renders the HTTP filters in the order a request meets them, and the access log."""

from typing import Any as Json

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
    AccessLogFilter,
    AndFilter,
    ExtensionFilter,
    LogTypeFilter,
    OrFilter,
    ResponseFlagFilter,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import ApiVersion, RuntimeFeatureFlag
from envoy_data_plane.envoy.data.accesslog.v3 import AccessLogType
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig
from envoy_data_plane.envoy.extensions.compression.gzip.decompressor.v3 import Gzip
from envoy_data_plane.envoy.extensions.filters.http.ai_protocol_manager.v3 import AiProtocolManager
from envoy_data_plane.envoy.extensions.filters.http.decompressor.v3 import (
    Decompressor,
    DecompressorCommonDirectionConfig,
    DecompressorRequestDirectionConfig,
    DecompressorResponseDirectionConfig,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    HeaderForwardingRules,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, StringMatcher
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any

from extproc.config import WORKERS_CLUSTER, Config
from extproc.envoy.contract import EMITTED_TAG, FIRST_LIMIT, KEY_HEADERS, METADATA, SENT_TAG, STALL_LIMIT
from extproc.envoy.render_auth import auth_filters
from extproc.envoy.render_parts import EXT_PROC, extension, grpc_service, milliseconds, reconnect, seconds
from extproc.envoy.render_quotas import before_body_filters, local_limit_filters
from extproc.envoy.render_shadow import capture_filters

FIRST_BODY_TAG = "first_body_us"
"""Access-log tag: microseconds from the first byte of the request to the first body byte of the answer."""
ATTEMPTS_EVERY_S = 0.5
"""How often Envoy looks whether a running request is at a further attempt."""
AI_PROTOCOL_MANAGER = "envoy.filters.http.ai_protocol_manager"
AI_PROTOCOL_SETTINGS: dict[str, Json] = {
    "response_handling": {
        "token_usage": {
            "include_unconfigured_routes": True,
            # Without it, usage is read only where `object` names a chat completion: not for `/v1/completions`,
            # embeddings and responses, whose usage has the same shape or is told apart all the same.
            "default_llm_protocol": "OPENAI_CHAT_COMPLETIONS",
        }
    }
}
"""Fields of the AI protocol manager; the message classes know the filter but none of its fields yet."""
AI_PROTOCOL_MESSAGES: dict[str, Json] = {
    "@type": "type.googleapis.com/envoy.extensions.filters.http.ai_protocol_manager.v3.AiProtocolManagerPerRoute",
    "response": {"llm_protocol": "ANTHROPIC_MESSAGES"},
}
"""The same for routes of the Messages API, whose `input_tokens` lack what was read from the cache and what was added to
it: read as OpenAI's, a prompt of 1,817 tokens with 1,728 cached counted as one of 25 with none (vLLM 0.32)."""

_BROKEN_ATTEMPTS = ("UF", "UC", "UR", "UPE", "UT")
"""Envoy's response flags of an attempt that brought no answer, or half of one."""
_SECRET_HEADERS = (*KEY_HEADERS, "proxy-authorization", "cookie")
_LONGEST_WAIT_S = 300
"""The most that `overload.queue.max_wait_s` can be."""
_INFLATE_CHUNK = 64 * 1024
_INFLATE_RATIO = 1032


def http_filters(config: Config) -> list[HttpFilter]:
    """The chain: count, let in, unpack gzip, ask the sidecar, read token usage on the way back, route."""
    return [
        *local_limit_filters(config),
        *auth_filters(config),
        *before_body_filters(config),
        _filter("envoy.filters.http.decompressor", _unpack()),
        _filter(EXT_PROC, _ext_proc(config)),
        *capture_filters(config),
        _filter(AI_PROTOCOL_MANAGER, AiProtocolManager()),
        _filter(
            "envoy.filters.http.router", Router(suppress_envoy_headers=True, upstream_log=[_failed_attempts(config)])
        ),
    ]


def _filter(name: str, message: Decompressor | ExternalProcessor | AiProtocolManager | Router) -> HttpFilter:
    return HttpFilter(name=name, typed_config=Any.pack(message))


def _unpack() -> Decompressor:
    """Gzip of requests only; answers pass as the engine wrote them.

    15 window bits read every gzip stream; the default of 12 refuses what most clients send. The ratio is the most
    that deflate can reach: with the default of 100, Envoy passes on what it had unpacked so far as if it were the
    whole body (seen: 65,536 of 100,000 bytes, and a 200). A bomb is stopped by the limit of the body, and by the
    listener's small read buffer before that.
    """
    return Decompressor(
        decompressor_library=extension(
            "envoy.compression.gzip.decompressor",
            Gzip(window_bits=15, chunk_size=_INFLATE_CHUNK, max_inflate_ratio=_INFLATE_RATIO),
        ),
        request_direction_config=DecompressorRequestDirectionConfig(
            common_config=_switch(on=True), advertise_accept_encoding=False
        ),
        response_direction_config=DecompressorResponseDirectionConfig(common_config=_switch(on=False)),
    )


def _switch(*, on: bool) -> DecompressorCommonDirectionConfig:
    return DecompressorCommonDirectionConfig(
        enabled=RuntimeFeatureFlag(default_value=on, runtime_key=f"warmpath.unpack_{'requests' if on else 'answers'}")
    )


def _ext_proc(config: Config) -> ExternalProcessor:
    gateway = config.gateway
    return ExternalProcessor(
        # A worker that refuses the connection costs one more try, not the decision.
        grpc_service=grpc_service(WORKERS_CLUSTER, retries=reconnect(tries=2)),
        failure_mode_allow=gateway.fail_open,
        processing_mode=_processing_mode(config),
        # Envoy's default of 200 ms turns long prompts into 504.
        message_timeout=milliseconds(gateway.message_timeout_ms),
        # What a worker may ask for while a request waits its turn.
        max_message_timeout=seconds(_LONGEST_WAIT_S + gateway.message_timeout_ms / 1000),
        allow_mode_override=False,
        # Routing headers such as Host stay Envoy's; ours are ordinary headers, and limits are told to its router.
        mutation_rules=HeaderMutationRules(disallow_system=True, allow_envoy=True if config.timeouts.differ else None),
        # Keys and cookies are no part of a decision, so they never leave Envoy.
        forward_rules=HeaderForwardingRules(
            disallowed_headers=ListStringMatcher(
                patterns=[StringMatcher(exact=name, ignore_case=True) for name in _SECRET_HEADERS]
            )
        ),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(
                untyped=["envoy.lb", "envoy.lb.subset_hint", METADATA]
            ),
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=["envoy.lb", METADATA]),
        ),
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
    )


def _processing_mode(config: Config) -> ProcessingMode:
    """What the sidecar sees of a request, and nothing of the answer.

    Asking for response trailers keeps the stream open until the answer ends: the sidecar learns of the end, and
    may end the request itself, without one byte of the answer passing through it.
    """
    send, skip = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP
    duplex = config.gateway.body_mode == "duplex"
    body = ProcessingModeBodySendMode
    return ProcessingMode(
        request_header_mode=send,
        request_body_mode=body.FULL_DUPLEX_STREAMED if duplex else body.BUFFERED,
        request_trailer_mode=send if duplex else skip,
        response_header_mode=skip,
        response_body_mode=body.NONE,
        response_trailer_mode=send,
    )


def access_logs(config: Config) -> list[AccessLog]:
    """One entry a finished request; and entries of some that run, at each interval.

    Of one that is tried anew they tell early which endpoint has the request now: answers take minutes, and until their
    end the wrong endpoint would be charged. Of one that has a limit they tell whether its first token has come, and
    whether it stands still. Only the periodic entries of Envoy carry its attempts and our metadata (the entry of an
    upstream stream has neither, in 1.40), so Envoy looks at each running request `ATTEMPTS_EVERY_S`, and writes next to
    nothing where there are no limits.
    """
    running = LogTypeFilter(types=[AccessLogType.DownstreamPeriodic])
    ended = LogTypeFilter(types=[AccessLogType.DownstreamPeriodic], exclude=True)
    again = ExtensionFilter(
        name="envoy.access_loggers.extension_filters.cel",
        typed_config=Any.pack(ExpressionFilter(expression=_AGAIN + (_WATCHED if config.timeouts.differ else ""))),
    )
    both = [AccessLogFilter(log_type_filter=running), AccessLogFilter(extension_filter=again)]
    return [
        _access_log(config, AccessLogFilter(log_type_filter=ended)),
        _access_log(config, AccessLogFilter(and_filter=AndFilter(filters=both))),
    ]


def _failed_attempts(config: Config) -> AccessLog:
    """One entry for each attempt that an engine failed; a request may have several, and be answered all the same.

    The downstream entry tells of the last attempt only. Requests that go well write nothing here.
    """
    broken = AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(_BROKEN_ATTEMPTS)))
    refused = AccessLogFilter(
        extension_filter=ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=Any.pack(ExpressionFilter(expression="response.code >= 500 || response.code == 429")),
        )
    )
    return _access_log(config, AccessLogFilter(or_filter=OrFilter(filters=[broken, refused])))


_AGAIN = "upstream.request_attempt_count > 1"
_OURS = f"metadata.filter_metadata['{METADATA}']"
# Without a limit on silence, nothing more has to be known once the first byte has come.
_WATCHED = (
    f" || ('{STALL_LIMIT}' in {_OURS} && {_OURS}['{STALL_LIMIT}'] > 0.0)"
    f" || ('{FIRST_LIMIT}' in {_OURS} && response.size == 0)"
)


def _tags(config: Config) -> list[CustomTag]:
    first_body = CustomTag(tag=FIRST_BODY_TAG, value="%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%")
    if not config.timeouts.differ:
        return [first_body]
    return [
        first_body,
        CustomTag(tag=EMITTED_TAG, value="%EMIT_TIME(%s.%3f)%"),
        CustomTag(tag=SENT_TAG, value="%COMMON_DURATION(DS_RX_BEG:US_TX_BEG:us)%"),
    ]


def _access_log(config: Config, which: AccessLogFilter) -> AccessLog:
    """Entries streamed to a worker, with our metadata, token usage and the time of the first body byte."""
    return AccessLog(
        name="envoy.access_loggers.http_grpc",
        filter=which,
        typed_config=Any.pack(
            HttpGrpcAccessLogConfig(
                common_config=CommonGrpcAccessLogConfig(
                    log_name="warmpath",
                    grpc_service=grpc_service(WORKERS_CLUSTER),
                    transport_api_version=ApiVersion.V3,
                    buffer_flush_interval=milliseconds(config.telemetry.access_log_flush_ms),
                    custom_tags=_tags(config),
                )
            )
        ),
    )
