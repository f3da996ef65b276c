"""Case D1 on a whole stack: each situation has a status and a reason of its own, and none is taken for another."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Answer, chat_body
from tests.acceptance.state.replicas import Plan, Site, site
from tests.bad_engine import BadEngine, Behave

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_BODY = 100_000
SECTIONS: Mapping[str, Any] = {
    "models": {
        "gone": {"pool": "gone", "served_as": "sim"},
        "once": {"pool": POOL, "served_as": "sim"},
        "hasty": {"pool": POOL, "served_as": "sim"},
    },
    "gateway": {"max_body_bytes": MAX_BODY, "message_timeout_ms": 20_000},
    "redis": {"timeout_ms": 500},
    "rate_limits": {"rules": [{"model": "once", "requests_per_minute": 1}]},
    "timeouts": {"rules": [{"model": "hasty", "request_s": 1.0}]},
}


class Place(msgspec.Struct, frozen=True):
    """What runs."""

    here: Site
    other: BadEngine

    async def ask(self, model: str, headers: Mapping[str, str] | None = None, prompt: str = "How are you?") -> Answer:
        """One question, not streamed."""
        body = chat_body(prompt, model=model, max_tokens=4)
        return await self.here.front.ask(body, headers or {})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(journal: Journal, folder: Path) -> AsyncIterator[Place]:
    """One engine of the pool that most models have, and one of another pool."""
    async with contextlib.AsyncExitStack() as cleanup:
        one, other = [await cleanup.enter_async_context(BadEngine()) for _ in range(2)]
        plan = Plan(replicas=1, workers=2, envoys=[()], sections=SECTIONS)
        pools = {POOL: [one], "gone": [other]}
        yield Place(await cleanup.enter_async_context(site(journal, folder, pools, plan)), other)


def check(answer: Answer, status: int, reason: str, kind: str) -> None:
    """A refusal of ours: status, reason, and an error in OpenAI's shape."""
    assert (answer.status, answer.headers.get("x-warmpath-reason")) == (status, reason), answer.body
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == kind


async def test_each_situation_has_its_own_status_and_reason(place: Place) -> None:
    """Case D1: no endpoint 503, a limit of use 429, an unknown model 404, too large 413, too long 504."""
    assert (await place.ask("sim")).status == 200
    assert (await place.ask("gone")).status == 200
    async with place.other.stopped():
        check(await place.ask("gone"), 503, "no_endpoint", "service_unavailable")
    check(await place.ask("nobody's"), 404, "unknown_model", "not_found_error")
    check(await place.ask("sim", prompt="x" * 2 * MAX_BODY), 413, "body_too_large", "invalid_request_error")
    check(await place.ask("hasty", Behave(silent=True).header()), 504, "time_limit", "timeout_error")
    assert (await place.ask("once")).status == 200
    limited = await place.ask("once")
    check(limited, 429, "rate_limited", "rate_limit_error")
    assert int(limited.headers["retry-after"]) >= 1


async def test_a_key_that_is_in_use_is_409(place: Place) -> None:
    """Case D1: the first request still runs; SDKs are told not to try again."""
    headers = {"idempotency-key": "k", "content-type": "application/json", **Behave(stall_after=1).header()}
    body = chat_body("Tell me all.", stream=True, max_tokens=8)
    async with place.here.http.post(f"{place.here.front.url}{CHAT}", data=body, headers=headers) as first:
        await first.content.readany()
        answer = await place.ask("sim", {"idempotency-key": "k"})
        check(answer, 409, "duplicate_request", "conflict_error")
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_what_an_engine_answers_keeps_its_status_and_has_no_reason_of_ours(place: Place, status: int) -> None:
    """Case D1: an engine's own refusal is told from ours by the header that it lacks."""
    answer = await place.ask("sim", Behave(status=status).header())
    assert (answer.status, answer.headers.get("x-warmpath-reason")) == (status, None)
    assert answer.json["error"]["code"] == status
