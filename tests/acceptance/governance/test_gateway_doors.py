"""Who comes in, on a real stack: TLS, API keys with two workers, certificates and keys that change while it runs."""

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from extproc import key_command
from extproc.envoy import api_keys
from extproc.errors import StackError
from extproc.stack import Stack, StackSettings
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, Answer, Local, ask, chat_body, configuration, running, simulated, write
from tests.certificates import Authority
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 2


class Doors:
    """A stack that speaks TLS and asks for keys, and a client that trusts it."""

    def __init__(self, local: Local, folder: Path, authority: Authority) -> None:
        self.local = local
        self.keys = folder / "keys"
        self.authority = authority
        self.folder = folder

    def new_key(self, client: str) -> str:
        """Make a key as an operator does."""
        return key_command.make(client, self.keys).splitlines()[0].removeprefix("key:").strip()

    async def ask(self, key: str = "", path: str = CHAT, method: str = "POST") -> Answer:
        """Send a request on a connection of its own, as OpenAI's clients do."""
        context = ssl.create_default_context(cafile=str(self.authority.file))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            body = chat_body("hello") if method == "POST" else None
            return await ask(http, f"{self.local.url}{path}", body, headers, method)

    async def lets_in(self, key: str) -> bool:
        """Whether every one of some requests is let in: both workers know the key."""
        return all([(await self.ask(key)).status == 200 for _ in range(6)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(journal: Journal, folder: Path) -> AsyncIterator[Doors]:
    """One stack for all tests here."""
    authority = Authority(folder)
    pair = authority.issue("127.0.0.1")
    pair.certificate.replace(folder / "live.pem")
    pair.key.replace(folder / "live.key")
    key_command.make("first", folder / "keys")
    gateway = {
        "tls": {"certificate": f"{folder}/live.pem", "key": f"{folder}/live.key"},
        "auth": {"keys": f"{folder}/keys"},
        "only_known_paths": True,
        "sidecar": {"workers": WORKERS},
    }
    async with simulated(journal, each=2) as engines:
        document = configuration({"main": [one.address for one in engines]}, gateway=gateway)
        async with running(journal, folder / "warmpath.yaml", document, engines) as local:
            yield Doors(local, folder, authority)


async def test_a_key_that_was_just_made_lets_in_and_its_client_is_the_tenant(doors: Doors) -> None:
    """Within a second or two every worker knows it; nothing is restarted."""
    key = doors.new_key("acme")
    await until_async(lambda: doors.lets_in(key))
    assert await doors.local.metric("warmpath_auth_requests_total", outcome="key") > 0
    assert await doors.local.metric("warmpath_auth_keys") == 2 * WORKERS


async def test_a_key_that_was_taken_out_lets_nobody_in(doors: Doors) -> None:
    """An operator removes its line."""
    key = doors.new_key("leaver")
    await until_async(lambda: doors.lets_in(key))
    lines = doors.keys.read_text().splitlines()
    doors.keys.write_text("".join(f"{line}\n" for line in lines if not line.startswith("leaver ")))

    async def locked_out() -> bool:
        return all([(await doors.ask(key)).status == 401 for _ in range(6)])

    await until_async(locked_out)


async def test_without_a_key_nothing_is_served(doors: Doors) -> None:
    """Not even the list of models; the answer says why."""
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics")):
        answer = await doors.ask("", path, method)
        assert (answer.status, answer.headers["x-warmpath-reason"]) == (401, "unauthorized")
        assert answer.json["error"]["type"] == "authentication_error"
    assert await doors.local.metric("warmpath_auth_requests_total", outcome="refused") >= 3


async def test_models_and_unknown_paths(doors: Doors) -> None:
    """With a key, the list is the configuration's, and what is no API is not there."""
    key = doors.new_key("reader")
    await until_async(lambda: doors.lets_in(key))
    assert [one["id"] for one in (await doors.ask(key, "/v1/models", "GET")).json["data"]] == ["sim"]
    assert (await doors.ask(key, "/metrics", "GET")).status == 404


async def test_a_new_certificate_is_shown_without_a_restart(doors: Doors) -> None:
    """Of another authority, so that nobody can mistake the old one for it."""
    key = doors.new_key("renewed")
    await until_async(lambda: doors.lets_in(key))
    successor = Authority(doors.folder, "successor")
    pair = successor.issue("127.0.0.1")
    pair.key.replace(doors.folder / "live.key")
    pair.certificate.replace(doors.folder / "live.pem")
    doors.authority = successor

    async def shown() -> bool:
        try:
            return (await doors.ask(key)).status == 200
        except aiohttp.ClientConnectorCertificateError:
            return False

    await until_async(shown)


async def test_one_worker_of_two_still_lets_in(doors: Doors) -> None:
    """The other one is asked when one refuses the connection; nobody is locked out."""
    key = doors.new_key("steady")
    await until_async(lambda: doors.lets_in(key))
    os.kill(doors.local.workers()[0], signal.SIGKILL)
    answers = [await doors.ask(key) for _ in range(20)]
    assert {one.status for one in answers} == {200}
    await doors.local.whole(WORKERS)


async def test_no_worker_lets_nobody_in(doors: Doors) -> None:
    """`gateway.fail_open` is about picks, not about keys."""
    key = doors.new_key("waiting")
    await until_async(lambda: doors.lets_in(key))
    stopped = doors.local.workers()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        answer = await doors.ask(key)
        assert (answer.status, answer.headers["x-warmpath-reason"]) == (503, "sidecar_unavailable")
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    await until_async(lambda: doors.lets_in(key))


async def test_no_key_is_written_anywhere(doors: Doors) -> None:
    """Neither logged, nor shown as a metric, nor remembered as a decision."""
    key = doors.new_key("quiet")
    await until_async(lambda: doors.lets_in(key))
    page = await ask(doors.local.http, doors.local.stack.metrics_url, method="GET")
    assert key.encode() not in page.body
    assert not list(doors.local.journal.containing(key))
    assert not list(doors.local.journal.containing(api_keys.digest(key.encode()).hex()))


async def test_a_stack_without_its_file_of_keys_says_so(journal: Journal, folder: Path) -> None:
    """`serve` ends with the place and the remedy in place of a gateway that lets nobody in."""
    document = configuration({"main": ["127.0.0.1:9"]}, gateway={"auth": {"keys": f"{folder}/none"}})
    path = folder / "none.yaml"
    await asyncio.to_thread(write, path, document)
    with pytest.raises(
        StackError, match=r"gateway.auth.keys: .*/none: cannot be read .* `warmpath key NAME --file .*/none`"
    ):
        async with Stack(StackSettings(path=path), journal.write):
            pass
