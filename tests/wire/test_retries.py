"""What a real Envoy does with a request whose first endpoint fails: tried anew before the first byte, never after."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from envoy.data.accesslog.v3 import accesslog_pb2

from extproc.config import Breakers, Config, Gateway, Model, Pool, Retries, Sidecar, Telemetry, Timeouts
from extproc.config_limits import TimeoutRule
from extproc.envoy.access_log import served_from
from extproc.envoy.contract import REASON, Served
from tests.bad_engine import BadEngine, Behave
from tests.greedy import text_of
from tests.ports import free_port
from tests.waiting import until
from tests.wire.envoy import RunningEnvoy, running_envoy
from tests.wire.standins import Keeper, Orders, Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "tell"}], "max_tokens": 8}
STREAM = {**BODY, "stream": True}
PER_TRY = {"x-envoy-upstream-rq-per-try-timeout-ms": "300"}


@dataclass(frozen=True)
class Told:
    """An answer as far as it came."""

    status: int
    reason: str
    body: bytes
    broken: bool


@dataclass
class Front:
    """An Envoy before three engines, of which the first is picked and the others follow."""

    envoy: RunningEnvoy
    http: aiohttp.ClientSession
    orders: Orders
    worker: Worker
    engines: list[BadEngine]
    turn: int = 0

    @property
    def first(self) -> BadEngine:
        """The endpoint that is picked."""
        return self.engines[0]

    @property
    def path(self) -> str:
        """Path of this test's requests."""
        return f"/v1/chat/completions?turn={self.turn}"

    def begin(self) -> None:
        """A test of its own: every engine well, nothing received; another engine is the first."""
        self.engines.append(self.engines.pop(0))
        self.orders.destinations = [each.address for each in self.engines]
        self.orders.headers = {}
        self.turn += 1
        for engine in self.engines:
            engine.behave = Behave()
            engine.received.clear()

    async def ask(self, body: dict[str, Any]) -> Told:
        """Send one request and read as much as there is."""
        whole, broken = bytearray(), False
        url = f"{self.envoy.url}{self.path}"
        async with self.http.post(url, data=json.dumps(body).encode()) as answer:
            try:
                async for piece in answer.content.iter_any():
                    whole += piece
            except aiohttp.ClientError:
                broken = True
        return Told(answer.status, answer.headers.get(REASON, ""), bytes(whole), broken)

    def tries(self) -> list[int]:
        """Requests that each engine got."""
        return [len(each.received) for each in self.engines]

    async def logged(self) -> Served:
        """The request as the access log tells it once it is over."""
        ended = accesslog_pb2.DownstreamEnd

        def entries() -> list[accesslog_pb2.HTTPAccessLogEntry]:
            mine = [each for each in self.worker.entries if each.request.path == self.path]
            return [each for each in mine if each.common_properties.access_log_type == ended]

        await until(lambda: len(entries()) > 0)
        [entry] = entries()
        return served_from(entry)


@contextlib.asynccontextmanager
async def running_front(retries: Retries, engines: Sequence[BadEngine]) -> AsyncIterator[Front]:
    """Everything, on free ports."""
    folder = tempfile.mkdtemp(prefix="wp-")
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        addresses = [engine.address for engine in engines]
        config = Config(
            models={"m": Model(pool="main")},
            pools={"main": Pool(endpoints=addresses)},
            gateway=Gateway(
                listen=f"127.0.0.1:{free_port()}",
                admin=f"127.0.0.1:{free_port()}",
                sidecar=Sidecar(socket_dir=folder, workers=1),
            ),
            # A rule, so that workers may tell Envoy's router limits.
            timeouts=Timeouts(rules=[TimeoutRule(headers_s=1.0)]),
            retries=retries,
            breakers=Breakers(strikes=0),
            telemetry=Telemetry(access_log_flush_ms=10),
        )
        orders = Orders()
        worker, keeper = Worker(orders), Keeper(addresses)
        await worker.start(f"{folder}/worker-0.sock")
        cleanup.push_async_callback(worker.stop)
        await keeper.start(f"{folder}/keeper.sock")
        cleanup.push_async_callback(keeper.stop)
        envoy = await cleanup.enter_async_context(running_envoy(config))
        http = await cleanup.enter_async_context(aiohttp.ClientSession())
        yield Front(envoy, http, orders, worker, list(engines))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Front]:
    """One for most tests, with the default retries but for a short back-off."""
    async with contextlib.AsyncExitStack() as cleanup:
        engines = [await cleanup.enter_async_context(BadEngine()) for _ in range(3)]
        yield await cleanup.enter_async_context(running_front(Retries(), engines))


@pytest_asyncio.fixture(loop_scope="module")
async def front(running: Front) -> Front:
    """The same with all well."""
    running.begin()
    return running


