"""Renders Envoy's own error answers: JSON in OpenAI's shape, with the reason header.

Answers that the sidecar wrote are left alone: every mapper asks for one of Envoy's response flags or response
code details, and an `immediate_response` carries neither.
"""

from collections.abc import Mapping
from types import MappingProxyType

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

from extproc.config import Config, Gateway
from extproc.envoy.contract import REASON
from extproc.envoy.render_quotas import FAILED_DETAILS, LOCAL_DETAILS, REFUSED_DETAILS
from extproc.envoy.render_routes import MESSAGES, scopes
from extproc.errors import (
    BodyTooLargeError,
    HeadersLimitError,
    NoEndpointError,
    RateLimitedError,
    TimeLimitError,
    UnauthorizedError,
    UnknownPathError,
    WarmpathError,
)

_UNREACHABLE = ("UH", "UF", "UC", "UR", "URX", "UO", "LR", "NC", "NR", "UPE", "LH")
_DETAILS = "response.code_details"
# The limit on the whole request sets no response flag, so all limits are told by their details.
_TOO_SLOW = ("max_duration_timeout", "stream_idle_timeout", "response_timeout", "upstream_max_stream_duration_reached")
_SILENT = ("upstream_per_try_timeout",)
_TOO_SLOW_TO_SEND = ("request_overall_timeout", "request_header_timeout")
_HEADERS_TOO_LARGE = ("http1.headers_too_large", "http1.too_many_headers", "http2.too_many_headers")
# Ours are `warmpath_` and the reason, or nothing where somebody else speaks to Envoy in our place.
_NOT_OURS = f"!({_DETAILS} in ['', '{REFUSED_DETAILS}']) && !{_DETAILS}.startsWith('warmpath_')"


class SidecarUnavailableError(WarmpathError):
    """No sidecar answered and the gateway is told to fail closed."""

    status = 503
    reason = "sidecar_unavailable"
    kind = "service_unavailable"


class NoTenantError(WarmpathError):
    """A good token that names no tenant."""

    status = 403
    reason = "no_tenant"
    kind = "permission_error"


class TooSlowToSendError(WarmpathError):
    """The client did not send its request in time."""

    status = 408
    reason = "receive_time_limit"
    kind = "timeout_error"


class HeadersTooLargeError(WarmpathError):
    """The headers of the request are too large or too many."""

    status = 431
    reason = "headers_too_large"
    kind = "invalid_request_error"


class GatewayFullError(WarmpathError):
    """Envoy holds as much as it may."""

    status = 503
    reason = "gateway_full"
    kind = "service_unavailable"


class MalformedError(WarmpathError):
    """What was sent is not HTTP, or not a request that can be passed on."""

    status = 400
    reason = "malformed"
    kind = "invalid_request_error"


class GatewayError(WarmpathError):
    """Any other answer of Envoy's own."""

    status = 503
    reason = "gateway"
    kind = "service_unavailable"


