"""Envoy's rate-limit service: what descriptors ask for, and what is answered."""

from collections.abc import Mapping, Sequence
from typing import Any

from envoy.service.ratelimit.v3 import rls_pb2 as pb

from extproc.envoy.rate_limit import Asked, Passed, RateLimits, asked_of
from extproc.errors import RateLimitedError


def request(*descriptors: Mapping[str, str], hits: int = 0, own: int | None = None) -> pb.RateLimitRequest:
    """A request with these descriptors; `own` is the number of each of them."""
    made = pb.RateLimitRequest(domain="any", hits_addend=hits)
    for entries in descriptors:
        descriptor = made.descriptors.add()
        for key, value in entries.items():
            descriptor.entries.add(key=key, value=value)
        if own is not None:
            descriptor.hits_addend.value = own
    return made


class Limiter:
    """Allows everything, or nothing, and keeps what was asked."""

    def __init__(self, error: RateLimitedError | None = None) -> None:
        self.error = error
        self.asked: list[Asked] = []

    async def ahead(self, asked: Sequence[Asked]) -> Passed:
        """See `rate_limit.Limiter`."""
        self.asked += asked
        if self.error:
            raise self.error
        return Passed({"x-ratelimit-remaining-requests": "4"}, {"quota_ahead": "what was taken"})


async def answer(limiter: Limiter, asked: pb.RateLimitRequest) -> Any:
    """The service's answer."""
    return pb.RateLimitResponse.FromString(await RateLimits(limiter)._check(asked, None))


def test_descriptors_say_whose_request_it_is() -> None:
    """Tenant and model; what else they say changes nothing, and a missing number is one request."""
    whole = request({"tenant": "acme", "path": "/v1/x", "method": "POST"}, {"model": "m"}, {"generic_key": "any"})
    assert asked_of(whole) == [Asked("acme", None, 1.0), Asked("", "m", 1.0), Asked("", None, 1.0)]


def test_numbers_of_requests_add_up_as_they_are_told() -> None:
    """That of the request counts for descriptors without their own, of which 0 only looks."""
    assert asked_of(request({"tenant": "a"}, hits=5)) == [Asked("a", None, 5.0)]
    assert asked_of(request({"tenant": "a"}, hits=5, own=2)) == [Asked("a", None, 2.0)]
    assert asked_of(request({"tenant": "a"}, own=0)) == [Asked("a", None, 0.0)]


async def test_reading_asks_for_nothing() -> None:
    """A method that only reads is allowed without a question."""
    limiter = Limiter()
    told = await answer(limiter, request({"tenant": "a", "method": "GET"}))
    assert (told.overall_code, len(told.statuses), limiter.asked) == (pb.RateLimitResponse.OK, 1, [])


async def test_an_allowed_request_is_told_what_is_left() -> None:
    """As response headers; there is a status for each descriptor. What was taken stays with the request."""
    told = await answer(Limiter(), request({"tenant": "a"}, {"model": "m"}))
    assert (told.overall_code, len(told.statuses)) == (pb.RateLimitResponse.OK, 2)
    assert {each.key: each.value for each in told.response_headers_to_add} == {"x-ratelimit-remaining-requests": "4"}
    assert dict(told.dynamic_metadata) == {"quota_ahead": "what was taken"}


async def test_a_refused_request_is_answered_as_a_decision_would() -> None:
    """Status, body, reason and headers are those of the error."""
    error = RateLimitedError("too much", {"retry-after": "7"})
    told = await answer(Limiter(error), request({"tenant": "a"}))
    assert told.overall_code == pb.RateLimitResponse.OVER_LIMIT
    assert told.raw_body == error.body()
    assert not told.HasField("dynamic_metadata")
    headers = {each.key: each.value for each in told.response_headers_to_add}
    assert headers == {"content-type": "application/json", "x-warmpath-reason": "rate_limited", "retry-after": "7"}
