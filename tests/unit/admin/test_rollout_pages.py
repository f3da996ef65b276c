"""The operator API over HTTP, on a real listener."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from extproc.admin.rollout_pages import MOST_BODY
from extproc.admin.rollouts import RolloutCalls
from extproc.admin.values import Start
from extproc.errors import StoreError
from tests.unit.admin.served import JSON, serving
from tests.unit.admin.stage import POOLS, config, stage

TOKEN = "0123456789abcdef"  # noqa: S105 -- of these tests
PAUSE = (
    b"POST /v1/rollouts/chat/pause HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    b"content-type: application/json\r\n"
)
CHANGES = ["start", "promote", "pause", "resume", "abort", "verdict"]


async def test_a_rollout_from_start_to_abort() -> None:
    """Each call on its page; a body may be left out where nothing is to be said."""
    async with serving(await stage()) as api:
        status, told = await api.post(
            "/chat/start", {"to": "v2", "overrides": {"steps": [10, 100]}}, {**JSON, "x-warmpath-operator": "ann"}
        )
        assert (status, told["rollout"]["share"], told["dry_run"]) == (200, 0.1, False)
        assert (await api.post("/chat/pause", {"text": "look"}))[1]["event"]["text"] == "look"
        assert (await api.post("/chat/resume"))[0] == 200
        assert (await api.post("/chat/verdict", {"verdict": "pass", "step": 0}))[0] == 200
        status, told = await api.get("/chat")
        assert (status, told["statuses"][0]["rollout"]["verdict"]) == (200, "pass")
        assert (await api.post("/chat/promote", {"full": True}))[1]["rollout"]["share"] == 1.0
        assert (await api.post("/chat/abort", {}))[1]["rollout"]["phase"] == "aborted"
        status, told = await api.get("/chat/history?limit=2")
        assert (status, [each["event"]["what"] for each in told["events"]]) == (200, ["aborted", "step"])
        assert (await api.get(f"/chat/history?before={told['events'][-1]['id']}"))[1]["events"][-1]["event"][
            "by"
        ] == "ann"
        assert [each["model"] for each in (await api.get())[1]["statuses"]] == ["chat"]


async def test_a_model_may_have_any_name() -> None:
    """One part of the path is one name, whatever letters it has."""
    name = "Qwen/Qwen3 é?%2F"
    versions = {"v1": {"pool": "old", "weight": 1}, "v2": {"pool": "new", "served_as": "chat"}}
    at = await stage(config(models={name: {"versions": versions}}))
    path = "/Qwen%2FQwen3%20%C3%A9%3F%252F"
    async with serving(at) as api:
        assert (await api.post(f"{path}/start", {"to": "v2"}))[1]["rollout"]["model"] == name
        assert (await api.get(path))[1]["statuses"][0]["model"] == name


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/nobody/start", {"to": "v2"}, 404, "no model `nobody`"),
        ("/chat/start", {"to": "v9"}, 404, "has no version `v9`"),
        ("/chat/start", {}, 400, "missing required field `to`"),
        ("/chat/start", {"to": "v2", "dryrun": True}, 400, "unknown field `dryrun`"),
        ("/chat/start", {"to": 2}, 400, "Expected `str`"),
        ("/chat/start", {"to": "v2", "overrides": {"hold": 1}}, 400, "did you mean `hold_s`"),
        ("/chat/start", [], 400, "Expected `object`"),
        ("/chat/start", b"{", 400, "truncated"),
        ("/chat/start", b'{"to": "\xff"}', 400, "the body"),
        ("/chat/start", b'{"to": "v2", "overrides": {"steps": ' + b"[" * 20_000, 400, "nested too deeply"),
        ("/chat/start", b'{"to": "v2", "overrides": {"hold_s": 1e999}}', 400, "the body"),
        ("/chat/pause", {"text": "x" * 1001}, 400, "length <= 1000"),
        ("/chat/pause", {}, 404, "has no rollout"),
        ("/chat/verdict", {"verdict": "maybe"}, 400, "Invalid enum value"),
        ("/chat/verdict", {"verdict": "pass", "step": -1}, 400, ">= 0"),
        ("/chat/pause?force=1", {}, 400, "parameter `force` of the URL"),
        ("/chat/pause", b" " * (MOST_BODY + 1), 413, "longer than 65536 bytes"),
    ],
)
async def test_each_refusal_has_its_status_and_a_text(path: str, body: object, status: int, reason: str) -> None:
    """As an error of the gateway is written, and nothing was changed."""
    at = await stage()
    async with serving(at) as api:
        found, told = await api.post(path, body)
    assert (found, reason in told["error"]["message"]) == (status, True), told
    assert (await at.kept()).found == {}


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "limit=-1", "limit=1e3", "limit=1&limit=2", "before=x", "after=1"]
)
async def test_parameters_of_the_url_are_checked(query: str) -> None:
    """Wrong values, repeated and unknown ones."""
    async with serving(await stage()) as api:
        assert (await api.get(f"/chat/history?{query}"))[0] == 400


async def test_the_store_away_is_503() -> None:
    """Not an error of this host, and worth another try."""

    class Away:
        async def documents(self, _group: str) -> None:
            raise StoreError("away")

    at = await stage()
    calls = RolloutCalls(Away(), lambda: at.config, lambda: POOLS, dict, str)  # type: ignore[arg-type]
    async with serving(at, calls) as api:
        status, told = await api.get("/chat")
        assert (status, told["error"]["message"]) == (503, "away")


async def test_only_post_changes() -> None:
    """A link, an image or a form cannot: pages that change something want POST, and JSON."""
    async with serving(await stage()) as api:
        for name in CHANGES:
            async with api.http.get(f"{api.url}/chat/{name}") as answer:
                assert answer.status == 405
            form = {"content-type": "application/x-www-form-urlencoded"}
            assert (await api.post(f"/chat/{name}", {"to": "v2", "verdict": "pass"}, form))[0] == 403
        assert (await api.at.kept()).found == {}


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}, {"via": "1.1 x"}],
)
async def test_a_web_page_on_this_host_reads_and_changes_nothing(headers: dict[str, str]) -> None:
    """Without a token, whoever a browser or a proxy speaks for is not on this host."""
    async with serving(await stage()) as api:
        for name in CHANGES:
            status, told = await api.post(f"/chat/{name}", {"to": "v2", "verdict": "pass"}, {**JSON, **headers})
            assert (status, told["error"]["type"]) == (403, "permission_error")
        for path in ("", "/chat", "/chat/history"):
            assert (await api.get(path, **headers))[0] == 403
        assert (await api.at.kept()).found == {}


async def test_with_a_token_every_page_wants_it(tmp_path: Path) -> None:
    """Those that only read too; before anything of the request is looked at."""
    (tmp_path / "token").write_text(TOKEN)
    async with serving(await stage(), token=tmp_path / "token") as api:
        for wrong in ({}, {"authorization": "Bearer 0123456789abcdeg"}):
            for name in CHANGES:
                assert (await api.post(f"/nobody/{name}", b"{", {**JSON, **wrong}))[0] == 401
            for path in ("", "/nobody", "/nobody/history?limit=x"):
                assert (await api.get(path, **wrong))[0] == 401
        right = {"authorization": f"Bearer {TOKEN}"}
        assert (await api.post("/chat/start", {"to": "v2"}, right))[0] == 200
        assert (await api.get(**right))[0] == 200
        async with api.http.get(api.url) as answer:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-warmpath-reason"] == "unauthorized"
            assert answer.headers["cache-control"] == "no-store"
            assert TOKEN not in await answer.text()


async def test_two_tokens_are_none(tmp_path: Path) -> None:
    """Headers that are sent twice could be read one way here and another way elsewhere."""
    (tmp_path / "token").write_text(TOKEN)
    async with serving(await stage(), token=tmp_path / "token") as api:
        both = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")]
        async with api.http.get(api.url, headers=both) as answer:
            assert answer.status == 401


async def test_a_body_that_never_ends_is_cut_off() -> None:
    """By its size, however it is sent."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 4096
            await asyncio.sleep(0)

    async with serving(await stage()) as api:
        with contextlib.suppress(aiohttp.ClientError):
            async with api.http.post(f"{api.url}/chat/pause", data=endless(), headers=JSON) as answer:
                assert answer.status == 413


