"""The real services behind a real Envoy: what the sidecar learns and does, in both body modes."""

import asyncio
import contextlib
import io
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from extproc.config import BodyMode, Config, Gateway, Model, Pool, Sidecar
from extproc.envoy.access_log import AccessLog
from extproc.envoy.contract import Attempt, Call, Decision, Served
from extproc.envoy.discovery import Discovery, Member, MemberHealth, Roster
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, stop
from extproc.errors import OverloadedError
from tests.ports import free_port
from tests.wire.envoy import RunningEnvoy, running_envoy
from tests.wire.standins import Engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1024 * 1024


class Desk:
    """Decides as the test says, remembers what it was asked, and what it learnt afterwards."""

    def __init__(self) -> None:
        self.outcome: Decision | Exception = Decision(pool="main")
        self.calls: list[Call] = []
        self.open: list[Decision] = []
        self.settled: list[Decision] = []
        self.seen: list[Served] = []
        self.failed: list[Attempt] = []

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        self.calls.append(call)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        self.open.append(msgspec.structs.replace(self.outcome, body=None))
        return self.outcome

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""

    async def settle(self, decision: Decision, _served: str = "") -> None:
        """See `Decider.settle`."""
        self.open.remove(decision)
        self.settled.append(decision)

    def observe(self, served: Served) -> None:
        """See `Observer.observe`."""
        self.seen.append(served)

    def attempt_failed(self, attempt: Attempt) -> None:
        """See `Observer.attempt_failed`."""
        self.failed.append(attempt)

    def tried_again(self, served: Served) -> None:
        """See `Observer.tried_again`."""

    def entry(self, charge: str) -> Served | None:
        """What the access log said of a charge; None until it has."""
        return next((served for served in self.seen if served.charge_id == charge), None)


@dataclass
class Stack:
    """Envoy between a client, one worker and three engines."""

    envoy: RunningEnvoy
    http: aiohttp.ClientSession
    desk: Desk
    processor: Processor
    log: AccessLog
    discovery: Discovery
    roster: Roster
    engines: list[Engine]
    addresses: list[str]
    charges: int = field(default=0)

    def pick(self, *order: int, charge: str = "") -> Decision:
        """Make the desk send what comes to these engines, in order."""
        destinations = tuple(self.addresses[index] for index in order)
        decision = Decision("main", destinations, charge, {"policy": "test", "uncached": 12.0})
        self.desk.outcome = decision
        return decision

    async def change(self, addresses: Sequence[str], health: Mapping[int, MemberHealth] | None = None) -> None:
        """Replace the members, the i-th with health `health[i]`, and wait until Envoy has taken them."""
        acknowledged = self.discovery.counts.acknowledged
        health = health or {}
        members = [Member(address, health.get(i, MemberHealth.HEALTHY)) for i, address in enumerate(addresses)]
        self.roster.replace({"main": members})
        await eventually(lambda: self.discovery.counts.acknowledged > acknowledged)

    async def post(self, query: str = "", body: bytes = b"{}") -> tuple[int, dict[str, object]]:
        """Send one request; status and JSON of the answer."""
        url = f"{self.envoy.url}/v1/chat/completions{query}"
        async with self.http.post(url, data=io.BytesIO(body)) as answer:
            return answer.status, await answer.json()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what other processes are about to make true."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # Envoy has no event to wait for
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running_stack(body_mode: BodyMode, desk: Desk | None = None) -> AsyncIterator[Stack]:
    """Everything, on free ports and sockets of a folder of its own; `desk` decides if the test has its own."""
    folder = Path(tempfile.mkdtemp(prefix="wp-"))
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        engines = [Engine() for _ in range(3)]
        for engine in engines:
            await engine.start()
            cleanup.push_async_callback(engine.stop)
        addresses = [engine.address for engine in engines]
        gateway = Gateway(
            listen=f"127.0.0.1:{free_port()}",
            admin=f"127.0.0.1:{free_port()}",
            body_mode=body_mode,
            sidecar=Sidecar(socket_dir=str(folder), workers=1),
        )
        config = Config(models={"m": Model(pool="main")}, pools={"main": Pool(endpoints=addresses)}, gateway=gateway)
        desk, roster, health = desk or Desk(), Roster({"main": [Member(address) for address in addresses]}), Health()
        processor, log, discovery = Processor(desk, Limits(body_mode=body_mode)), AccessLog(desk), Discovery(roster)
        for socket, services in (("worker-0", (processor, log, health)), ("keeper", (discovery, health))):
            server = make_server([service.handler() for service in services], max_body_bytes=gateway.max_body_bytes)
            bind(server, f"unix:{folder / socket}.sock")
            await server.start()
            busy = [processor] if processor in services else []
            cleanup.push_async_callback(stop, server, health, busy, [log, discovery], drain_s=5)
        health.set_ready(True)
        envoy = await cleanup.enter_async_context(running_envoy(config))
        http = await cleanup.enter_async_context(aiohttp.ClientSession())
        yield Stack(envoy, http, desk, processor, log, discovery, roster, engines, addresses)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "duplex"])
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """One stack in each body mode; no test leaves it broken."""
    async with running_stack(request.param) as running:
        yield running


async def test_pick_is_followed_and_settled(stack: Stack) -> None:
    """The endpoint named first serves, and the decision is settled when the answer is complete."""
    for index in (2, 0, 1):
        decision = stack.pick(index, (index + 1) % 3)
        status, told = await stack.post(body=b'{"model":"m"}')
        assert (status, told["endpoint"], told["bytes"]) == (200, stack.addresses[index], 13)
        await eventually(lambda: not stack.desk.open)
        assert stack.desk.settled[-1] == decision
    assert stack.desk.calls[-1].body == b'{"model":"m"}'


