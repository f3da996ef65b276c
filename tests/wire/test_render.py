"""What a real Envoy does with the rendered configuration, between stand-in workers, keeper and engines."""

import asyncio
import contextlib
import gzip
import io
import json
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import pytest
import pytest_asyncio
from envoy.data.accesslog.v3 import accesslog_pb2

from extproc.config import BodyMode, Config, Gateway, Model, Pool, Sidecar, Timeouts
from extproc.config_relay import AVOID
from extproc.envoy.contract import DESTINATION, METADATA, POOL, REASON, SERVED
from extproc.request.shapes import TENANT_HEADER
from tests.ports import free_port
from tests.wire.envoy import RunningEnvoy, running_envoy
from tests.wire.standins import Engine, Keeper, Orders, Seen, Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

T = TypeVar("T")
MIB = 1024 * 1024
USAGE = b'\x08\x01\x12\x01m\x1a\x02\x08d"\x02\x08\x05*\x02\x08i2\x04\n\x02\x08@B\x02\x08iH\x01'
"""envoy.data.ai.v3.TokenUsage: model m, 100 tokens in (64 cached), 5 out, 105 in all, complete."""


@dataclass
class Answer:
    """An HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body as JSON."""
        value: dict[str, Any] = json.loads(self.body)
        return value


@dataclass
class Stack:
    """An Envoy with everything around it."""

    envoy: RunningEnvoy
    http: aiohttp.ClientSession
    orders: Orders
    workers: list[Worker]
    engines: list[Engine]
    addresses: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.addresses = [engine.address for engine in self.engines]

    async def post(
        self, path: str = "/v1/chat/completions", body: bytes = b"{}", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request."""
        async with self.http.post(f"{self.envoy.url}{path}", data=io.BytesIO(body), headers=headers) as answer:
            return Answer(answer.status, dict(answer.headers), await answer.read())

    @property
    def last_seen(self) -> Seen:
        """What the workers saw of the only request since the last `forget`."""
        [seen] = [one for worker in self.workers for one in worker.seen]
        return seen

    def forget(self) -> None:
        """Start afresh: default orders, nothing seen."""
        self.orders.pool, self.orders.destinations, self.orders.silent, self.orders.refuse = "main", (), False, 0
        for worker in self.workers:
            worker.seen.clear()

    async def entry_of(self, path: str) -> accesslog_pb2.HTTPAccessLogEntry:
        """The access-log entry of a request that is over, by its path, as soon as it has arrived."""

        def find() -> accesslog_pb2.HTTPAccessLogEntry | None:
            entries = (entry for worker in self.workers for entry in worker.entries)
            ended = accesslog_pb2.DownstreamEnd
            mine = (entry for entry in entries if entry.request.path == path)
            return next((entry for entry in mine if entry.common_properties.access_log_type == ended), None)

        return await eventually(find)


async def eventually(find: Callable[[], T | None], limit_s: float = 20.0) -> T:
    """Ask again and again until there is an answer."""
    async with asyncio.timeout(limit_s):
        while (found := find()) is None:  # noqa: ASYNC110 -- Envoy has no event to wait for
            await asyncio.sleep(0.02)
    return found


@contextlib.asynccontextmanager
async def running_stack(
    *, workers: int = 2, fail_open: bool = True, body_mode: BodyMode = "buffered", timeouts: Timeouts | None = None
) -> AsyncIterator[Stack]:
    """Three engines, a keeper, workers and Envoy."""
    folder = tempfile.mkdtemp(prefix="wp-")
    orders = Orders()
    async with contextlib.AsyncExitStack() as stop:
        stop.callback(shutil.rmtree, folder, ignore_errors=True)
        engines = [Engine() for _ in range(3)]
        for engine in engines:
            await engine.start()
            stop.push_async_callback(engine.stop)
        keeper = Keeper([engine.address for engine in engines])
        await keeper.start(f"{folder}/keeper.sock")
        stop.push_async_callback(keeper.stop)
        sidecars = [Worker(orders) for _ in range(workers)]
        for index, worker in enumerate(sidecars):
            await worker.start(f"{folder}/worker-{index}.sock")
            stop.push_async_callback(worker.stop)
        gateway = Gateway(
            listen=f"127.0.0.1:{free_port()}",
            admin=f"127.0.0.1:{free_port()}",
            fail_open=fail_open,
            body_mode=body_mode,
            sidecar=Sidecar(socket_dir=folder, workers=max(workers, 1)),
        )
        config = Config(
            models={"m": Model(pool="main")},
            pools={"main": Pool(endpoints=[engine.address for engine in engines])},
            gateway=gateway,
            timeouts=timeouts or Timeouts(),
        )
        envoy = await stop.enter_async_context(running_envoy(config))
        http = await stop.enter_async_context(aiohttp.ClientSession())
        yield Stack(envoy, http, orders, sidecars, engines)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stack() -> AsyncIterator[Stack]:
    """One stack for every test that breaks nothing."""
    async with running_stack() as running:
        yield running


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """The shared stack, with default orders and nothing seen."""
    shared_stack.forget()
    return shared_stack


async def test_forged_internal_headers_are_removed_before_anyone_reads_them(stack: Stack) -> None:
    """A client cannot choose its endpoint, pool, tenant or priority; its session stays its own."""
    forged = {DESTINATION: "192.0.2.9:1", SERVED: "192.0.2.9:1", POOL: "other", TENANT_HEADER: "boss", REASON: "none"}
    forged[AVOID] = stack.addresses[1]
    stack.orders.destinations = [stack.addresses[1]]
    answer = await stack.post(headers={**forged, "x-session-id": "s", "x-warmpath-priority": "3"})
    seen = stack.last_seen.headers
    assert not set(forged) & set(seen)
    assert (seen["x-session-id"], "x-warmpath-priority" in seen) == ("s", False)
    assert answer.json["endpoint"] == stack.addresses[1]
    assert answer.json["headers"][POOL] == "main"
    assert not {SERVED, TENANT_HEADER, REASON, AVOID} & set(answer.json["headers"])


async def test_keys_and_cookies_reach_the_engine_but_never_the_sidecar(stack: Stack) -> None:
    """The sidecar decides without secrets, so it cannot leak them."""
    answer = await stack.post(headers={"authorization": "Bearer k", "cookie": "c=1", "x-api-key": "k"})
    assert not {"authorization", "cookie", "x-api-key"} & set(stack.last_seen.headers)
    assert answer.json["headers"]["Authorization"] == "Bearer k"


@pytest.mark.parametrize("size", [1, 32_769, 200_000, 5_000_000, 20_000_000, 32 * MIB])
async def test_a_body_up_to_the_limit_passes_whole(stack: Stack, size: int) -> None:
    """Sidecar and engine both get every byte of a body that the configuration allows."""
    answer = await stack.post(body=b"x" * size)
    assert (answer.status, answer.json["bytes"], len(stack.last_seen.body)) == (200, size, size)


async def test_a_body_one_byte_over_the_limit_is_413_in_json(stack: Stack) -> None:
    """The limit is exact, and its answer is one that OpenAI's clients can read."""
    answer = await stack.post(body=b"x" * (32 * MIB + 1))
    assert (answer.status, answer.headers[REASON]) == (413, "body_too_large")
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json["error"]["code"] == 413
    assert str(32 * MIB) in answer.json["error"]["message"]


async def test_a_gzip_body_is_unpacked_for_sidecar_and_engine(stack: Stack) -> None:
    """Sidecar and engine see the JSON, not the gzip."""
    body = json.dumps({"prompt": random.Random(1).randbytes(200_000).hex()}).encode()
    answer = await stack.post(body=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert stack.last_seen.body == body
    assert answer.json["bytes"] == len(body)
    assert "content-encoding" not in stack.last_seen.headers


@pytest.mark.parametrize("size", [100_000, 5_000_000])
async def test_a_very_compressible_body_is_not_cut_short(stack: Stack, size: int) -> None:
    """Envoy's default inflate ratio would silently pass the first part on as the whole."""
    answer = await stack.post(body=gzip.compress(b"x" * size), headers={"content-encoding": "gzip"})
    assert (answer.status, answer.json["bytes"]) == (200, size)


async def test_a_gzip_bomb_is_413(stack: Stack) -> None:
    """The limit counts unpacked bytes."""
    answer = await stack.post(body=gzip.compress(b"x" * (33 * MIB)), headers={"content-encoding": "gzip"})
    assert (answer.status, answer.headers[REASON]) == (413, "body_too_large")


async def test_the_next_destination_answers_when_the_first_is_no_member(stack: Stack) -> None:
    """An endpoint that has left the pool costs nothing: the list goes on."""
    stack.orders.destinations = ["127.0.0.1:1", stack.addresses[2]]
    answer = await stack.post()
    assert (answer.status, answer.json["endpoint"]) == (200, stack.addresses[2])


async def test_each_failed_attempt_is_told_and_no_other(stack: Stack) -> None:
    """The router's own log: pool, endpoint and status of an attempt that was refused; nothing of one that went well."""
    stack.orders.destinations = [stack.addresses[0], stack.addresses[1]]
    path = f"/v1/attempts?full={stack.addresses[0]}"
    assert (await stack.post(path, body=b"x")).status == 200
    await stack.entry_of(path)

    def attempts() -> list[tuple[str, str, int]] | None:
        entries = [entry for worker in stack.workers for entry in worker.entries if entry.request.path == path]
        found = [entry for entry in entries if entry.common_properties.access_log_type == accesslog_pb2.UpstreamEnd]
        return [
            (common.upstream_cluster, f"{where.address}:{where.port_value}", entry.response.response_code.value)
            for entry in found
            for common in (entry.common_properties,)
            for where in (common.upstream_remote_address.socket_address,)
        ] or None

    assert await eventually(attempts) == [("main", stack.addresses[0], 503)]


@pytest.mark.parametrize("size", [10, 5_000_000])
async def test_a_full_queue_hands_over_to_the_next_destination(stack: Stack, size: int) -> None:
    """An engine's 503 is retried, also with a long body, on the second of the list; the log tells who served."""
    stack.orders.destinations = [stack.addresses[0], stack.addresses[1]]
    path = f"/v1/full?full={stack.addresses[0]}&size={size}"
    answer = await stack.post(path, body=b"x" * size)
    assert (answer.status, answer.json["endpoint"]) == (200, stack.addresses[1])
    assert answer.json["bytes"] == size
    common = (await stack.entry_of(path)).common_properties
    assert common.upstream_request_attempt_count == 2
    assert common.metadata.filter_metadata["envoy.lb"][SERVED] == stack.addresses[1]


async def test_an_unknown_pool_is_503_in_json(stack: Stack) -> None:
    """Envoy's own refusals have the same shape and the same reason header as ours."""
    stack.orders.pool = "elsewhere"
    answer = await stack.post()
    assert (answer.status, answer.headers[REASON]) == (503, "no_endpoint")
    assert answer.json["error"]["type"] == "service_unavailable"


@pytest.mark.parametrize("status", [413, 429, 503, 504])
async def test_a_refusal_of_the_sidecar_reaches_the_client_unchanged(stack: Stack, status: int) -> None:
    """The mappers for Envoy's own answers leave the sidecar's alone, whatever their status."""
    stack.orders.refuse = status
    answer = await stack.post()
    assert (answer.status, answer.body) == (status, b"refused")


async def test_the_session_hash_picks_when_the_sidecar_names_no_endpoint(stack: Stack) -> None:
    """Without a destination, one session stays on one endpoint and sessions spread."""
    hosts = [{(await stack.post(headers={"session_id": f"s{n}"})).json["endpoint"] for _ in range(2)} for n in range(8)]
    assert all(len(one) == 1 for one in hosts)
    assert len(set.union(*hosts)) > 1


async def test_a_silent_sidecar_costs_the_message_timeout_and_no_request(stack: Stack) -> None:
    """Fail-open: past the timeout the request goes on without a decision."""
    stack.orders.silent = True
    answer = await stack.post()
    assert answer.status == 200
    assert POOL not in answer.json["headers"]


async def test_a_get_is_decided_on_its_headers(stack: Stack) -> None:
    """Requests without a body reach the sidecar too."""
    stack.orders.destinations = [stack.addresses[2]]
    async with stack.http.get(f"{stack.envoy.url}/v1/models") as answer:
        assert (await answer.json())["endpoint"] == stack.addresses[2]
    assert stack.last_seen.headers[":method"] == "GET"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions?n=1",
        "/v1/chat/completions?stream=0.2",
        "/v1/completions?object=text_completion",
        "/v1/embeddings?object=list",
    ],
)
async def test_the_access_log_carries_usage_timing_and_our_metadata(stack: Stack, path: str) -> None:
    """Everything the sidecar learns from arrives in one entry: usage, first body byte, who served, the decision."""
    stack.orders.destinations = [stack.addresses[1]]
    assert (await stack.post(path)).status == 200
    entry = await stack.entry_of(path)
    common = entry.common_properties
    assert common.metadata.typed_filter_metadata["envoy.ai.token_usage"].value == USAGE
    assert dict(common.metadata.filter_metadata[METADATA]) == {"charge": "c-1", "predicted": 12}
    assert common.metadata.filter_metadata["envoy.lb"][SERVED] == stack.addresses[1]
    assert common.upstream_cluster == "main"
    assert common.upstream_remote_address.socket_address.port_value == int(stack.addresses[1].rpartition(":")[2])
    first_body_us = int(common.custom_tags["first_body_us"])
    assert 0 < first_body_us <= common.duration.ToMicroseconds()
    if "stream" in path:
        assert first_body_us >= 200_000
        assert common.time_to_first_upstream_rx_byte.ToMicroseconds() < 200_000


