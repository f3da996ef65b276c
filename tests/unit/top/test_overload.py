"""Overload at one worker: who passes, waits, goes elsewhere or is refused. Real store, router and queue."""

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from extproc import config_overload, waiting_line
from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import SystemClock
from extproc.config import Config
from extproc.deciding import Outcome
from extproc.envoy.contract import FALLBACK, QUEUED, Call, Decision
from extproc.errors import ClientLeftError, OverloadedError, QueueTimeoutError, ShuttingDownError, StoreError
from extproc.overload import Overload
from extproc.router import Router, Surroundings
from extproc.state.feed import Answered, Delta
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.values import Load, Reservation, Reserve
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.overload_metrics import OverloadMetrics
from tests.waiting import until

LIMIT = 6
"""What both engines may have: batches of two each, and one that waits at each."""


class Unheard:
    """Hears what a router tells, and keeps nothing."""

    def publish(self, pool: str, delta: Delta) -> None:
        """See `router.Publisher`."""

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""


class Looks(MemoryStore):
    """Counts looks at its ledger; can be unable to answer them, slow to charge, and slow to note an empty queue."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.looks = 0
        self.gone = False
        self.slow_s = 0.0
        self.waits_noted = False
        self.emptied = asyncio.Event()
        self.emptied.set()

    async def put_states(self, pool: str, states: Mapping[str, bytes]) -> None:
        """See `Store.put_states`."""
        self.waits_noted = any(msgspec.msgpack.decode(note)[1] for note in states.values())
        if not self.waits_noted:
            await self.emptied.wait()
        await super().put_states(pool, states)

    async def reserve(self, ask: Reserve) -> Reservation:
        """See `Store.reserve`."""
        await asyncio.sleep(self.slow_s)
        return await super().reserve(ask)

    async def loads(self, pool: str) -> Mapping[str, Load]:
        """See `Store.loads`."""
        self.looks += 1
        if self.gone:
            raise StoreError("gone")
        return await super().loads(pool)


class Client:
    """One that waits, and may leave."""

    def __init__(self) -> None:
        self.held: list[float] = []
        self.leave: Callable[[], None] = lambda: None

    async def hold(self, longest_s: float) -> None:
        """See `contract.Line`."""
        self.held.append(longest_s)

    def when_left(self, tell: Callable[[], None]) -> None:
        """See `contract.Line`."""
        self.leave = tell


def fleet(running: int = 2, waiting: int = 1, small: int = 1) -> Fleet:
    """Two engines that run and have waiting so many requests; and so many engines of a smaller model."""
    main = tuple(Endpoint(n, f"10.0.0.{n}:80", 1e9, running=running, waiting=waiting) for n in "12")
    others = tuple(Endpoint(f"s{n}", f"10.0.1.{n}:80", 1e9) for n in range(small))
    pools = {"main": Pool("main", "least_tokens", main), "small": Pool("small", "least_tokens", others)}
    return Fleet(pools, {"m": "main", "s": "small"}, "main")


class Worker:
    """One worker; its ledger may be shared with others."""

    def __init__(self, store: MemoryStore | None = None, replica: str = "r1", **overload: Any) -> None:
        section = {"saturation": {"waiting": 1}, **overload}
        plain = {
            "models": {"m": {"pool": "main"}, "s": {"pool": "small"}},
            "pools": {"main": {"endpoints": ["x:1"]}, "small": {"endpoints": ["y:1"], "overload": {"action": "pass"}}},
            "overload": section,
            "routing": {"policy": "least_tokens"},
            "telemetry": {"scrape_ms": 50},
        }
        numbers = itertools.count()
        known = {name: PoolKnowledge(Priors()) for name in ("main", "small")}
        self.store = store or Looks()
        self.around = Surroundings(
            msgspec.convert(plain, Config), fleet(), known, self.store, replica, lambda: f"{replica}-{next(numbers)}"
        )
        self.metrics = Metrics()
        self.around.gate = self.gate = Overload(self.around, OverloadMetrics(self.metrics.families), SystemClock())
        self.router = Router(self.around, Unheard(), Unheard(), SystemClock())
        self.served: list[Decision] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Worker"]:
        """Keep the pools in view; from the first look on, what the engines showed is known."""
        task = asyncio.create_task(self.gate.run())
        try:
            full = self.gate.lines["main"].full
            await until(lambda: full.room.near or not self.around.fleet.pools["main"].endpoints[0].waiting)
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.gate.close_after(0.0)

    async def ask(self, tenant: str = "", client: Client | None = None, **fields: Any) -> Decision:
        """Decide on one request."""
        headers = {"x-warmpath-tenant": tenant, **fields.pop("headers", {})}
        body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8, **fields}
        decision = await self.router.decide(
            Call("POST", "/v1/chat/completions", headers, json.dumps(body).encode(), line=client)
        )
        self.served.append(decision)
        return decision

    async def fill(self) -> list[Decision]:
        """All that the engines may have."""
        return [await self.ask() for _ in range(LIMIT)]

    def waits(self, *tenants: str, **fields: Any) -> list["asyncio.Task[Decision]"]:
        """Requests that are made now and may have to wait."""
        return [asyncio.create_task(self.ask(tenant, **fields)) for tenant in tenants or ("",)]

    def waiting(self) -> int:
        """How many wait."""
        return len(self.gate.lines["main"])

    def counted(self, line: str) -> bool:
        """Whether the metrics page has this line."""
        return line in self.metrics.page().decode().splitlines()


async def in_flight(store: MemoryStore) -> int:
    """Sequences that the ledger has."""
    return sum(load.running for load in (await MemoryStore.loads(store, "main")).values())


async def test_a_pool_that_passes_is_never_looked_at() -> None:
    """The default costs nothing: however full the engines are, nobody looks at the ledger."""
    async with contextlib.AsyncExitStack() as cleanup:
        worker = Worker()
        task = asyncio.create_task(worker.gate.run())
        cleanup.callback(task.cancel)
        for _ in range(3 * LIMIT):
            await worker.ask()
        await asyncio.sleep(0.2)
        assert isinstance(worker.store, Looks)
        assert worker.store.looks == 0


async def test_calm_requests_pass_without_a_look_at_the_store() -> None:
    """Engines without a queue: any number goes to them, and only the watch reads the ledger."""
    worker = Worker(action="queue")
    worker.around.fleet = fleet(running=50, waiting=0)
    await asyncio.gather(*worker.waits(*[""] * 100))
    assert isinstance(worker.store, Looks)
    assert worker.store.looks == 0


async def test_reject_refuses_once_every_endpoint_is_saturated_and_not_before() -> None:
    """The seventh of six; with one that ended there is room for one (D12)."""
    async with Worker(action="reject").running() as worker:
        first, *_ = await worker.fill()
        with pytest.raises(OverloadedError) as refused:
            await worker.ask()
        assert 1 <= refused.value.retry_after_s <= 30
        await worker.router.settle(first)
        await worker.ask()
        with pytest.raises(OverloadedError):
            await worker.ask()
        assert worker.counted('warmpath_overload_shed_total{action="rejected",pool="main"} 2.0')


async def test_requests_on_their_way_to_the_ledger_count() -> None:
    """Many come at once, and each is charged a moment later: no more get through than there is room for."""
    async with Worker(action="reject").running() as worker:
        assert isinstance(worker.store, Looks)
        worker.store.slow_s = 0.05
        answers = await asyncio.gather(*worker.waits(*[""] * 20), return_exceptions=True)
        assert Counter(type(each).__name__ for each in answers) == {"Decision": LIMIT, "OverloadedError": 14}


async def test_the_end_of_a_request_lets_the_next_one_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the next tick."""
    monkeypatch.setattr(waiting_line, "_TICK_S", 600.0)
    async with Worker(action="queue").running() as worker:
        first, *_ = await worker.fill()
        (waiting,) = worker.waits()
        await until(lambda: worker.waiting() == 1)
        await asyncio.sleep(0.1)
        await worker.router.settle(first)
        await waiting


