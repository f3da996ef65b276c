"""One worker: how it is composed, and how a real one lives without its store."""

import json
import signal
from pathlib import Path

import msgspec
import pytest

from extproc import inner, worker
from extproc.clock import ManualClock
from extproc.envoy.contract import Call
from extproc.errors import ConfigError, NoEndpointError
from extproc.rollout.state import GROUP, encode
from extproc.router import Router
from extproc.state import feed
from extproc.state.document_store import Document
from extproc.state.feed import Held
from extproc.state.redis import RedisStore
from tests.ports import free_port
from tests.unit.fleet.rollout_parts import started
from tests.unit.top.parts import command, config, document, free_sidecar, write
from tests.valkey import Valkey
from tests.waiting import until, until_async


def test_without_a_store_the_remedy_is_told() -> None:
    """A worker cannot share what it has nowhere to share."""
    with pytest.raises(ConfigError, match=r"redis\.url is missing"):
        worker.compose(config())


def test_a_broken_url_does_not_show_its_password() -> None:
    """redis-py's own complaint quotes the part of the URL it stumbled over."""
    with pytest.raises(ConfigError) as caught:
        worker.compose(config(redis={"url": "redis://:hunter/2@h"}))
    assert "hunter" not in str(caught.value)


async def test_the_parts_know_one_another() -> None:
    """Nothing is connected yet, so there is nobody to serve; a page can be made all the same."""
    parts = worker.compose(config(redis={"url": "redis://127.0.0.1:1"}, routing={"block_tokens": 32}))
    assert parts.around.knowledge["main"].block_bytes == 32 * 4
    assert parts.around.store is parts.store
    ids = {parts.around.new_charge_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(each.startswith(f"{parts.around.replica}-") for each in ids)
    assert worker.compose(config(redis={"url": "redis://127.0.0.1:1"})).around.replica != parts.around.replica
    assert b"warmpath_build_info" in parts.showing.page()
    await parts.store.close()


async def test_an_empty_fleet_refuses_with_a_reason() -> None:
    """Names that could not be resolved leave a pool without members: 503, not a crash."""
    parts = worker.compose(config(redis={"url": "redis://127.0.0.1:1"}))
    settings = config(pools={"main": {"endpoints": ["no-such-host.invalid:80"]}})
    await parts.upkeep.apply(settings)
    router = Router(parts.around, parts.gossip, parts.showing, ManualClock())
    with pytest.raises(NoEndpointError):
        await router.decide(Call("POST", "/v1/chat/completions", {}, b'{"model": "m", "messages": []}'))
    await parts.store.close()


async def test_a_worker_starts_serves_and_stops_without_its_store(tmp_path: Path) -> None:
    """Redis is down at the start: ready all the same, degraded, whole again once Redis is there, and a clean end."""
    port = free_port()
    gateway = free_sidecar(socket_dir=str(tmp_path))
    redis = {"url": f"redis://:hunter2@127.0.0.1:{port}/0"}
    path = write(tmp_path / "warmpath.yaml", document(redis=redis, gateway=gateway))
    async with (
        command("worker", "--config", str(path)) as running,
        inner.channel(f"unix:{tmp_path / 'worker-0.sock'}") as channel,
    ):
        await until_async(lambda: inner.is_ready(channel))
        assert b'warmpath_store_degraded{pool="main"} 1.0' in await inner.read_page(channel)
        with Valkey(port, "--requirepass", "hunter2"):

            async def whole() -> bool:
                return b'warmpath_store_degraded{pool="main"} 0.0' in await inner.read_page(channel)

            await until_async(whole)
        # And it goes again, for good: the end must not wait for it.
        running.child.send(signal.SIGTERM)
        assert await running.child.wait() == 0, running.text
    assert "Traceback" not in running.text
    assert "hunter2" not in running.text
    assert not (tmp_path / "worker-0.sock").exists()


async def test_a_worker_is_ready_when_it_knows_what_the_others_do(tmp_path: Path) -> None:
    """It reads what the feed has before it says so; who asks earlier is told that it is not ready."""
    gateway = free_sidecar(socket_dir=str(tmp_path))
    with Valkey() as valkey:
        store = RedisStore(valkey.url, 10_000.0)
        await store.ping()
        for number in range(2000):
            told = Held("10.0.0.1:80", feed.pack(range(100 * number, 100 * number + 100)))
            await store.append("main", feed.encode("other", [told], number + 1), 20_000)
        path = write(tmp_path / "warmpath.yaml", document(redis={"url": valkey.url}, gateway=gateway))
        async with (
            command("worker", "--config", str(path)) as running,
            inner.channel(f"unix:{tmp_path / 'worker-0.sock'}") as channel,
        ):
            await until_async(lambda: inner.is_ready(channel))
            await until(lambda: bool(running.said("worker is ready")))
            assert [line["caught_up"] for line in running.said("worker is ready")] == [True]
        await store.close()


async def test_a_worker_is_ready_when_it_knows_the_rollouts_that_run(tmp_path: Path) -> None:
    """It never sends anything by the file's weights while a rollout has others; and it follows what comes next."""
    versions = {"one": {"pool": "main", "weight": 1}, "two": {"pool": "canary"}}
    pools = {"main": {"endpoints": ["10.0.0.1:80"]}, "canary": {"endpoints": ["10.0.0.2:80"]}}
    gateway = free_sidecar(socket_dir=str(tmp_path))
    with Valkey() as valkey:
        store = RedisStore(valkey.url, 10_000.0)
        await store.ping()
        rollout = started((await store.documents(GROUP)).now)
        await store.put_document(GROUP, "m", Document(1, encode(rollout)))
        content = document(
            models={"m": {"versions": versions}}, pools=pools, redis={"url": valkey.url}, gateway=gateway
        )
        path = write(tmp_path / "warmpath.yaml", content)
        async with (
            command("worker", "--config", str(path)) as running,
            inner.channel(f"unix:{tmp_path / 'worker-0.sock'}") as channel,
        ):

            async def shows(share: float) -> bool:
                line = f'warmpath_version_share{{model="m",version="two"}} {share}'
                return line.encode() in await inner.read_page(channel)

            await until(lambda: bool(running.said("worker is ready")))
            assert await shows(0.05)
            further = msgspec.structs.replace(rollout, step=1, share=0.25)
            await store.put_document(GROUP, "m", Document(2, encode(further)))
            await until_async(lambda: shows(0.25))
        await store.close()
        said = [line["message"] for line in map(json.loads, running.lines) if "message" in line]
        assert said.index("a rollout is followed") < said.index("worker is ready")


async def test_a_worker_follows_its_file(tmp_path: Path) -> None:
    """Endpoints and the level of logs change while it runs; a broken file changes nothing and is said."""
    gateway = free_sidecar(socket_dir=str(tmp_path))
    base = document(redis={"url": f"redis://127.0.0.1:{free_port()}"}, gateway=gateway)
    path = write(tmp_path / "warmpath.yaml", base | {"telemetry": {"log_level": "warning"}})
    async with (
        command("worker", "--config", str(path)) as running,
        inner.channel(f"unix:{tmp_path / 'worker-0.sock'}") as channel,
    ):

        async def shows(endpoint: str) -> bool:
            return endpoint.encode() in await inner.read_page(channel)

        await until_async(lambda: inner.is_ready(channel))
        assert await shows("10.0.0.1:80")
        path.write_text("models: {")
        await until(lambda: bool(running.said("the changed configuration is refused, the old one stays")))
        assert await shows("10.0.0.1:80")
        write(path, base | {"pools": {"main": {"endpoints": ["10.0.0.2:80"]}}, "telemetry": {"log_level": "info"}})
        await until_async(lambda: shows("10.0.0.2:80"))
        assert not await shows("10.0.0.1:80")
        assert not running.said("worker is ready")
        await until(lambda: bool(running.said("the changed configuration is in use")))
