"""The keeper: its pages, what it tells Envoy, and its start and end in bad company."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2

from extproc import keeper
from extproc.envoy.discovery import SERVICE
from extproc.errors import ConfigError
from extproc.rollout.state import GROUP, decode_event, encode
from extproc.state.document_store import Document
from extproc.state.redis import RedisStore
from tests.ports import free_port
from tests.unit.fleet.rollout_parts import started
from tests.unit.top.parts import Running, command, config, document, free_sidecar, write
from tests.valkey import Valkey
from tests.waiting import until, until_async


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    """One store for all tests here."""
    with Valkey() as running:
        yield running


class Bench:
    """A running keeper, its pages and its discovery service."""

    def __init__(self, running: Running, content: dict[str, Any], http: aiohttp.ClientSession) -> None:
        self.running = running
        self.sidecar = content["gateway"]["sidecar"]
        self._http = http

    async def page(self, path: str) -> tuple[int, str]:
        """Status and text of an admin page; waits for the listener."""

        async def listens() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._http.get(f"http://{self.sidecar['admin']}/healthz"):
                    return True
            return False

        await until_async(listens)
        async with self._http.get(f"http://{self.sidecar['admin']}{path}") as answer:
            return answer.status, await answer.text()

    async def readiness(self) -> tuple[int, dict[str, Any]]:
        """What `/readyz` says."""
        async with self._http.get(f"http://{self.sidecar['admin']}/readyz") as answer:
            return answer.status, await answer.json()

    async def members(self, channel: grpc.aio.Channel, pool: str = "main") -> list[str]:
        """What Envoy is told of a pool."""
        fetch = channel.unary_unary(
            f"/{SERVICE}/FetchEndpoints",
            discovery_pb2.DiscoveryRequest.SerializeToString,
            discovery_pb2.DiscoveryResponse.FromString,
        )
        answer = await fetch(discovery_pb2.DiscoveryRequest(resource_names=[pool]))
        load = endpoint_pb2.ClusterLoadAssignment.FromString(answer.resources[0].value)
        return [
            f"{each.endpoint.address.socket_address.address}:{each.endpoint.address.socket_address.port_value}"
            for locality in load.endpoints
            for each in locality.lb_endpoints
        ]


@contextlib.asynccontextmanager
async def running(path: Path, content: dict[str, Any]) -> AsyncIterator[Bench]:
    """A keeper for a configuration."""
    await asyncio.to_thread(write, path, content)
    async with aiohttp.ClientSession() as http, command("keeper", "--config", str(path)) as child:
        yield Bench(child, content, http)
    assert "Traceback" not in child.text


async def test_pages_without_a_worker(tmp_path: Path, valkey: Valkey) -> None:
    """Alive but not ready; the metrics are the keeper's own, and the log says whose are missing."""
    content = document(redis={"url": valkey.url}, gateway=free_sidecar())
    async with running(tmp_path / "warmpath.yaml", content) as bench:
        assert await bench.page("/healthz") == (200, '{"status": "alive"}')
        status, told = await bench.readiness()
        assert (status, told["ready"]) == (503, False)
        assert (told["components"]["worker-0"], told["components"]["store"]) == ("down", "ok")
        status, text = await bench.page("/metrics")
        assert status == 200
        assert 'warmpath_build_info{process="keeper"' in text
        assert 'process="worker-0"' not in text
        (said,) = bench.running.said("a worker is missing from the metrics page")
        assert said["worker"] == "worker-0"
        assert (await bench.page("/nothing"))[0] == 404


async def test_pages_with_a_worker(tmp_path: Path, valkey: Valkey) -> None:
    """Ready, and one page for both processes."""
    path = tmp_path / "warmpath.yaml"
    content = document(redis={"url": valkey.url}, gateway=free_sidecar(socket_dir=str(tmp_path)))
    async with running(path, content) as bench, command("worker", "--config", str(path)):
        await bench.page("/healthz")

        async def ready() -> bool:
            return (await bench.readiness())[0] == 200

        await until_async(ready)
        assert (await bench.readiness())[1]["components"]["worker-0"] == "ok"
        _, text = await bench.page("/metrics")
        assert text.count("# TYPE warmpath_build_info gauge") == 1
        assert all(f'process="{name}"' in text for name in ("keeper", "worker-0"))


