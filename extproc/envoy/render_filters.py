"""Renders the HTTP filters in the order a request meets them, and the access log."""

from typing import Any as Json

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
    AccessLogFilter,
    AndFilter,
    ExtensionFilter,
    LogTypeFilter,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    BackoffStrategy,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
    RuntimeFeatureFlag,
)
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
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, StringMatcher
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any

from extproc.config import WORKERS_CLUSTER, Config
from extproc.envoy.contract import METADATA
from extproc.envoy.render_parts import extension, grpc_service, milliseconds

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

_SECRET_HEADERS = ("authorization", "proxy-authorization", "cookie", "api-key", "x-api-key")
_INFLATE_CHUNK = 64 * 1024
_INFLATE_RATIO = 1032


def http_filters(config: Config) -> list[HttpFilter]:
    """The chain: unpack gzip, ask the sidecar, read token usage on the way back, route."""
    return [
        _filter("envoy.filters.http.decompressor", _unpack()),
        _filter("envoy.filters.http.ext_proc", _ext_proc(config)),
        _filter(AI_PROTOCOL_MANAGER, AiProtocolManager()),
        _filter("envoy.filters.http.router", Router(suppress_envoy_headers=True)),
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
        grpc_service=grpc_service(WORKERS_CLUSTER, retries=_reconnect(tries=2)),
        failure_mode_allow=gateway.fail_open,
        processing_mode=_processing_mode(config),
        # Envoy's default of 200 ms turns long prompts into 504.
        message_timeout=milliseconds(gateway.message_timeout_ms),
        allow_mode_override=False,
        # Routing headers such as Host stay Envoy's; ours are ordinary headers.
        mutation_rules=HeaderMutationRules(disallow_system=True),
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


def _reconnect(tries: int) -> RetryPolicy:
    return RetryPolicy(
        retry_on="connect-failure,refused-stream,reset-before-request",
        num_retries=tries,
        retry_back_off=BackoffStrategy(base_interval=milliseconds(5), max_interval=milliseconds(20)),
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts", typed_config=Any.pack(PreviousHostsPredicate())
            )
        ],
        host_selection_retry_max_attempts=5,
    )


def access_logs(config: Config) -> list[AccessLog]:
    """One entry a finished request; and for one that is tried anew, entries from then on, while it runs.

    The second kind tells early which endpoint has the request now: answers take minutes, and until their end the wrong
    endpoint would be charged. Only the periodic entries of Envoy carry its attempts and our metadata (the entry of an
    upstream stream has neither, in 1.40), so Envoy looks at each running request `ATTEMPTS_EVERY_S`, and writes next to
    nothing.
    """
    running = LogTypeFilter(types=[AccessLogType.DownstreamPeriodic])
    ended = LogTypeFilter(types=[AccessLogType.DownstreamPeriodic], exclude=True)
    again = ExtensionFilter(
        name="envoy.access_loggers.extension_filters.cel",
        typed_config=Any.pack(ExpressionFilter(expression="upstream.request_attempt_count > 1")),
    )
    both = [AccessLogFilter(log_type_filter=running), AccessLogFilter(extension_filter=again)]
    return [
        _access_log(config, AccessLogFilter(log_type_filter=ended)),
        _access_log(config, AccessLogFilter(and_filter=AndFilter(filters=both))),
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
                    custom_tags=[CustomTag(tag=FIRST_BODY_TAG, value="%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%")],
                )
            )
        ),
    )
