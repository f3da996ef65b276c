"""`warmpath rollout` as a client of the operator API, and whole, on a real keeper with a real store."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web

from extproc import rollout_client, rollout_command
from extproc._pb.warmpath.v1 import rollouts_pb2 as pb
from extproc.cli import main
from extproc.errors import ConfigError, WarmpathError
from tests.ports import free_port
from tests.unit.admin.served import Api, serving
from tests.unit.admin.stage import stage
from tests.unit.top.parts import command, config, document, free_sidecar, write
from tests.valkey import Valkey
from tests.waiting import until_async

TOKEN = "0123456789abcdef"  # noqa: S105 -- of these tests
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def ran(*arguments: str) -> tuple[int, str, str]:
        code = main(["rollout", *arguments])
        told = capsys.readouterr()
        return code, told.out, told.err

    return ran


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """A listener over a stage."""
    async with serving(await stage()) as served:
        yield served


def url_of(api: Api) -> str:
    """What `--url` takes."""
    return api.url.removesuffix("/v1/rollouts")


async def test_every_action_asks_for_what_it_says(
    api: Api, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From start to the audit log, with no configuration on this host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGNAME", "ann")

    async def told(*arguments: str) -> str:
        code, out, err = await asyncio.to_thread(run, *arguments, "--url", url_of(api))
        assert (code, err) == (0, "")
        return out

    options = ["--steps", "10%, 50,100", "--hold", "5", "--settle", "1", "--min-samples", "7", "--on-failure", "pause"]
    more = ["--false-alarms", "0.02", "--retire-after", "9", "--require-verdict", "--set", "gates.ttft.tolerance=0.25"]
    assert "dry run" in await told("start", "chat", "--to", "v2", *options, *more, "--dry-run")
    assert "has started" in await told("start", "gpt", "--to", "v2", *options, *more)
    [kept] = (await api.get("/chat"))[1]["statuses"]
    plan = kept["rollout"]["plan"]
    assert (plan["steps"], plan["hold_s"], plan["settle_s"], plan["min_samples"]) == ([0.1, 0.5, 1.0], 5.0, 1.0, 7)
    assert (plan["on_failure"], plan["false_alarms"], plan["retire_after_s"]) == ("pause", 0.02, 9.0)
    assert (plan["require_verdict"], plan["gates"]["ttft"]["tolerance"]) == (True, 0.25)
    assert "is paused" in await told("pause", "chat", "--text", "lunch")
    assert "is running" in await told("resume", "chat")
    assert "verdict on step 1: pass" in await told("verdict", "chat", "pass", "--step", "1", "--rollout", "r2")
    assert "version v2 has 50 %" in await told("promote", "chat")
    assert "version v2 has 100 %" in await told("promote", "chat", "--full")
    assert "step 3 of 3" in await told("status")
    assert json.loads(await told("status", "chat", "--json"))["statuses"][0]["rollout"]["share"] == 1.0
    assert "was aborted" in await told("abort", "chat", "--text", "slow")
    log = await told("history", "chat", "--limit", "2")
    assert log.splitlines()[0].endswith("aborted by ann, 0 %: slow")
    assert await told("forget", "chat") == "rollout r2 of model chat is forgotten: the weights of warmpath.yaml hold\n"
    assert "no rollout as yet" in await told("status", "chat")
    assert len([line for line in log.splitlines() if " by " in line]) == 2


async def test_a_step_is_promoted_that_was_seen(
    api: Api, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, the step that stands when the command looks; when the controller was faster, nothing is done."""
    monkeypatch.chdir(tmp_path)
    ask = rollout_client.Client.ask
    await api.post("/chat/start", {"to": "v2", "overrides": {"steps": [10, 50, 100]}})

    def slow(client: rollout_client.Client, method: str, path: Any, *rest: Any, **more: Any) -> bytes:
        if method == "POST":
            ask(client, "POST", ("chat", "promote"), {})
        return ask(client, method, path, *rest, **more)

    url = ["--url", url_of(api)]
    code, _, err = await asyncio.to_thread(run, "promote", "chat", "--step", "2", *url)
    assert (code, "is at step 1 and running by now" in err) == (1, True)
    with monkeypatch.context() as patched:
        patched.setattr(rollout_client.Client, "ask", slow)
        code, _, err = await asyncio.to_thread(run, "promote", "chat", *url)
    assert (code, "is at step 2 and running by now" in err) == (1, True)
    assert (await asyncio.to_thread(run, "promote", "chat", "--step", "2", *url))[0] == 0
    assert (await api.get("/chat"))[1]["statuses"][0]["rollout"]["step"] == 2