async def test_an_engine_that_is_gone_makes_engines_degraded(tmp_path: Path, valkey: Valkey) -> None:
    """After a few scrapes without a connection, readiness names the engines."""
    pools = {"main": {"endpoints": [f"127.0.0.1:{free_port()}"]}}
    content = document(redis={"url": valkey.url}, gateway=free_sidecar(), pools=pools, telemetry={"scrape_ms": 50})
    async with running(tmp_path / "warmpath.yaml", content) as bench:
        await bench.page("/healthz")

        async def degraded() -> bool:
            return bool((await bench.readiness())[1]["components"]["engines"] == "degraded")

        await until_async(degraded)


async def test_a_keeper_starts_without_its_store_and_finds_it_later(tmp_path: Path) -> None:
    """Envoy gets its endpoints and the pages answer while Redis is down; both say so, and recover."""
    port = free_port()
    content = document(redis={"url": f"redis://127.0.0.1:{port}"}, gateway=free_sidecar())
    async with running(tmp_path / "warmpath.yaml", content) as bench:
        await bench.page("/healthz")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{bench.sidecar['keeper_port']}") as channel:
            assert await bench.members(channel) == ["10.0.0.1:80"]
        assert (await bench.readiness())[1]["components"]["store"] == "down"
        with Valkey(port):

            async def whole() -> bool:
                return bool((await bench.readiness())[1]["components"]["store"] == "ok")

            await until_async(whole)


async def test_the_pages_answer_while_the_store_is_frozen(tmp_path: Path) -> None:
    """A store that takes connections and answers nothing holds up no page; readiness names it until it is back."""
    with Valkey() as frozen:
        content = document(redis={"url": frozen.url}, gateway=free_sidecar(), telemetry={"scrape_ms": 50})
        async with running(tmp_path / "warmpath.yaml", content) as bench:
            await bench.page("/healthz")
            assert (await bench.readiness())[1]["components"]["store"] == "ok"
            frozen.freeze()

            async def component(*words: str) -> bool:
                async with asyncio.timeout(20):
                    assert (await bench.page("/metrics"))[0] == 200
                    return (await bench.readiness())[1]["components"]["store"] in words

            await until_async(lambda: component("down", "slow"))
            frozen.thaw()
            await until_async(lambda: component("ok"))


async def test_members_are_known_before_envoy_can_ask() -> None:
    """A keeper that starts again must not take away the endpoints that Envoy has, not even for a moment."""
    parts = keeper.compose(config(redis={"url": "redis://127.0.0.1:1"}))
    await parts.membership.apply(config())
    keeper._tell_members(parts)
    assert [member.address for member in parts.roster.current()["main"]] == ["10.0.0.1:80"]
    await asyncio.gather(*(channel.close() for channel in parts.workers.values()))
    await parts.store.close()


async def test_the_first_answer_of_a_keeper_holds_every_member(tmp_path: Path, valkey: Valkey) -> None:
    """The same on a real keeper: whoever asks as soon as the socket is there gets the members."""
    content = document(redis={"url": valkey.url}, gateway=free_sidecar(socket_dir=str(tmp_path)))
    async with running(tmp_path / "warmpath.yaml", content) as bench:
        await until((tmp_path / "keeper.sock").exists)
        while True:
            async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'keeper.sock'}") as channel:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await bench.members(channel) == ["10.0.0.1:80"]
                    break