async def test_lost_parts_lose_no_request() -> None:
    """One stack is taken apart: an engine, a worker, then all workers; a slow request meets its time limit."""
    async with running_stack(timeouts=Timeouts(request_s=2.0)) as stack:
        slow = await stack.post("/v1/slow?wait=30")
        assert (slow.status, slow.headers[REASON]) == (504, "time_limit")
        assert slow.json["error"]["type"] == "timeout_error"

        stack.orders.destinations = [stack.addresses[2], stack.addresses[0]]
        await stack.engines[2].stop()
        answer = await stack.post("/v1/dead-engine")
        assert (answer.status, answer.json["endpoint"]) == (200, stack.addresses[0])

        stack.forget()
        await stack.workers[0].stop()
        for _ in range(10):
            assert (await stack.post()).json["headers"][POOL] == "main"
        assert len(stack.workers[1].seen) == 10

        in_flight = asyncio.create_task(stack.post("/v1/in-flight?wait=0.5"))
        await eventually(lambda: stack.workers[1].seen[10:] or None)
        await stack.workers[1].stop()
        assert (await in_flight).status == 200
        hosts = [
            {(await stack.post(headers={"x-session-id": f"s{n}"})).json["endpoint"] for _ in range(3)}
            for n in range(40)
        ]
        assert all(len(one) == 1 for one in hosts)
        assert set.union(*hosts) == set(stack.addresses[:2])