@pytest.mark.parametrize(
    "sent",
    [
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope",
        b"content-encoding: deflate\r\ncontent-length: 6\r\n\r\nnopeno",
        b"content-encoding: br\r\ncontent-length: 2\r\n\r\n{}",
    ],
)
async def test_a_body_that_is_not_what_its_headers_say_is_refused(sent: bytes) -> None:
    """With 400, and nothing is changed."""
    at = await stage()
    await at.calls.start("chat", Start(to="v2"), "ann")
    async with serving(at) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(api.url).port)
        writer.write(PAUSE + sent)
        answer = await reader.read()
        writer.close()
        assert answer.split(b" ", 2)[1] == b"400", answer
        assert (await api.get("/chat"))[1]["statuses"][0]["rollout"]["phase"] == "running"


async def test_a_client_that_leaves_in_the_middle_of_its_body_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """And is no fault of the page."""
    at = await stage()
    await at.calls.start("chat", Start(to="v2"), "ann")
    async with serving(at) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(api.url).port)
        writer.write(PAUSE + b"content-length: 5\r\n\r\n{}")
        writer.write_eof()
        await reader.read()
        writer.close()
        assert (await api.get("/chat"))[1]["statuses"][0]["rollout"]["phase"] == "running"
    assert "Error handling request" not in caplog.text


async def test_a_small_body_that_unpacks_to_a_large_one_is_cut_off() -> None:
    """64 KiB are counted after unpacking."""
    async with serving(await stage()) as api:
        packed = {**JSON, "content-encoding": "gzip"}
        assert (await api.post("/chat/pause", gzip.compress(b" " * 5_000_000), packed))[0] == 413


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = st.sampled_from(["to", "overrides", "dry_run", "text", "rollout", "verdict", "step", "full"])
_BODIES = st.binary(max_size=60) | st.dictionaries(_FIELDS | st.text(max_size=4), _VALUES, max_size=4).map(
    lambda found: json.dumps(found).encode()
)


async def test_any_body_on_any_page_is_answered_by_an_error_or_done() -> None:
    """Nothing that is sent breaks a page: its status is one of those that are documented, its body JSON."""
    seen: set[int] = set()

    async def tried(name: str, body: bytes) -> None:
        async with serving(await stage()) as api:
            seen.add((await api.post(f"/chat/{name}", body))[0])

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(CHANGES), _BODIES)
    def look(name: str, body: bytes) -> None:
        asyncio.run(tried(name, body))

    await asyncio.to_thread(look)
    assert seen <= {200, 400, 404, 409, 413}
    assert 400 in seen