async def test_a_changed_file_reaches_envoy(tmp_path: Path, valkey: Valkey) -> None:
    """A new endpoint is in the next answer, a new level of logs in use; a broken file changes nothing and is said."""
    path = tmp_path / "warmpath.yaml"
    content = document(redis={"url": valkey.url}, gateway=free_sidecar(), telemetry={"log_level": "warning"})
    async with running(path, content) as bench:
        await bench.page("/healthz")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{bench.sidecar['keeper_port']}") as channel:
            await asyncio.to_thread(path.write_text, "models: {")
            refused = "the changed configuration is refused, the old one stays"
            await until(lambda: bool(bench.running.said(refused)))
            assert await bench.members(channel) == ["10.0.0.1:80"]
            changes = {"pools": {"main": {"endpoints": ["10.0.0.5:80"]}}, "telemetry": {"log_level": "info"}}
            await asyncio.to_thread(write, path, content | changes)

            async def changed() -> bool:
                return await bench.members(channel) == ["10.0.0.5:80"]

            await until_async(changed)
            assert not bench.running.said("keeper is ready")
            await until(lambda: bool(bench.running.said("the changed configuration is in use")))


@pytest.mark.parametrize(("key", "setting"), [("admin", "gateway.sidecar.admin"), ("keeper_port", "gateway.sidecar")])
async def test_a_taken_address_is_named(tmp_path: Path, valkey: Valkey, key: str, setting: str) -> None:
    """The process ends with the code of a wrong configuration, and one line that names address and setting."""
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        port: int = occupant.getsockname()[1]
        sidecar: dict[str, Any] = {key: port if key == "keeper_port" else f"127.0.0.1:{port}"}
        content = document(redis={"url": valkey.url}, gateway=free_sidecar(**sidecar))
        path = await asyncio.to_thread(write, tmp_path / "warmpath.yaml", content)
        async with command("keeper", "--config", str(path)) as child:
            assert await child.child.wait() == 2
    told = [line for line in child.lines if line.startswith("warmpath: ")]
    assert len(told) == 1
    assert told[0].startswith(f"warmpath: cannot listen on 127.0.0.1:{port}: ")
    assert told[0].endswith(f"see {setting}")
    assert "Traceback" not in child.text


async def test_a_keeper_ends_cleanly(tmp_path: Path, valkey: Valkey) -> None:
    """SIGTERM: exit code 0, its socket is gone, no complaint on the way."""
    content = document(redis={"url": valkey.url}, gateway=free_sidecar(socket_dir=str(tmp_path)))
    async with running(tmp_path / "warmpath.yaml", content) as bench:
        await bench.page("/metrics")
        await until(lambda: bool(bench.running.said("keeper is ready")))
        assert await bench.running.child.stop() == 0
        assert not await asyncio.to_thread((tmp_path / "keeper.sock").exists)


def test_without_a_store_the_remedy_is_told() -> None:
    """As for a worker."""
    with pytest.raises(ConfigError, match=r"redis\.url is missing"):
        keeper.compose(config())


async def test_a_rollout_goes_on_and_shows_on_the_page(tmp_path: Path, valkey: Valkey) -> None:
    """Step by step to its end, with nobody's help."""
    store = RedisStore(valkey.url, 10_000.0, "rolling")
    await store.ping()
    rollout = started((await store.documents(GROUP)).now, hold_s=0.1, retire_after_s=0.1)
    await store.put_document(GROUP, "m", Document(1, encode(rollout)))
    versions = {"one": {"pool": "main", "weight": 1}, "two": {"pool": "canary"}}
    content = document(
        models={"m": {"versions": versions}},
        pools={"main": {"endpoints": ["127.0.0.1:1"]}, "canary": {"endpoints": ["127.0.0.1:2"]}},
        redis={"url": valkey.url, "key_prefix": "rolling"},
        gateway=free_sidecar(),
    )
    async with running(tmp_path / "warmpath.yaml", content) as bench:

        async def retired() -> bool:
            _, text = await bench.page("/metrics")
            return 'warmpath_rollout_phase{process="keeper",model="m",phase="retired"} 1.0' in text

        await until_async(retired)
    lines = await store.records(GROUP, "m", 100)
    assert [decode_event(line.payload).what for line in reversed(lines)][-1] == "retired"
    await store.close()