@pytest.mark.parametrize("size", [1, 32_769, 200_000, 20 * MIB])
async def test_body_reaches_desk_and_engine_whole(stack: Stack, size: int) -> None:
    """Every byte reaches the decider and the engine, whatever the body mode does with it."""
    stack.pick(0)
    status, told = await stack.post(body=b"x" * size)
    assert (status, told["bytes"], len(stack.desk.calls[-1].body)) == (200, size, size)
    await eventually(lambda: stack.processor.counts.held_bytes == 0)


async def test_get_is_picked(stack: Stack) -> None:
    """A request without a body is decided by its headers."""
    stack.pick(1)
    async with stack.http.get(f"{stack.envoy.url}/v1/models") as answer:
        assert (answer.status, (await answer.json())["endpoint"]) == (200, stack.addresses[1])
    assert (stack.desk.calls[-1].method, stack.desk.calls[-1].path) == ("GET", "/v1/models")


async def test_refusal_reaches_the_client(stack: Stack) -> None:
    """A shed request is a 429 with JSON, its reason and when to come back."""
    stack.desk.outcome = OverloadedError("busy", 7)
    async with stack.http.post(f"{stack.envoy.url}/v1/chat/completions", data=b"{}") as answer:
        assert answer.status == 429
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["x-warmpath-reason"] == "overloaded"
        assert answer.content_type == "application/json"
        assert (await answer.json())["error"]["message"] == "busy"


async def test_fault_of_ours_fails_open(stack: Stack) -> None:
    """A decider that breaks costs the pick, not the request."""
    stack.desk.outcome = RuntimeError("broken")
    assert (await stack.post())[0] == 200


@pytest.mark.parametrize("query", ["", "?stream=0.3"], ids=["json", "sse"])
async def test_access_log_tells_who_served_and_what_it_cost(stack: Stack, query: str) -> None:
    """The finished request comes back with its charge, endpoint, tokens and the time of the first body byte."""
    stack.charges += 1
    charge = f"c-{stack.charges}"
    decision = stack.pick(2, charge=charge)
    async with stack.http.post(f"{stack.envoy.url}/v1/chat/completions{query}", data=b"{}") as answer:
        await answer.read()
    await eventually(lambda: stack.desk.entry(charge) is not None)
    served = stack.desk.entry(charge)
    assert served is not None
    assert (served.pool, served.destination, served.status) == ("main", stack.addresses[2], 200)
    assert (served.attempts, served.flags) == (1, ())
    assert (served.prompt_tokens, served.output_tokens, served.cached_tokens) == (100, 5, 64)
    assert served.metadata == decision.metadata
    assert served.request_bytes == 2
    assert served.response_bytes > 0
    # The engine sends its headers at once and its first chunk 0.3 s later: only the body counts.
    assert (0.3 if query else 0) <= served.ttft_s <= served.duration_s
    assert stack.log.counts.malformed == stack.log.counts.usage_unreadable == 0


@pytest.mark.parametrize("query", ["?wait=30", "?stream=30"], ids=["before the headers", "in mid-stream"])
async def test_client_that_leaves_settles_its_decision(stack: Stack, query: str) -> None:
    """The lifeline ends with the client: what was charged is given back long before the engine would answer."""
    stack.charges += 1
    stack.pick(0, charge=f"c-{stack.charges}")
    leaving = asyncio.ensure_future(stack.post(query))
    await eventually(lambda: len(stack.desk.open) == 1)
    await asyncio.sleep(0.1)
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving
    await eventually(lambda: not stack.desk.open)
    await eventually(lambda: stack.desk.entry(f"c-{stack.charges}") is not None)
    served = stack.desk.entry(f"c-{stack.charges}")
    assert served is not None
    assert set(served.flags) & {"DC", "DR"}


async def test_membership_reaches_envoy_as_it_changes(stack: Stack) -> None:
    """A member that is taken away serves no more, even when it is named first; back it comes."""
    stack.pick(0, 1)
    await stack.change(stack.addresses[1:])
    assert (await stack.post())[1]["endpoint"] == stack.addresses[1]
    await stack.change(stack.addresses)
    assert (await stack.post())[1]["endpoint"] == stack.addresses[0]
    assert stack.discovery.counts.rejected == 0


@pytest.mark.parametrize("health", [MemberHealth.DRAINING, MemberHealth.UNHEALTHY])
async def test_health_binds_envoys_own_pick_and_not_ours(stack: Stack, health: MemberHealth) -> None:
    """Envoy itself sends nothing to such a member, but follows a decision that names it: the pick must know."""
    await stack.change(stack.addresses, {0: health})
    stack.desk.outcome = Decision("main")
    served = {(await stack.post())[1]["endpoint"] for _ in range(12)}
    assert stack.addresses[0] not in served
    stack.pick(0, 1)
    assert (await stack.post())[1]["endpoint"] == stack.addresses[0]
    await stack.change(stack.addresses)


async def test_no_message_was_outside_the_phase_table(stack: Stack) -> None:
    """Nothing that a real Envoy said in this module was unexpected, and nothing is left open."""
    await eventually(lambda: stack.processor.counts.open == 0)
    await stack.processor.settled()
    assert stack.processor.counts.unexpected == 0
    assert stack.processor.counts.unreadable == 0
    assert stack.processor.counts.settled == stack.processor.counts.decided
