"""`warmpath explain` on a running stack: it says what will be decided, what was decided, and changes nothing."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from extproc import explaining
from extproc.choose.explain import Explanation
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Answer, Local, chat_body, configuration, running, simulated
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRETS = ("wordofprompt", "session-of-client", "tenant-of-client")
PROMPT = "wordofprompt and more, " * 300
HEADERS = {"x-session-id": "session-of-client"}


class Booth:
    """A running stack, and who asks it."""

    def __init__(self, local: Local, path: Path) -> None:
        self.local = local
        self._path = path

    async def asked(self, body: bytes, headers: Mapping[str, str]) -> Explanation:
        """What is said of a request, as the command asks it."""
        file = self._path.with_name("body.json")
        await asyncio.to_thread(file.write_bytes, body)
        lines = [f"{name}:{value}" for name, value in headers.items()]
        return await asyncio.to_thread(explaining.of_request, self.local.stack.config, str(file), CHAT, lines)

    async def past(self, name: str) -> Explanation:
        """What is said of a decision that was made."""
        return await asyncio.to_thread(explaining.of_decision, self.local.stack.config, name)

    async def command(self, *arguments: str, body: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run the command itself."""
        command = [sys.executable, "-m", "extproc", "explain", "--config", str(self._path), *arguments]
        run = subprocess.run
        return await asyncio.to_thread(run, command, input=body, capture_output=True, check=False, timeout=60)

    async def quiet(self) -> None:
        """Wait until nothing is in flight and every bucket has drained."""

        async def idle() -> bool:
            return not await self.local.loads()

        await until_async(idle)


def request_id(answer: Answer) -> str:
    """As Envoy tells the client."""
    return answer.headers["x-request-id"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def booth(journal: Journal, folder: Path) -> AsyncIterator[Booth]:
    """Three engines behind two workers."""
    async with simulated(journal, each=3) as engines:
        document = configuration({POOL: [engine.address for engine in engines]})
        document["gateway"]["sidecar"]["workers"] = 2
        # Decisions are what is tested, not a worker or a store that a busy machine makes look slow.
        document["gateway"]["message_timeout_ms"] = 10_000
        document["redis"] = {"timeout_ms": 2000}
        path = folder / "warmpath.yaml"
        async with running(journal, path, document, engines) as started:
            yield Booth(started, path)


async def test_it_says_what_is_decided_then(booth: Booth) -> None:
    """A conversation, turn by turn: the pick, the tokens and the pin are those of the decision that follows."""
    pins = []
    for turn in range(3):
        body = chat_body(PROMPT + "and again, " * 40 * turn)
        await booth.quiet()
        before = await booth.asked(body, HEADERS)
        answer = await booth.local.ask(body=body, headers=HEADERS)
        assert answer.status == 200
        made = await booth.past(request_id(answer))
        assert (made.pick, made.pin, made.policy) == (before.pick, before.pin, before.policy)
        assert {each.endpoint for each in made.candidates} == {engine.address for engine in booth.local.engines}
        pins.append(before.pin)
    assert pins == ["new", "honoured", "honoured"]
    picked = next(each for each in made.candidates if each.endpoint == made.pick)
    assert picked.matched_tokens > 1000
    assert picked.cost_ms == pytest.approx(sum(picked.terms.values()))
    assert made.pinned_to == made.pick


async def test_asking_charges_and_pins_nothing(booth: Booth) -> None:
    """The store's loads are as before, and a session that was only asked about stays new."""
    await booth.quiet()
    decided = await booth.local.metric("warmpath_decision_seconds_count")
    body = chat_body("another wordofprompt, " * 300)
    for _ in range(4):
        told = await booth.asked(body, {"x-session-id": "only-asked"})
        assert told.pin == "new"
        assert all(each.matched_tokens == 0 for each in told.candidates)
    assert await booth.local.loads() == {}
    assert await booth.local.metric("warmpath_decision_seconds_count") == decided


async def test_a_decision_of_any_worker_is_found(booth: Booth) -> None:
    """Both workers decide, and each decision is found by its request's id and by its charge."""
    replicas = set()

    async def both() -> bool:
        made = await booth.past(request_id(await booth.local.chat("hello")))
        replicas.add(made.replica)
        assert await booth.past(made.charge_id) == made
        return len(replicas) == 2

    await until_async(both)


async def test_the_command_says_when_a_decision_is_not_known(booth: Booth) -> None:
    """Exit code 1 and one line that names the setting."""
    done = await booth.command("--id", "nobody")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"telemetry.recent_decisions" in done.stderr
    assert done.stderr.count(b"\n") == 1


async def test_nothing_of_the_client_is_shown(booth: Booth) -> None:
    """Neither prompt nor session nor tenant, in text or JSON, of a request asked about or answered."""
    body, headers = chat_body(PROMPT), {**HEADERS, "x-warmpath-tenant": "tenant-of-client"}
    asked = await booth.asked(body, headers)
    made = await booth.past(request_id(await booth.local.ask(CHAT, body, headers)))
    shown = [form(told) for told in (asked, made) for form in (explaining.to_text, explaining.to_json)]
    options = [part for name, value in headers.items() for part in ("--header", f"{name}:{value}")]
    done = await booth.command("--request", "-", "--json", *options, body=body)
    assert json.loads(done.stdout)["pool"] == POOL
    shown += [done.stdout.decode(), done.stderr.decode()]
    assert not [secret for secret in SECRETS for text in shown if secret in text]
