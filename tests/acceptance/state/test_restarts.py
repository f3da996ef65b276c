"""Replicas stop, die and start behind two gateways: one that goes on without any, and one that refuses to."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from extproc import inner
from extproc._pb.warmpath.v1 import health_pb2
from extproc.choose.explain import Explanation
from extproc.config import WORKERS_CLUSTER
from extproc.envoy.health import READINESS
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Answer, Engine, chat_body, simulated
from tests.acceptance.routing.asking import decide, decide_chat
from tests.acceptance.state.front import Front
from tests.acceptance.state.replicas import Plan, Replica, Site, site
from tests.acceptance.state.size import LONG
from tests.acceptance.state.traffic import Traffic
from tests.ports import free_port
from tests.unit.envoy.gateway import connected
from tests.waiting import PATIENCE_S, until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATE = 200.0 if LONG else 120.0
ROUNDS = 5 if LONG else 1
STREAMS, FEW = 20, 10
TOKENS = 100
SESSIONS = 100
PROMPTS = 30
"""Of some 4,200 tokens: two topics fill two thirds of the four caches, so that neither takes the other's place."""


class Street(msgspec.Struct, frozen=True):
    """Two replicas, four engines, and two Envoys.

    Attributes:
        here: the site.
        engines: the engines.
        goes_on: goes on without a sidecar.
        refuses: refuses requests that no sidecar decided.
    """

    here: Site
    engines: list[Engine]

    @property
    def goes_on(self) -> Front:
        """The Envoy that sends requests on when no sidecar answers."""
        return self.here.fronts[0]

    @property
    def refuses(self) -> Front:
        """The Envoy that refuses them then."""
        return self.here.fronts[1]

    async def decided(self) -> float:
        """Decisions of all replicas since they started."""
        return await self.here.metric("warmpath_decisions_total")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def street(journal: Journal, folder: Path) -> AsyncIterator[Street]:
    """The site. Waiting for a sidecar that is gone, the second Envoy would outlast any client."""
    closed = [
        f"gateway.listen=127.0.0.1:{free_port()}",
        f"gateway.admin=127.0.0.1:{free_port()}",
        "gateway.fail_open=false",
        "gateway.message_timeout_ms=60000",
    ]
    async with contextlib.AsyncExitStack() as cleanup:
        engines = await cleanup.enter_async_context(simulated(journal, each=3))
        alone = await cleanup.enter_async_context(simulated(journal))
        plan = Plan(envoys=[(), closed], sections={"redis": {"timeout_ms": 2000, "lease_ms": 3000}})
        here = await cleanup.enter_async_context(site(journal, folder, {POOL: [*engines, *alone]}, plan))
        yield Street(here, [*engines, *alone])


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def whole(street: Street) -> AsyncIterator[None]:
    """Every test leaves all replicas at work, whether it failed or not."""
    yield
    workers = [at for replica in street.here.replicas for at in replica.worker_addresses()]
    for replica in street.here.replicas:
        if not await replica.takes_requests():
            await replica.stop()
            await replica.start()
    for front in street.here.fronts:
        await front.knows(workers, [])


async def readiness(replica: Replica, stack: contextlib.AsyncExitStack) -> Any:
    """A watch on the readiness of a replica's worker that has begun."""
    channel = await stack.enter_async_context(connected(replica.worker_addresses()[0]))
    watch = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )(health_pb2.HealthCheckRequest(service=READINESS))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    return watch


def complete(answer: Answer) -> bool:
    """Whether a stream came to its end with all its tokens."""
    events = answer.body.split(b"\n\n")
    return answer.status == 200 and events[-2] == b"data: [DONE]" and len(events) >= TOKENS


async def test_a_replica_that_is_told_to_stop_ends_its_streams_and_takes_no_more(street: Street) -> None:
    """SIGTERM with twenty streams: not ready at once, every stream ends whole, and so does what comes in that moment.

    Once the gateway has noticed, the other replica alone decides.
    """
    stopping = street.here.replicas[0]
    async with contextlib.AsyncExitStack() as cleanup:
        for engine in street.engines:
            await cleanup.enter_async_context(engine.frozen("engine"))
        watch = await readiness(stopping, cleanup)
        streams = await opened(street)
        assert 0 < await stopping.metric("warmpath_in_flight", pool=POOL) < STREAMS, "one replica decided alone"
        stopping.child.send(signal.SIGTERM)
        said = await asyncio.wait_for(watch.read(), PATIENCE_S)
        assert said.status == health_pb2.HealthCheckResponse.NOT_SERVING
        streams += await opened(street)

        async def left_alone() -> bool:
            if await street.refuses.healthy(WORKERS_CLUSTER) & set(stopping.worker_addresses()):
                return False
            before = await stopping.metric("warmpath_decisions_total", pool=POOL)
            # The engines stand still, but their servers answer at once what they do not know.
            short = [await street.refuses.ask(b"{}", path="/nothing/here") for _ in range(FEW)]
            assert {one.status for one in short} == {404}
            return await stopping.metric("warmpath_decisions_total", pool=POOL) == before

        await until_async(left_alone)
        assert stopping.child.running
    for answer in await asyncio.gather(*streams):
        assert complete(answer)
    assert await stopping.child.wait() == 0
    await street.here.books.holds(0)


async def opened(street: Street, number: int = STREAMS) -> list[asyncio.Task[Answer]]:
    """So many more streams behind the gateway that refuses what nobody decided; none of them was refused."""
    told = chat_body("a long story", stream=True, max_tokens=TOKENS, ignore_eos=True)
    wanted = await street.here.books.in_flight() + number
    streams = [asyncio.create_task(street.refuses.ask(told)) for _ in range(number)]

    async def open_or_ended() -> bool:
        return any(one.done() for one in streams) or await street.here.books.in_flight() == wanted

    await until_async(open_or_ended)
    assert not [one.result().status for one in streams if one.done()]
    return streams


