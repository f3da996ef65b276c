"""The one tree of errors: what went wrong, the HTTP status a client sees, and the machine-readable reason.

Imports nothing of this package. Every error that can reach a client knows how to write itself as the
OpenAI-shaped JSON body that SDKs parse; texts never contain prompts, keys or session ids.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class WarmpathError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        status: HTTP status when the error answers a request.
        reason: value of the response header `x-warmpath-reason`, from a closed set.
        kind: value of `error.type` in the JSON body, as OpenAI names it.
        error_code: value of `error.code` there; the status when None.
        headers: further response headers, lower-case names.
    """

    status: ClassVar[int] = 500
    reason: ClassVar[str] = "internal"
    kind: ClassVar[str] = "internal_error"
    error_code: ClassVar[str | None] = None
    headers: Mapping[str, str] = MappingProxyType({})

    def body(self) -> bytes:
        """Return the OpenAI-shaped JSON body, UTF-8."""
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.error_code or self.status}
        return json.dumps({"error": error}).encode()


class NoEndpointError(WarmpathError):
    """No endpoint of the pool can serve the request now."""

    status = 503
    reason = "no_endpoint"
    kind = "service_unavailable"


class OverloadedError(WarmpathError):
    """The request was shed by policy; `retry_after_s` is a whole number of seconds, at least 1."""

    status = 429
    reason = "overloaded"
    kind = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, retry_after_s)
        self.headers = {"retry-after": str(self.retry_after_s)}


class QueueTimeoutError(WarmpathError):
    """The request waited for as long as it may, and no endpoint had room; it says nothing of when one will."""

    status = 503
    reason = "queue_timeout"
    kind = "service_unavailable"


class ClientLeftError(WarmpathError):
    """The client left while its request waited; nobody sees the answer."""

    status = 499
    reason = "client_left"
    kind = "client_closed_request"


class RateLimitedError(WarmpathError):
    """A limit of use was reached; `headers` tell which, and when it allows the request, if it ever does."""

    status = 429
    reason = "rate_limited"
    kind = "rate_limit_error"
    error_code = "rate_limit_exceeded"

    def __init__(self, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.headers = headers


class DuplicateRequestError(WarmpathError):
    """Another request with the same idempotency key is still running."""

    status = 409
    reason = "duplicate_request"
    kind = "conflict_error"
    error_code = "duplicate_request"
    # SDKs of OpenAI and Anthropic try again after a 409, unless this header says otherwise: the second try would run
    # what the first one, which still runs, answers.
    headers = MappingProxyType({"x-should-retry": "false"})


class UnknownModelError(WarmpathError):
    """The request names a model that no pool serves."""

    status = 404
    reason = "unknown_model"
    kind = "not_found_error"


class UnknownVersionError(WarmpathError):
    """The request asks for a version that its model does not have."""

    status = 400
    reason = "unknown_version"
    kind = "invalid_request_error"


class UnknownPathError(WarmpathError):
    """The path is none that the gateway serves."""

    status = 404
    reason = "unknown_path"
    kind = "not_found_error"


class UnauthorizedError(WarmpathError):
    """The request shows no key or token that lets it in."""

    status = 401
    reason = "unauthorized"
    kind = "authentication_error"


class ForbiddenError(WarmpathError):
    """The operator API is not open to who asks, or to what asks for them; the text names the remedy."""

    status = 403
    reason = "forbidden"
    kind = "permission_error"


class TokenUnusableError(WarmpathError):
    """The token of the operator API cannot be read on this host."""

    status = 503
    reason = "token_unusable"
    kind = "service_unavailable"


class UnknownCanaryError(WarmpathError):
    """An operator names a version that the model does not have."""

    status = 404
    reason = "unknown_canary"
    kind = "not_found_error"


class UnknownRolloutError(WarmpathError):
    """The model has no rollout."""

    status = 404
    reason = "unknown_rollout"
    kind = "not_found_error"


class BodyTooLargeError(WarmpathError):
    """The request body is over the configured limit."""

    status = 413
    reason = "body_too_large"
    kind = "invalid_request_error"


class UnfitRequestError(WarmpathError):
    """The engines of the pool cannot keep what the request asks for; the text names the field and the remedy."""

    status = 400
    reason = "engine_cannot"
    kind = "invalid_request_error"


class BadQuestionError(WarmpathError):
    """What an operator asked of the admin page cannot be read; the text names the place and the remedy."""

    status = 400
    reason = "bad_question"
    kind = "invalid_request_error"


class UnknownDecisionError(WarmpathError):
    """No worker of this host remembers the decision that was asked for."""

    status = 404
    reason = "unknown_decision"
    kind = "not_found_error"


class TimeLimitError(WarmpathError):
    """A time limit of the request ran out before the first byte of the answer."""

    status = 504
    reason = "time_limit"
    kind = "timeout_error"


class RelayError(WarmpathError):
    """A relayed answer cannot be completed: its engine was lost, and no other one can take it over."""

    status = 503
    reason = "engine_lost"
    kind = "service_unavailable"


class HeadersLimitError(TimeLimitError):
    """No endpoint began to answer within its time."""

    reason = "time_limit_headers"


class FirstTokenLimitError(TimeLimitError):
    """The first token of an answer did not come within its time."""

    reason = "time_limit_first_token"


class StallLimitError(TimeLimitError):
    """An answer stood still for longer than allowed; the client sees its stream break off."""

    reason = "time_limit_stall"


class ShuttingDownError(WarmpathError):
    """The process is stopping and takes no new work."""

    status = 503
    reason = "shutting_down"
    kind = "service_unavailable"


class ConfigError(WarmpathError):
    """The configuration cannot be used; the text names the file, the place, what was found and the remedy."""

    reason = "config"


class TraceError(WarmpathError):
    """A trace or workload cannot be replayed; the text names the file, the line, what was found and the remedy."""

    reason = "trace"


class StoreError(WarmpathError):
    """The shared store could not answer: unreachable, too slow, or refusing the command."""

    reason = "store_unavailable"


class EngineError(WarmpathError):
    """An engine's own page could not be read: unreachable, too slow, or not what its kind serves.

    Attributes:
        fault: what is wrong with it, from the closed set `engines.adapter.Fault`.
    """

    reason = "engine_unreadable"

    def __init__(self, message: str, fault: str = "malformed") -> None:
        super().__init__(message)
        self.fault = fault


class StackError(WarmpathError):
    """A local stack could not be started or stopped; the text names the part and the remedy."""

    reason = "stack"


class WorkerError(WarmpathError):
    """Another process of the sidecar, a worker or the relay, did not answer in time."""

    reason = "worker_unreachable"


class RolloutError(WarmpathError):
    """A rollout cannot do what was asked of it now; the text says what may be done instead."""

    status = 409
    reason = "rollout"
    kind = "conflict_error"
