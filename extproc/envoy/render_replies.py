"""Renders Envoy's own error answers: JSON in OpenAI's shape, with the reason header.

Answers that the sidecar wrote are left alone: every mapper asks for one of Envoy's response flags or response
code details, and an `immediate_response` carries neither.
"""

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLogFilter, ExtensionFilter, ResponseFlagFilter
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    SubstitutionFormatString,
)
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    LocalReplyConfig,
    ResponseMapper,
)
from envoy_data_plane.google.protobuf import Any

from extproc.config import Config
from extproc.envoy.contract import REASON
from extproc.errors import BodyTooLargeError, NoEndpointError, TimeLimitError, WarmpathError

_UNREACHABLE = ("UH", "UF", "UC", "UR", "URX", "UO", "LR", "NC", "NR", "UPE", "LH")
_TOO_LARGE = "response.code_details == 'request_payload_too_large'"
_NO_SIDECAR = "response.code_details.startsWith('ext_proc_error')"
# The limit on the whole request sets no response flag, so all limits are told by their details.
_TOO_SLOW = (
    "response.code_details in ['max_duration_timeout', 'stream_idle_timeout', 'response_timeout', "
    "'upstream_max_stream_duration_reached']"
)


class SidecarUnavailableError(WarmpathError):
    """No sidecar answered and the gateway is told to fail closed."""

    status = 503
    reason = "sidecar_unavailable"
    kind = "service_unavailable"


def local_replies(config: Config) -> LocalReplyConfig:
    """Mappers for Envoy's own answers; the first that matches writes the body."""
    limit = config.gateway.max_body_bytes
    return LocalReplyConfig(
        mappers=[
            _mapper(
                _details(_TOO_LARGE),
                BodyTooLargeError(f"The request body is larger than {limit} bytes."),
            ),
            _mapper(
                _details(_NO_SIDECAR),
                SidecarUnavailableError("The router did not answer; try again."),
            ),
            _mapper(_details(_TOO_SLOW), TimeLimitError("The request took longer than this gateway allows.")),
            _mapper(_flags(*_UNREACHABLE), NoEndpointError("No endpoint could serve the request; try again.")),
        ]
    )


def _mapper(matches: AccessLogFilter, error: WarmpathError) -> ResponseMapper:
    body = error.body().decode().replace("%", "%%")
    return ResponseMapper(
        filter=matches,
        status_code=error.status,
        body_format_override=SubstitutionFormatString(
            text_format_source=DataSource(inline_string=body), content_type="application/json"
        ),
        headers_to_add=[
            HeaderValueOption(
                header=HeaderValue(key=REASON, value=error.reason),
                append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
            )
        ],
    )


def _flags(*flags: str) -> AccessLogFilter:
    return AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(flags)))


def _details(expression: str) -> AccessLogFilter:
    return AccessLogFilter(
        extension_filter=ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=Any.pack(ExpressionFilter(expression=expression)),
        )
    )