def prompts(topic: str) -> list[bytes]:
    """Bodies whose prompts share nothing with each other."""
    return [chat_body(f"{topic}, {number}: the same again, " * 600) for number in range(PROMPTS)]


async def decided(replica: Replica, topic: str) -> list[str]:
    """Where a replica sends these prompts."""
    async with replica.as_gateway() as worker:
        return [(await decide(worker, body)).endpoint for body in prompts(topic)]


async def knows(replica: Replica, topic: str, at: Sequence[str]) -> bool:
    """Whether a replica expects nearly all of each prompt in the cache where it was sent. Asking changes nothing."""
    async with inner.channel(replica.worker_addresses()[0]) as channel:
        for body, endpoint in zip(prompts(topic), at, strict=True):
            told = await inner.explain(channel, inner.Question(CHAT, {}, body))
            explained = msgspec.json.decode(told.body, type=Explanation)
            [held] = [each.matched_tokens for each in explained.candidates if each.endpoint == endpoint]
            if held < 0.9 * explained.prompt_tokens:
                return False
    return True


async def shared(street: Street, topic: str) -> list[str]:
    """Where the second replica sends prompts; returns once the first one knows of it too."""
    first, second = street.here.replicas
    at = await decided(second, topic)
    await until_async(partial(knows, first, topic, at))
    return at


async def ready(replica: Replica) -> None:
    """Wait until the replica's worker says that it takes requests, and return in that moment."""
    async with connected(replica.worker_addresses()[0]) as channel:
        await until_async(partial(inner.is_ready, channel))


async def caught_up(street: Street) -> bool:
    """Whether the worker that started last had caught up with the others when it was ready, as it says itself."""
    await until(lambda: street.here.heard("worker is ready", "worker-0") > 0)
    lines = [json.loads(line) for line in street.here.journal.containing("worker is ready")]
    return bool(max(lines, key=lambda line: str(line["time"]))["caught_up"])


async def test_a_replica_is_ready_once_it_knows_what_the_others_know(street: Street) -> None:
    """A worker that has just said that it takes requests expects every prompt in the cache that holds it."""
    fresh = street.here.replicas[0]
    at = await shared(street, "known")
    assert await fresh.stop() == 0
    await fresh.start()
    await ready(fresh)
    assert await knows(fresh, "known", at)
    assert await caught_up(street)
    await street.here.well()


async def test_a_replica_that_starts_without_the_store_serves_and_learns_later(street: Street) -> None:
    """The store is silent: a worker that starts is ready all the same; when it speaks, the worker catches up."""
    fresh = street.here.replicas[0]
    at = await shared(street, "missed")
    assert await fresh.stop() == 0
    street.here.store.freeze()
    try:
        await fresh.start()
        await ready(fresh)
        assert len(await decided(fresh, "meanwhile")) == PROMPTS
        assert not await caught_up(street)
    finally:
        street.here.store.thaw()
    await until_async(partial(knows, fresh, "missed", at))
    await street.here.well()


@pytest.mark.parametrize("front", [0, 1], ids=["goes on without", "refuses without"])
async def test_a_rolling_restart_fails_no_request(street: Street, front: int) -> None:
    """One replica after the other stops and starts under load: no error, no session moves, nothing stays charged."""
    first, second = street.here.replicas
    async with first.as_gateway() as worker:
        before = [await decide_chat(worker, f"session {number}", f"kept-{number}") for number in range(SESSIONS)]
    async with Traffic([street.here.fronts[front]], RATE) as traffic:
        for _ in range(ROUNDS):
            for replica in street.here.replicas:
                await traffic.answered(50)
                assert await replica.stop() == 0
                await traffic.answered(50)
                await replica.start()
                await street.here.well()
        await traffic.answered(50)
    await street.here.books.holds(0)
    for replica in (first, second):
        async with replica.as_gateway() as worker:
            after = [await decide_chat(worker, f"session {number}", f"kept-{number}") for number in range(SESSIONS)]
        assert all(one.pinned for one in after)
        assert [one.endpoint for one in after] == [one.endpoint for one in before]


async def test_without_any_replica_each_gateway_does_as_it_was_told(street: Street) -> None:
    """All replicas killed: one Envoy sends requests to engines that are healthy, the other refuses them at once.

    When replicas are back, both have their requests decided again.
    """
    for replica in street.here.replicas:
        await replica.kill()
    answers = [await street.goes_on.chat(f"go on {number}", f"s{number}") for number in range(40)]
    assert {one.status for one in answers} == {200}
    lost = street.engines[-1]
    lost.process.send(signal.SIGKILL)
    await lost.process.wait()
    answers = [await street.goes_on.chat(f"go on {number}", f"s{number}") for number in range(40)]
    assert {one.status for one in answers} == {200}
    assert len([one for one in street.engines[:-1] if await one.prompt_tokens() > 0]) == len(street.engines) - 1
    for number in range(10):
        refused = await street.refuses.chat(f"refuse {number}")
        assert refused.status in {500, 503}
        assert refused.json["error"]["message"]
    for replica in street.here.replicas:
        await replica.start()
    for front in street.here.fronts:
        await until_async(partial(_all_back, street, front))
    before = await street.decided()
    for front in street.here.fronts:
        assert {(await front.chat(f"back {number}")).status for number in range(20)} == {200}
    assert await street.decided() == before + 40
    await street.here.books.holds(0)


async def _all_back(street: Street, front: Front) -> bool:
    return len(await front.healthy(WORKERS_CLUSTER)) == len(street.here.replicas)