async def test_watching_ends_with_the_rollout(
    api: Api, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit code 1 when the new version was given up: a script can wait for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rollout_command, "_EVERY_S", 0.01)
    watch = ["status", "chat", "--watch", "--url", url_of(api)]
    await api.post("/chat/start", {"to": "v2"})
    waiting = asyncio.create_task(asyncio.to_thread(run, *watch))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await api.post("/chat/abort")
    code, out, _ = await waiting
    assert code == 1
    assert out.count("is running") >= 1
    assert out.count("was aborted") == 1
    await api.post("/chat/start", {"to": "v2"})
    for _ in range(5):
        await api.post("/chat/promote", {"full": True})
    assert (await asyncio.to_thread(run, *watch))[0] == 0


async def test_the_keepers_own_words_are_passed_on(
    api: Api, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, exit code 1."""
    monkeypatch.chdir(tmp_path)
    code, out, err = await asyncio.to_thread(run, "start", "chat", "--to", "v9", "--url", url_of(api))
    assert (code, out) == (1, "")
    assert err == "warmpath: model `chat` has no version `v9`: did you mean `v2`?\n"


async def test_a_token_is_shown_to_who_asks_for_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file that is named, or that of the configuration; without it the answer says what is wanted."""
    monkeypatch.chdir(tmp_path)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with serving(await stage(), token=token) as api:
        url = ["--url", url_of(api)]
        code, _, err = await asyncio.to_thread(run, "status", *url)
        assert (code, "wants `authorization: Bearer TOKEN`" in err) == (1, True)
        assert (await asyncio.to_thread(run, "status", *url, "--token-file", str(token)))[0] == 0
        sidecar = {"admin": url[1].removeprefix("http://"), "admin_token": str(token)}
        write(tmp_path / "warmpath.yaml", document(gateway={"sidecar": sidecar}))
        assert (await asyncio.to_thread(run, "status"))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["start", "m", "--to", "v2", "--steps", "a"], "--steps a: write percents"),
        (["start", "m", "--to", "v2", "--set", "hold_s"], "--set hold_s: write it as key=value"),
        (["start", "m", "--to", "v2", "--set", "gates..x=1"], "--set gates..x=1: write it as key=value"),
        (["start", "m", "--to", "v2", "--set", "hold_s=[1"], "--set hold_s: the value is not valid YAML"),
        (["start", "m", "--to", "v2", "--set", "gates=1", "--set", "gates.ttft.tolerance=1"], "has a value of its own"),
        (["start", "m", "--to", "v2", "--set", "nothing.x=1"], "--set nothing.x: there is no section"),
        (["verdict", "m", "pass", "--step", "0"], "--step 0: steps are counted from 1"),
        (["promote", "m", "--step", "0"], "--step 0: steps are counted from 1"),
        (["status", "--url", "ftp://x"], "--url: write it as http://HOST:PORT"),
        (["status", "--url", "http://user:pw@x:1"], "--url: write it as"),
        (["status", "--url", "http://x:1/path"], "--url: write it as"),
        (["status", "--url", "http://x:99999"], "--url: write it as"),
        (["status", "--url", "http://[x"], "--url: write it as"),
        (["status", "--url", "http://no such host:1"], "--url: write it as"),
        (["status", "--url", "http://x\x7f:1"], "--url: write it as"),
        (["status", "--token-file", "/none"], "admin_token: /none: cannot be read"),
        (["status", "\udcff"], "MODEL: not UTF-8 text"),
        (["status", "--config", "/none"], "/none: cannot be read"),
    ],
)
def test_wrong_use_is_told_before_anybody_is_asked(run: Run, tmp_path: Path, arguments: list[str], told: str) -> None:
    """Exit code 2, one line with the option and the remedy."""
    path = write(tmp_path / "warmpath.yaml", document())
    more = [] if "--config" in arguments else ["--config", str(path)]
    code, out, err = run(*arguments, *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_a_keeper_that_does_not_run_is_named() -> None:
    """Address, reason, and what to do."""
    settings = config(gateway={"sidecar": {"admin": f"0.0.0.0:{free_port()}"}})
    with pytest.raises(WarmpathError, match=r"http://127\.0\.0\.1:\d+ does not answer .*refused.*warmpath serve"):
        rollout_client.client_of(settings, None, None).ask("GET", ())


@pytest.mark.parametrize(
    "answer",
    [b"hello", b"HTTP/1.1 500 x\r\ncontent-length: 2\r\n\r\n[]", b"HTTP/1.1 302 x\r\nlocation: http://x\r\n\r\n"],
)
async def test_something_else_that_listens_there_is_told(answer: bytes) -> None:
    """No traceback, and nobody is followed elsewhere."""

    async def answers(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = rollout_client.Client(f"http://127.0.0.1:{port}", TOKEN, "ann")
        with pytest.raises(WarmpathError) as caught:
            await asyncio.to_thread(client.ask, "GET", ("chat",))
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
def test_a_name_that_cannot_be_one_is_told(host: str) -> None:
    """Resolvers refuse it, each in its own way."""
    with pytest.raises(WarmpathError, match="does not answer"):
        rollout_client.client_of(config(), f"http://{host}:1", None).ask("GET", ())


def test_a_url_without_a_port_or_with_tls_is_one() -> None:
    """A proxy in front of the keeper may stand at the usual ports."""
    for url in ("http://keeper.internal", "https://keeper.internal/"):
        assert rollout_client.client_of(config(), url, None).url == url.rstrip("/")
    with pytest.raises(ConfigError):
        rollout_client.client_of(config(), "keeper:9103", None)


async def engine(names: list[str]) -> AsyncIterator[str]:
    """A page that lists these models as vLLM does, and its numbers."""
    app = web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name, "owned_by": "vllm"} for name in names]})

    async def metrics(_: web.Request) -> web.Response:
        text = "# TYPE vllm:num_requests_running gauge\n" + "".join(
            f'vllm:{name}{{engine="0",model_name="chat"}} 0.0\n'
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )
        return web.Response(text=text)

    app.add_routes([web.get("/v1/models", models), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_rollout_on_a_real_keeper(run: Run, tmp_path: Path) -> None:
    """What keepers read of real pages lets a version start or not; the controller takes over what was started."""
    old, new, other = (engine(["chat"]), engine(["chat"]), engine(["other"]))
    pools: dict[str, Any] = {}
    for name, each in (("old", old), ("new", new), ("other", other)):
        pools[name] = {"endpoints": [await anext(each)]}
    down = {"endpoints": [f"127.0.0.1:{free_port()}"]}
    versions = {
        "v1": {"pool": "old", "weight": 1},
        "v2": {"pool": "new"},
        "v3": {"pool": "other"},
        "v4": {"pool": "down"},
    }
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with Valkey() as valkey:
        content = document(
            models={"chat": {"versions": versions}},
            pools={**pools, "down": down},
            redis={"url": valkey.url},
            gateway=free_sidecar(admin_token=str(token)),
            telemetry={"scrape_ms": 50},
        )
        path = await asyncio.to_thread(write, tmp_path / "warmpath.yaml", content)

        async def told(*arguments: str) -> tuple[int, str]:
            code, out, err = await asyncio.to_thread(run, *arguments, "--config", str(path))
            return code, out + err

        async with command("keeper", "--config", str(path)) as keeper:

            async def can_start() -> bool:
                return (await told("start", "chat", "--to", "v2", "--dry-run"))[0] == 0

            await until_async(can_start)

            async def is_known_to_lack_it() -> bool:
                return "model `chat` is not listed by" in (await told("start", "chat", "--to", "v3"))[1]

            await until_async(is_known_to_lack_it)

            async def is_known_to_be_down() -> bool:
                return "cannot be reached" in (await told("start", "chat", "--to", "v4"))[1]

            await until_async(is_known_to_be_down)
            start = [
                "start",
                "chat",
                "--to",
                "v2",
                "--steps",
                "20,100",
                "--hold",
                "0",
                "--settle",
                "0",
                "--min-samples",
                "0",
            ]
            assert (await told(*start))[0] == 0

            port = content["gateway"]["sidecar"]["keeper_port"]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call: Any = channel.unary_unary(
                    "/warmpath.v1.Rollouts/Status", pb.StatusRequest.SerializeToString, pb.StatusReply.FromString
                )
                reply = await call(pb.StatusRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),))
                assert [each.rollout.canary for each in reply.statuses] == ["v2"]
                with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                    await call(pb.StatusRequest())

            async def promoted() -> bool:
                return "is promoted: version v2 has all new conversations" in (await told("status"))[1]

            await until_async(promoted)
            code, log = await told("history", "chat")
            assert code == 0
            assert [line.split("  ")[2].split(",")[0] for line in log.splitlines() if " by " in line][::-1] == [
                f"started by {rollout_client._user() or 'operator'}",
                "step by controller",
                "promoted by controller",
            ]
            assert "is promoted: abort it first" in (await told("forget", "chat"))[1]
            assert "is over" in (await told("promote", "chat"))[1]
            assert "says otherwise" in (await told("forget", "chat"))[1]
            assert "is forgotten" in (await told("forget", "chat", "--force"))[1]
            await asyncio.sleep(1.5)  # rounds of the keeper, which remembers what was before
            assert "no rollout as yet" in (await told("status", "chat"))[1]
        assert TOKEN not in keeper.text
        assert "Traceback" not in keeper.text
    for each in (old, new, other):
        await each.aclose()  # type: ignore[attr-defined]