async def test_a_refusal_says_when_what_waits_is_gone() -> None:
    """Two wait at the engines; two ended in the last eight and a half seconds: they take nine (D2)."""
    async with Worker(action="reject").running() as worker:
        drain = worker.gate.lines["main"].drain
        for at in range(2):
            drain.note(SystemClock().monotonic() - 8.5 + at)
        await worker.fill()
        with pytest.raises(OverloadedError) as refused:
            await worker.ask()
        assert refused.value.retry_after_s == 9


async def test_idle_time_of_the_pool_is_no_part_of_its_drain_rate() -> None:
    """Looks tell when no replica has a request there; this worker's own next one ends that at once."""
    worker, elsewhere = Worker(action="reject"), Worker(action="reject", replica="r2")
    worker.around.fleet = fleet(running=0, waiting=0)
    drain = worker.gate.lines["main"].drain
    async with worker.running():
        await until(lambda: drain.idle)
        decision = await worker.ask()
        assert not drain.idle
        await worker.router.settle(decision)
        await until(lambda: drain.idle)
        elsewhere.around.store = worker.store
        theirs = await elsewhere.ask()
        await until(lambda: not drain.idle)
        await elsewhere.router.settle(theirs)
        await until(lambda: drain.idle)


async def test_without_the_ledger_nobody_is_refused() -> None:
    """The store is gone: engines have queues of their own."""
    async with Worker(action="reject").running() as worker:
        await worker.fill()
        assert isinstance(worker.store, Looks)
        worker.store.gone = True
        for _ in range(5):
            await worker.ask()


