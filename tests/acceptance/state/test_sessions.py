"""A session stays where it is, whichever replica handles its next turn and whoever joins the pool."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import MODEL, POOL, Engine, simulated
from tests.acceptance.routing.asking import Decided, decide_chat
from tests.acceptance.state.replicas import Plan, Site, site
from tests.unit.envoy.gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

HASHED = "hashed"
ENGINES = 8
SESSIONS = 240
HASHES = 3000
"""Sessions placed by hash: so many that chance alone seldom takes their share over the limit."""
AT_ONCE = 16


class Pair(msgspec.Struct, frozen=True):
    """Two replicas, asked directly; an engine more than the eight that serve both pools."""

    here: Site
    first: Gateway
    second: Gateway
    engines: list[Engine]

    @contextlib.asynccontextmanager
    async def one_more(self) -> AsyncIterator[str]:
        """Both pools have one more engine for a while; yields its address."""
        await self.here.use(dict.fromkeys((POOL, HASHED), self.engines))
        try:
            yield self.engines[-1].address
        finally:
            await self.here.use(dict.fromkeys((POOL, HASHED), self.engines[:-1]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(journal: Journal, folder: Path) -> AsyncIterator[Pair]:
    """Two replicas of one worker each."""
    async with contextlib.AsyncExitStack() as cleanup:
        arguments = ("--adapter", HASHED)
        engines = await cleanup.enter_async_context(simulated(journal, each=ENGINES + 1, arguments=arguments))
        pools = dict.fromkeys((POOL, HASHED), engines[:-1])
        sections = {
            "redis": {"timeout_ms": 2000},  # pins are what is tested, not a store that looks slow on a busy machine
            "pools": {HASHED: {"policy": "session_hash"}},
            "routing": {"ramp_s": 0.0},  # who joins gets its share at once
        }
        here = await cleanup.enter_async_context(site(journal, folder, pools, Plan(sections=sections)))
        first, second = [await cleanup.enter_async_context(one.as_gateway()) for one in here.replicas]
        yield Pair(here, first, second, engines)


async def everyone(worker: Gateway, prefix: str, count: int, model: str = MODEL) -> list[Decided]:
    """What a worker decides for one more turn of each session."""
    permits = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Decided:
        async with permits:
            return await decide_chat(worker, f"{prefix} {number}, " * 20, session=f"{prefix}-{number}", model=model)

    return list(await asyncio.gather(*(one(number) for number in range(count))))


def moved(before: list[Decided], after: list[Decided]) -> list[Decided]:
    """Decisions that went elsewhere than before."""
    return [now for then, now in zip(before, after, strict=True) if now.endpoint != then.endpoint]


async def test_the_next_turn_at_another_replica_goes_to_the_same_endpoint(pair: Pair) -> None:
    """A session that one replica pinned is pinned for the other, and back again; sessions spread over the pool."""
    before = await everyone(pair.first, "hops", SESSIONS)
    after = await everyone(pair.second, "hops", SESSIONS)
    again = await everyone(pair.first, "hops", SESSIONS)
    assert not any(one.pinned for one in before)
    assert all(one.pinned for one in [*after, *again])
    assert moved(before, after) == moved(before, again) == []
    assert len({one.endpoint for one in before}) == ENGINES


async def test_two_replicas_that_pin_one_session_at_once_agree(pair: Pair) -> None:
    """Its first turn comes to both in the same moment: one decides, the other follows, and so does whoever comes later.

    Their prompts differ, so that each would have chosen by itself.
    """
    elsewhere = Counter[bool]()
    for number in range(SESSIONS // 4):
        session = f"both-{number}"
        one, other = await asyncio.gather(
            decide_chat(pair.first, f"this way {number}, " * 20, session),
            decide_chat(pair.second, f"that way {number}, " * 20, session),
        )
        assert one.endpoint == other.endpoint
        assert sorted((one.pinned, other.pinned)) == [False, True]
        third = await decide_chat(pair.second, f"later {number}, " * 20, session)
        assert (third.endpoint, third.pinned) == (one.endpoint, True)
        alone = await decide_chat(pair.first, f"that way {number}, " * 20)
        elsewhere[alone.endpoint != one.endpoint] += 1
    assert elsewhere[True], "both would have chosen alike without a session"


async def test_no_pinned_session_moves_when_an_endpoint_joins(pair: Pair) -> None:
    """An endpoint joins eight, and leaves again: every session stays where it was, at either replica."""
    before = await everyone(pair.first, "stays", SESSIONS)
    async with pair.one_more() as extra:
        after = await everyone(pair.second, "stays", SESSIONS)
        fresh = await everyone(pair.second, "fresh", SESSIONS)
    again = await everyone(pair.first, "stays", SESSIONS)
    assert moved(before, after) == moved(before, again) == []
    assert any(one.endpoint == extra for one in fresh), "nothing new went to the endpoint that joined"


async def test_hashed_sessions_move_no_more_than_they_must(pair: Pair) -> None:
    """Sessions placed by hash, without a pin: a ninth of them, and 2 %, may move, all to the endpoint that joined.

    Each is asked for at one replica before, and at the other after that: both place it alike.
    """

    async def ask(first: Gateway, second: Gateway) -> list[Decided]:
        halves = await asyncio.gather(
            everyone(first, "even", HASHES // 2, HASHED), everyone(second, "odd", HASHES // 2, HASHED)
        )
        return [one for half in halves for one in half]

    before = await ask(pair.first, pair.second)
    async with pair.one_more() as extra:
        after = await ask(pair.second, pair.first)
    changed = moved(before, after)
    assert 0 < len(changed) <= HASHES * (1 / (ENGINES + 1) + 0.02)
    assert {one.endpoint for one in changed} == {extra}
    assert not any(one.pinned for one in [*before, *after])