async def test_fail_closed_answers_503_in_json_without_a_sidecar() -> None:
    """With `fail_open: false` no request passes undecided."""
    async with running_stack(workers=0, fail_open=False) as stack:
        answer = await stack.post()
        assert (answer.status, answer.headers[REASON]) == (503, "sidecar_unavailable")
        assert answer.json["error"]["type"] == "service_unavailable"


@pytest.mark.parametrize("body_mode", ["buffered", "duplex"])
async def test_both_body_modes_fail_open_without_any_sidecar(body_mode: BodyMode) -> None:
    """Nobody took the request: Envoy still has it and sends it on."""
    async with running_stack(workers=0, fail_open=True, body_mode=body_mode) as stack:
        assert (await stack.post(body=b"{}")).status == 200


@pytest.mark.parametrize(("body_mode", "status"), [("buffered", 200), ("duplex", 503)])
async def test_a_sidecar_that_falls_silent_takes_only_duplex_requests_along(body_mode: BodyMode, status: int) -> None:
    """After `message_timeout_ms` a buffered request goes on; a duplex one has given its body away."""
    async with running_stack(workers=1, fail_open=True, body_mode=body_mode) as stack:
        stack.orders.silent = True
        assert (await stack.post(body=b"{}")).status == status


@pytest.mark.parametrize("size", [1, 200_000, 5_000_000])
async def test_duplex_streams_the_body_through_the_sidecar(duplex_stack: Stack, size: int) -> None:
    """FULL_DUPLEX_STREAMED, the Endpoint Picker Protocol's mode: the echoed body arrives whole at the pick."""
    duplex_stack.forget()
    duplex_stack.orders.destinations = [duplex_stack.addresses[2]]
    answer = await duplex_stack.post(body=b"x" * size)
    assert (answer.status, answer.json["endpoint"], answer.json["bytes"]) == (200, duplex_stack.addresses[2], size)
    assert duplex_stack.last_seen.duplex


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def duplex_stack() -> AsyncIterator[Stack]:
    """A stack in duplex mode."""
    async with running_stack(body_mode="duplex", fail_open=False) as running:
        yield running