async def test_pages_that_are_not_read_refuse_nobody() -> None:
    """Engines whose pages are old show neither batch nor queue: nothing is saturated (B5)."""
    worker = Worker(action="reject")
    worker.around.fleet = fleet(running=0, waiting=0)
    async with worker.running():
        for _ in range(3 * LIMIT):
            await worker.ask()


async def test_fallback_sends_the_rest_to_the_other_model() -> None:
    """Its body names that model, and the decision says so; the pool's own requests are as they were."""
    async with Worker(action="fallback", fallback="s").running() as worker:
        own = await worker.fill()
        other = await worker.ask()
        assert {each.pool for each in own} == {"main"}
        assert all(FALLBACK not in each.metadata and each.body is None for each in own)
        assert (other.pool, other.metadata[FALLBACK]) == ("small", "s")
        assert other.body is not None
        assert json.loads(other.body)["model"] == "s"
        assert json.loads(other.body)["max_tokens"] == 8


async def test_a_fallback_that_cannot_serve_is_no_fallback() -> None:
    """The saturated model is what was asked for: 429, not 503."""
    worker = Worker(action="fallback", fallback="s")
    worker.around.fleet = fleet(small=0)
    async with worker.running():
        await worker.fill()
        with pytest.raises(OverloadedError):
            await worker.ask()


async def test_a_request_waits_until_one_ends() -> None:
    """Then it goes on, and its decision says for how long it waited."""
    async with Worker(action="queue").running() as worker:
        first, *_ = await worker.fill()
        (waiting,) = worker.waits()
        await until(lambda: worker.waiting() == 1)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await worker.router.settle(first)
        decision = await waiting
        assert float(decision.metadata[QUEUED]) >= 100.0
        assert await in_flight(worker.store) == LIMIT


async def test_one_that_comes_while_the_queue_is_told_to_be_empty_has_its_turn() -> None:
    """The store takes a while to note that nobody waits any more: who begins to wait meanwhile is not forgotten."""
    async with Worker(action="queue").running() as worker:
        store = worker.store
        assert isinstance(store, Looks)
        first, second, *_ = await worker.fill()
        (waiting,) = worker.waits()
        await until(lambda: worker.waiting() == 1 and store.waits_noted)
        store.emptied.clear()
        await worker.router.settle(first)
        await waiting
        (late,) = worker.waits()
        await until(lambda: worker.waiting() == 1)
        store.emptied.set()
        await worker.router.settle(second)
        await until(late.done)
        await late


async def test_only_who_waits_long_asks_the_gateway_for_patience() -> None:
    """Once, for as long as it may wait and the answer after that."""
    async with Worker(action="queue", queue={"max_wait_s": 20}).running() as worker:
        calm, client = Client(), Client()
        await worker.ask(client=calm)
        for _ in range(LIMIT - 1):
            await worker.ask()
        (waiting,) = worker.waits(client=client)
        await until(lambda: client.held != [])
        await worker.router.settle(worker.served[0])
        await waiting
        assert (calm.held, client.held) == ([], [21.0])