def text(stream: bytes) -> str:
    """What a stream says."""
    events = [json.loads(line[6:]) for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(each["choices"][0]["delta"].get("content", "") for each in events)


FAILURES = {
    "503": Behave(status=503),
    "resets": Behave(hang_up=True),
    "closes": Behave(hang_up=True, how="close"),
    "garbage": Behave(garbage=True),
    "silent": Behave(silent=True),
}


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("how", FAILURES)
async def test_a_failure_before_the_first_byte_is_tried_on_the_next(
    front: Front, how: str, body: dict[str, Any]
) -> None:
    """The next of the list answers, with one body at each engine asked, and the client sees nothing of it (D6, C14)."""
    front.first.behave = FAILURES[how]
    front.orders.headers = PER_TRY
    told = await front.ask(body)
    assert (told.status, told.broken, front.tries()) == (200, False, [1, 1, 0])
    whole = text(told.body) if body is STREAM else json.loads(told.body)["choices"][0]["message"]["content"]
    assert whole == text_of(BODY)
    assert [json.loads(each.received[0].body) for each in front.engines[:2]] == [body, body]
    logged = await front.logged()
    assert (logged.attempts, logged.destination, logged.stage) == (2, front.engines[1].address, "")


async def test_an_endpoint_that_refuses_connections_is_passed_over(front: Front) -> None:
    """Nothing listens at the pick's address: the next one answers."""
    async with front.first.stopped():
        told = await front.ask(STREAM)
    assert (told.status, text(told.body), front.tries()) == (200, text_of(BODY), [0, 1, 0])


@pytest.mark.parametrize("status", [400, 404, 408, 409, 422, 429])
async def test_mistakes_of_the_client_are_never_retried(front: Front, status: int) -> None:
    """A 4xx is the answer, also where the next engine would answer otherwise."""
    front.first.behave = Behave(status=status)
    told = await front.ask(BODY)
    assert (told.status, json.loads(told.body)["error"]["code"], front.tries()) == (status, status, [1, 0, 0])


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_an_error_of_the_engine_is_not_retried(front: Front, status: int) -> None:
    """It had the request, and the next may fail at it too; only a full queue (503) was no work yet."""
    front.first.behave = Behave(status=status)
    assert ((await front.ask(BODY)).status, front.tries()) == (status, [1, 0, 0])


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("at", [0, 1, 200, 700])
async def test_a_failure_after_the_headers_is_never_retried(front: Front, at: int, how: Any) -> None:
    """The client gets exactly what was sent and sees its stream break; nobody is asked a second time (D6)."""
    front.first.behave = Behave(cut_at=at, how=how)
    told = await front.ask(STREAM)
    assert (told.status, len(told.body), told.broken, front.tries()) == (200, at, True, [1, 0, 0])


async def test_an_answer_shorter_than_its_length_breaks_off(front: Front) -> None:
    """The engine promised more bytes than it sent: no retry, and no answer that looks whole."""
    front.first.behave = Behave(length_off=7)
    told = await front.ask(BODY)
    assert (told.status, told.broken, front.tries()) == (200, True, [1, 0, 0])


async def test_a_request_is_tried_three_times_at_most(front: Front) -> None:
    """Two retries, each on another endpoint of the list; then the last failure is the answer."""
    for engine in front.engines:
        engine.behave = Behave(status=503)
    told = await front.ask(BODY)
    assert (told.status, front.tries()) == (503, [1, 1, 1])


async def test_silence_of_all_endpoints_is_a_time_limit(front: Front) -> None:
    """504 with its own reason, in JSON; never 502 or 503 (D1, D6)."""
    front.orders.headers = PER_TRY
    for engine in front.engines:
        engine.behave = Behave(silent=True)
    told = await front.ask(STREAM)
    assert (told.status, told.reason, front.tries()) == (504, "time_limit_headers", [1, 1, 1])
    assert json.loads(told.body)["error"]["type"] == "timeout_error"
    assert (await front.logged()).stage == "headers"


async def test_the_time_of_a_try_ends_with_the_headers(front: Front) -> None:
    """A stream that began may take as long as it likes."""
    front.orders.headers = PER_TRY
    front.first.behave = Behave(first_s=0.6, gap_s=0.1)
    told = await front.ask(STREAM)
    assert (told.status, text(told.body), front.tries()) == (200, text_of(BODY), [1, 0, 0])


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_the_time_of_the_whole_request_is_its_own(front: Front, body: dict[str, Any]) -> None:
    """Before the headers 504, never 502, and no further try; afterwards the stream breaks off (D6)."""
    front.orders.headers = {"x-envoy-upstream-rq-timeout-ms": "400"}
    front.first.behave = Behave(silent=True) if body is BODY else Behave(stall_after=2)
    told = await front.ask(body)
    assert (told.status, told.reason) == ((504, "time_limit") if body is BODY else (200, ""))
    assert told.broken == (body is STREAM)
    assert front.tries() == [1, 0, 0]
    assert (await front.logged()).stage == "request"


async def test_limits_of_a_client_are_not_taken(front: Front) -> None:
    """What only the sidecar may tell Envoy's router does nothing when a client says it."""
    forged = {
        "x-envoy-upstream-rq-timeout-ms": "1",
        "x-envoy-upstream-rq-per-try-timeout-ms": "1",
        "x-envoy-max-retries": "0",
        "x-envoy-retry-on": "retriable-4xx,5xx",
    }
    front.first.behave = Behave(headers_s=0.3)
    url = f"{front.envoy.url}/v1/chat/completions"
    async with front.http.post(url, data=json.dumps(BODY).encode(), headers=forged) as answer:
        assert answer.status == 200
    assert front.tries() == [1, 0, 0]
    front.begin()
    front.first.behave = Behave(status=500)
    async with front.http.post(url, data=json.dumps(BODY).encode(), headers=forged) as answer:
        assert answer.status == 500
    assert front.tries() == [1, 0, 0]


async def test_retries_have_a_budget() -> None:
    """With room for two retries at once, a pool that fails as a whole is asked little more than once a request."""
    async with contextlib.AsyncExitStack() as cleanup:
        engines = [await cleanup.enter_async_context(BadEngine()) for _ in range(3)]
        few = Retries(base_ms=100, max_ms=100, budget_percent=0.0, min_concurrent=2)
        front = await cleanup.enter_async_context(running_front(few, engines))
        front.begin()
        for engine in front.engines:
            engine.behave = Behave(status=503, headers_s=0.2)
        told = await asyncio.gather(*(front.ask(BODY) for _ in range(20)))
        assert {each.status for each in told} == {503}
        assert 20 < sum(front.tries()) <= 20 + 2 * 2