def local_replies(config: Config) -> LocalReplyConfig:
    """Mappers for Envoy's own answers; the first that matches writes the body."""
    gateway = config.gateway
    unauthorized = UnauthorizedError("This gateway asks for a key: none was sent, or it is not valid.")
    too_large = HeadersTooLargeError(
        f"The request has over {gateway.max_header_count} headers, or over {gateway.max_headers_kb} KiB of them."
    )
    return LocalReplyConfig(
        mappers=[
            *_too_large(gateway),
            _mapper(
                _cel(
                    f"{_DETAILS}.startsWith('ext_proc_error') || {_DETAILS} in ['ext_authz_error', '{FAILED_DETAILS}']"
                ),
                SidecarUnavailableError("The router did not answer; try again."),
            ),
            _mapper(
                _cel(f"{_DETAILS} == 'ext_authz_denied' || {_DETAILS}.startsWith('jwt_authn_access_denied')"),
                unauthorized,
                {"www-authenticate": "Bearer"},
            ),
            _mapper(_cel(f"{_DETAILS}.startsWith('rbac_access_denied')"), NoTenantError("The token names no tenant.")),
            _mapper(_details(*_SILENT), HeadersLimitError("No endpoint began to answer in time; try again.")),
            _mapper(_details(*_TOO_SLOW), TimeLimitError("The request took longer than this gateway allows.")),
            _mapper(_details(*_TOO_SLOW_TO_SEND), TooSlowToSendError("The request was not received whole in time.")),
            _mapper(_details(*_HEADERS_TOO_LARGE), too_large),
            _mapper(_details("direct_response"), UnknownPathError("This gateway serves no such path.")),
            _mapper(
                _details(LOCAL_DETAILS),
                RateLimitedError("This gateway gets more requests a second than it takes. Try again in 1 s.", {}),
                {"retry-after": "1"},
            ),
            _mapper(_details("overload"), GatewayFullError("This gateway is full; try again.")),
            _mapper(_flags(*_UNREACHABLE), NoEndpointError("No endpoint could serve the request; try again.")),
            *_any_other(),
        ]
    )


def _too_large(gateway: Gateway) -> list[ResponseMapper]:
    """A body over the limit, of its path or of the gateway."""
    told = _details_are("request_payload_too_large")
    limits: dict[int, list[str]] = {}
    for scope in scopes(gateway):
        limit = scope.rules.max_body_bytes if scope.rules else None
        names = [scope.named(kind) + end for kind in ("picked", "fallback") for end in ("", MESSAGES)]
        limits.setdefault(gateway.max_body_bytes if limit is None else limit, []).extend(names)
    own = [limit for limit in limits if limit != gateway.max_body_bytes]
    return [
        *(_mapper(_cel(f"{told} && xds.route_name in {limits[limit]}"), _body_over(limit)) for limit in own),
        _mapper(_cel(told), _body_over(gateway.max_body_bytes)),
    ]


def _body_over(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The request body is larger than {limit} bytes.")


def _any_other() -> list[ResponseMapper]:
    """What is left, so that no answer is plain text: the client's mistakes with Envoy's status, and ours."""
    malformed = _mapper(
        _cel(f"(response.code >= 400 && response.code < 500 || response.code == 501) && {_NOT_OURS}"),
        MalformedError("This is not a request that can be passed on: check its HTTP version, framing and host."),
    )
    malformed.status_code = None
    text = malformed.body_format_override
    if text and text.text_format_source:
        # The number of Envoy's own status, not ours.
        told = str(text.text_format_source.inline_string)
        text.text_format_source.inline_string = told.replace(f": {MalformedError.status}}}", ": %RESPONSE_CODE%}")
    failed = GatewayError("The gateway could not pass the request on.")
    return [malformed, _mapper(_cel(f"response.code >= 500 && {_NOT_OURS}"), failed)]


def _mapper(
    matches: AccessLogFilter, error: WarmpathError, headers: Mapping[str, str] = MappingProxyType({})
) -> ResponseMapper:
    body = error.body().decode().replace("%", "%%")
    return ResponseMapper(
        filter=matches,
        status_code=error.status,
        body_format_override=SubstitutionFormatString(
            text_format_source=DataSource(inline_string=body), content_type="application/json"
        ),
        headers_to_add=[
            HeaderValueOption(
                header=HeaderValue(key=key, value=value),
                append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for key, value in {REASON: error.reason, **headers}.items()
        ],
    )


def _flags(*flags: str) -> AccessLogFilter:
    return AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(flags)))


def _details(*details: str) -> AccessLogFilter:
    return _cel(_details_are(*details))


def _details_are(*details: str) -> str:
    return f"{_DETAILS} in {list(details)}"


def _cel(expression: str) -> AccessLogFilter:
    return AccessLogFilter(
        extension_filter=ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=Any.pack(ExpressionFilter(expression=expression)),
        )
    )