async def test_a_leaver_is_removed_at_once() -> None:
    """Nobody is charged for it, and the next one has its turn."""
    async with Worker(action="queue").running() as worker:
        first, *_ = await worker.fill()
        client = Client()
        (gone,) = worker.waits(client=client)
        await until(lambda: worker.waiting() == 1)
        (stays,) = worker.waits()
        await until(lambda: worker.waiting() == 2)
        client.leave()
        assert worker.waiting() == 1
        with pytest.raises(ClientLeftError):
            await gone
        await worker.router.settle(first)
        await stays
        assert await in_flight(worker.store) == LIMIT


async def test_a_wait_is_bounded() -> None:
    """Past the longest wait 503, which says nothing of when to come again."""
    async with Worker(action="queue", queue={"max_wait_s": 0.2}).running() as worker:
        await worker.fill()
        with pytest.raises(QueueTimeoutError) as refused:
            await worker.ask()
        assert (refused.value.status, refused.value.reason) == (503, "queue_timeout")
        assert worker.waiting() == 0


async def test_a_full_queue_refuses() -> None:
    """429 for the one that found no place."""
    async with Worker(action="queue", queue={"max_requests": 3}).running() as worker:
        await worker.fill()
        waiting = worker.waits("", "", "")
        await until(lambda: worker.waiting() == 3)
        with pytest.raises(OverloadedError):
            await worker.ask()
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert worker.waiting() == 0


async def test_a_worker_that_stops_refuses_its_queue() -> None:
    """503 for those who wait, and for who comes to wait; who need not wait still passes."""
    async with Worker(action="queue").running() as worker:
        first, *_ = await worker.fill()
        (waiting,) = worker.waits()
        await until(lambda: worker.waiting() == 1)
        await worker.gate.close_after(0.0)
        with pytest.raises(ShuttingDownError):
            await waiting
        with pytest.raises(ShuttingDownError):
            await worker.ask()
        await worker.router.settle(first)


async def order_of(worker: Worker, *requests: Mapping[str, Any]) -> Sequence[int]:
    """In which order these are let through, one after the other, after all wait."""
    decisions = await worker.fill()
    order: list[int] = []

    async def ask(at: int, fields: Mapping[str, Any]) -> None:
        decisions.append(await worker.ask(**fields))
        order.append(at)

    tasks = []
    for at, fields in enumerate(requests):
        tasks.append(asyncio.create_task(ask(at, fields)))
        await until(lambda at=at: worker.waiting() == at + 1)  # type: ignore[misc]
    for done in range(len(requests)):
        await worker.router.settle(decisions[done])
        await until(lambda done=done: len(order) > done)  # type: ignore[misc]
    await asyncio.gather(*tasks)
    return order


async def test_clients_have_no_say_in_their_priority() -> None:
    """Neither by the header nor by the body, unless the operator lets them."""
    requests: list[dict[str, Any]] = [{}, {"priority": -5}, {"headers": {"x-warmpath-priority": "-5"}}]
    async with Worker(action="queue").running() as worker:
        assert await order_of(worker, *requests) == [0, 1, 2]
    async with Worker(action="queue", client_priority=True, queue={"low_share": 0}).running() as worker:
        assert await order_of(worker, {"priority": 3}, *requests) == [2, 3, 1, 0]


async def test_tenants_have_classes() -> None:
    """As configured, by the tenant that authentication set."""
    tenants = {"batch": {"priority": 10}, "chat": {"priority": -1}}
    async with Worker(action="queue", tenants=tenants, queue={"low_share": 0}).running() as worker:
        order = await order_of(worker, {"tenant": "batch"}, {"tenant": "other"}, {"tenant": "chat"})
        assert order == [2, 1, 0]


async def test_a_tenant_with_few_requests_is_not_behind_one_with_many() -> None:
    """A has forty waiting, then B comes with two: equal requests, so B's are among the next few."""
    tenants = {name: {"weight": 1.0} for name in "ab"}
    async with Worker(action="queue", tenants=tenants).running() as worker:
        requests = [{"tenant": "a", "max_tokens": 8} for _ in range(10)] + [{"tenant": "b", "max_tokens": 8}] * 2
        order = await order_of(worker, *requests)
        assert max(order.index(10), order.index(11)) <= 5


