"""Case D1: statuses are not mixed up, whoever refuses: 429 for want of room, 503 for want of an endpoint, 404, 409.

The situations themselves are tested where they arise; here every refusal that a worker can decide on passes a real
Envoy, in both body modes, and reaches the client as OpenAI's clients read errors.
"""

import typing
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from extproc import errors
from extproc.config import BodyMode, Gateway
from tests.wire.gateway import Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Refusal(typing.NamedTuple):
    """What a client sees of an error."""

    error: errors.WarmpathError
    status: int
    reason: str
    type: str
    code: int | str


REFUSALS = [
    Refusal(errors.NoEndpointError("no engine"), 503, "no_endpoint", "service_unavailable", 503),
    Refusal(errors.ShuttingDownError("stopping"), 503, "shutting_down", "service_unavailable", 503),
    Refusal(errors.QueueTimeoutError("waited 30 s"), 503, "queue_timeout", "service_unavailable", 503),
    Refusal(errors.OverloadedError("no room", 5), 429, "overloaded", "rate_limit_error", 429),
    Refusal(
        errors.RateLimitedError("used up", {"retry-after": "7", "x-ratelimit-remaining-tokens": "0"}),
        429,
        "rate_limited",
        "rate_limit_error",
        "rate_limit_exceeded",
    ),
    Refusal(errors.DuplicateRequestError("runs"), 409, "duplicate_request", "conflict_error", "duplicate_request"),
    Refusal(errors.UnknownVersionError("no version"), 400, "unknown_version", "invalid_request_error", 400),
    Refusal(errors.UnknownModelError("no model"), 404, "unknown_model", "not_found_error", 404),
    Refusal(errors.BodyTooLargeError("too large"), 413, "body_too_large", "invalid_request_error", 413),
    Refusal(errors.UnfitRequestError("no salt"), 400, "engine_cannot", "invalid_request_error", 400),
    Refusal(errors.TimeLimitError("too long"), 504, "time_limit", "timeout_error", 504),
    Refusal(errors.HeadersLimitError("silent"), 504, "time_limit_headers", "timeout_error", 504),
    Refusal(errors.FirstTokenLimitError("late"), 504, "time_limit_first_token", "timeout_error", 504),
]
ELSEWHERE = {
    "BadQuestionError",  # the admin page's
    "ClientLeftError",  # nobody is there to read it
    "ConfigError",
    "EngineError",
    "ForbiddenError",  # the operator API's, as the five others below: tests/unit/admin
    "RelayError",  # the relay's own answers: tests/unit/top/test_relaying.py
    "RolloutError",
    "StackError",
    "StallLimitError",  # ends a stream that has begun
    "StoreError",
    "TokenUnusableError",
    "TraceError",
    "UnauthorizedError",  # Envoy's, asked by its filter: test_gateway_auth.py
    "UnknownCanaryError",
    "UnknownDecisionError",  # the admin page's
    "UnknownPathError",  # Envoy's: test_gateway_headers.py
    "UnknownRolloutError",
    "WorkerError",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "duplex"])
async def gateway(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """A gateway in each body mode."""
    mode: BodyMode = request.param
    async with running_gateway(Gateway(body_mode=mode)) as running:
        yield running


async def test_no_refusal_is_left_out() -> None:
    """Every error of the tree is in this file's table, or answers no request of a client that was decided on."""
    every = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.WarmpathError) and kind is not errors.WarmpathError
    }
    assert every == ELSEWHERE | {type(each.error).__name__ for each in REFUSALS}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: each.reason)
async def test_a_refusal_has_its_status_reason_and_shape(gateway: Running, refusal: Refusal) -> None:
    """Case D1: status, reason header, and JSON in OpenAI's shape; only 429 may say when to come again (D2)."""
    gateway.desk.outcome = refusal.error
    answer = await gateway.ask()
    assert (answer.status, answer.reason) == (refusal.status, refusal.reason)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "error": {"message": str(refusal.error), "type": refusal.type, "param": None, "code": refusal.code}
    }
    assert ("retry-after" in answer.headers) == (refusal.status == 429)
    assert (answer.headers.get("x-should-retry") == "false") == (refusal.status == 409)


async def test_a_refused_request_reaches_no_engine(gateway: Running) -> None:
    """The refusal is the answer: no engine has seen the request."""
    before = sum(len(engine.lengths) for engine in gateway.engines)
    gateway.desk.outcome = errors.OverloadedError("no room", 1)
    assert (await gateway.ask()).status == 429
    assert sum(len(engine.lengths) for engine in gateway.engines) == before
