"""What a real Envoy makes of limits of use: headers of answers, and a rate-limit service that is not there."""

import pytest

from extproc.config import Gateway, RateLimits
from extproc.config_quotas import RateLimit
from extproc.govern.quota_text import HEADER_KEYS
from tests.wire.gateway import CHAT, Answer, Running, running_gateway

RULES = [RateLimit(requests_per_minute=10)]


def told(answer: Answer) -> dict[str, str]:
    """What an answer says of limits."""
    return {name: answer.headers[name] for name in HEADER_KEYS.values() if name in answer.headers}


async def answered(running: Running, **metadata: str | float) -> dict[str, str]:
    """What the answer says whose decision has this metadata."""
    running.desk.metadata = metadata
    answer = await running.ask()
    assert answer.status == 200
    return told(answer)


async def test_answers_tell_what_the_decision_knows_and_nothing_else() -> None:
    """A key that the metadata lacks adds no header, not even an empty one, and leaves one that is there as it is."""
    async with running_gateway(rate_limits=RateLimits(rules=RULES)) as running:
        assert await answered(running) == {}
        assert await answered(running, ratelimit_remaining_tokens="0") == {"x-ratelimit-remaining-tokens": "0"}
        whole = {key: f"{place}m0s" for place, key in enumerate(HEADER_KEYS)}
        told_by_engine = await running.ask(path=f"{CHAT}?say=x-ratelimit-remaining-tokens:7")
        assert told(told_by_engine)["x-ratelimit-remaining-tokens"] == "0"
        running.desk.metadata = {}
        told_by_engine = await running.ask(path=f"{CHAT}?say=x-ratelimit-remaining-tokens:7")
        assert told(told_by_engine) == {"x-ratelimit-remaining-tokens": "7"}
        assert await answered(running, **whole) == {HEADER_KEYS[key]: value for key, value in whole.items()}


@pytest.mark.parametrize("fail_open", [True, False])
async def test_without_the_service_requests_go_on_or_are_refused_as_configured(fail_open: bool) -> None:
    """A sidecar that does not know the service is like none: the answer is ours, and says so."""
    limits = RateLimits(rules=RULES, before_body=True)
    async with running_gateway(Gateway(fail_open=fail_open), rate_limits=limits) as running:
        answer = await running.ask()
        if fail_open:
            assert (answer.status, len(running.desk.calls)) == (200, 1)
        else:
            assert answer.is_refusal(503, "sidecar_unavailable")
            assert running.desk.calls == []