async def test_what_ends_at_one_worker_lets_another_ones_request_through() -> None:
    """All in flight is the first worker's; the second's request goes as soon as one of those ends."""
    store = Looks()
    async with (
        Worker(store, "r1", action="queue").running() as one,
        Worker(store, "r2", action="queue").running() as two,
    ):
        first, *_ = await one.fill()
        (waiting,) = two.waits()
        await until(lambda: two.waiting() == 1)
        await one.router.settle(first)
        assert (await waiting).charge_id.startswith("r2")


async def test_replicas_share_what_becomes_free_and_do_not_rush_in_together() -> None:
    """A has thirty requests at one worker, B thirty at another, and the first worker has all that is in flight.

    As these end one by one, both get half, and no more than one beyond the limit is ever in flight.
    """
    store = Looks()
    async with (
        Worker(store, "r1", action="queue").running() as one,
        Worker(store, "r2", action="queue").running() as two,
    ):
        waiting = [*await one.fill()]
        tasks = [*one.waits(*["a"] * 30), *two.waits(*["b"] * 30)]
        await until(lambda: one.waiting() == 30 and two.waiting() == 30)
        await asyncio.sleep(0.2)
        seen, most = {id(each) for each in waiting}, 0
        for _ in range(30):
            oldest = waiting.pop(0)
            await (one if oldest.charge_id.startswith("r1") else two).router.settle(oldest)
            before = len(one.served) + len(two.served)
            await until(lambda before=before: len(one.served) + len(two.served) > before)  # type: ignore[misc]
            most = max(most, await in_flight(store))
            waiting += [each for each in (*one.served, *two.served) if id(each) not in seen]
            seen |= {id(each) for each in waiting}
        share = Counter(each.charge_id[:2] for each in (*one.served, *two.served))
        assert most <= LIMIT + 1
        assert abs((share["r1"] - LIMIT) - share["r2"]) <= 8
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_other_replicas_finish_counts_for_the_drain_rate() -> None:
    """By the feed; this worker's own are counted once, as they are settled."""
    worker = Worker(action="queue")
    known, drain = worker.around.knowledge["main"], worker.gate.lines["main"].drain
    decision = await worker.ask()
    known.apply(Answered("other-1", "1", -1.0, 0.1, -1.0, 10.0))
    known.apply(Answered(decision.charge_id, "1", -1.0, 0.1, -1.0, 10.0))
    await worker.router.settle(decision)
    assert drain.per_s(SystemClock().monotonic()) == 2.0


async def test_a_queue_is_shown() -> None:
    """How many wait, for how many tokens, what left how, and how full the pool is."""
    async with Worker(action="queue").running() as worker:
        await worker.fill()
        (waiting,) = worker.waits()
        await until(lambda: worker.counted('warmpath_queue_requests{class="normal",pool="main"} 1.0'))
        assert worker.counted('warmpath_saturated_endpoints{pool="main"} 2.0')
        await worker.router.settle(worker.served[0])
        await waiting
        assert worker.counted('warmpath_queue_left_total{class="normal",outcome="granted",pool="main"} 7.0')


async def test_a_pool_that_passes_again_shows_no_saturation() -> None:
    """Nobody looks at it any more: what was seen last would stand on the page for ever."""
    async with Worker(action="reject").running() as worker:
        await worker.fill()
        await until(lambda: worker.counted('warmpath_saturated_endpoints{pool="main"} 2.0'))
        worker.around.config = msgspec.structs.replace(worker.around.config, overload=config_overload.Overload())
        await until(lambda: worker.counted('warmpath_saturated_endpoints{pool="main"} 0.0'))


async def test_who_continues_a_stored_response_is_sent_nowhere_else() -> None:
    """Only the pool that has it can: 429 in place of an answer that knows nothing of it."""
    async with Worker(action="fallback", fallback="s").running() as worker:
        await worker.fill()
        body = json.dumps({"model": "m", "input": "more", "previous_response_id": "resp_1"}).encode()
        with pytest.raises(OverloadedError):
            await worker.router.decide(Call("POST", "/v1/responses", {}, body))
