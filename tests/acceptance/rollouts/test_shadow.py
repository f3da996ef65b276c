"""Names of a model, versions by request, and a version that gets 5 % of the requests a second time, unseen."""

import asyncio
import contextlib
import json
import signal
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from extproc.envoy import api_keys
from extproc.envoy.contract import VERSION_HEADER
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, Answer, ask, chat_body
from tests.acceptance.rollouts.stand import MODEL, NEW, OLD, Fleet, Stand, stand
from tests.waiting import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALIAS = "chat-latest"
SHARE = 0.05
REQUESTS = 400
BATCH = 6
CLIENTS = 8
BUDGET = 10_000_000
FAST = ("--prefill-tokens-per-s", "20000", "--max-num-seqs", str(BATCH))
DRAWN = "warmpath_shadow_requests_total"
HELD = ("primary_busy", "shadow_busy", "queued", "late", "over_cap")


class Shadowed:
    """The stand, and tenants who ask.

    Attributes:
        stand: the stand.
        spent: tokens of all answers, as these say.
    """

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.spent = 0

    async def ask(self, prompt: str, tenant: str = "web", model: str = MODEL, version: str = "") -> Answer:
        """One question of a tenant."""
        headers = {"authorization": f"Bearer key-of-{tenant}", **({VERSION_HEADER: version} if version else {})}
        answer = await self.stand.site.front.ask(chat_body(prompt, model=model, max_tokens=8), headers)
        if answer.status == 200:
            self.spent += answer.json["usage"]["total_tokens"]
        return answer

    async def many(self, name: str, count: int = REQUESTS, clients: int = CLIENTS) -> list[Answer]:
        """So many questions of as many clients at once, each another one."""
        permits = asyncio.Semaphore(clients)

        async def one(number: int) -> Answer:
            async with permits:
                return await self.ask(f"{name} {number}, " * 10)

        return await asyncio.gather(*(one(number) for number in range(count)))

    async def drawn(self, *outcomes: str) -> float:
        """Requests that were drawn for the shadow so far, by what became of them."""
        return sum([await self.stand.site.metric(DRAWN, model=MODEL, outcome=one) for one in outcomes])

    def charged(self) -> int:
        """Tokens that tenants have used, as the store has it."""
        raw: Any = self.stand.site.store.client()
        with contextlib.closing(raw):
            values: list[bytes | None] = [raw.get(key) for key in raw.scan_iter("*:quota:*")]
        return round(sum(float(struct.unpack("<ddd", value)[0]) for value in values if value))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Shadowed]:
    """One replica; the new version is the old one's shadow."""
    keys = folder / "keys"
    keys.write_text("".join(api_keys.line(name, f"key-of-{name}") + "\n" for name in ("web", "qa")))
    model = {"aliases": [ALIAS], "shadow": {"version": NEW, "share": SHARE}}
    sections: dict[str, Any] = {
        "gateway": {"auth": {"keys": str(keys), "fail_open": True}, "message_timeout_ms": 20_000},
        "rollouts": {"testers": ["qa"]},
        "rate_limits": {"rules": [{"tenant": "*", "tokens_per_month": BUDGET}]},
    }
    async with stand(journal, folder, Fleet(replicas=1, each=2, engines=FAST, model=model, sections=sections)) as here:
        yield Shadowed(here)


async def test_a_model_has_one_entry_for_each_of_its_names(here: Shadowed) -> None:
    """`/v1/models` shows the model and its alias, and no version; both are answered, by the old version."""
    url = f"{here.stand.url}/v1/models"
    listed = await ask(here.stand.site.http, url, None, {"authorization": "Bearer key-of-web"}, "GET")
    assert {each["id"] for each in listed.json["data"]} == {MODEL, ALIAS}
    for name in (MODEL, ALIAS):
        answer = await here.ask("What is your name? " * 10, model=name)
        assert (answer.status, answer.headers[VERSION_HEADER]) == (200, OLD)
    assert (await here.ask("Who? " * 10, model="chat-oldest")).status == 404


async def test_only_testers_choose_their_version(here: Shadowed) -> None:
    """The header works for a tenant of `rollouts.testers` alone; a version that is none is refused by name."""
    told = await here.ask("Which one are you? " * 10, "qa", version=NEW)
    assert (told.status, told.headers[VERSION_HEADER]) == (200, NEW)
    told = await here.ask("Which one are you? " * 10, "web", version=NEW)
    assert (told.status, told.headers[VERSION_HEADER]) == (200, OLD)
    told = await here.ask("Which one are you? " * 10, "qa", version="v3")
    assert (told.status, told.headers["x-warmpath-reason"]) == (400, "unknown_version")
    assert NEW in told.json["error"]["message"]


async def test_five_percent_are_sent_again_and_nobody_notices(here: Shadowed) -> None:
    """Answers are the old version's, word for word, and tenants pay what these say, once."""
    before = await here.drawn("mirrored")
    tokens = await prompt_tokens(here, NEW)
    answers = await here.many("shadowed")
    assert {(answer.status, answer.headers[VERSION_HEADER]) for answer in answers} == {(200, OLD)}
    mirrored = await here.drawn("mirrored") - before
    # Six standard deviations around 5 % of 400.
    assert 1 <= mirrored <= 46
    each = int(answers[0].json["usage"]["prompt_tokens"])

    async def worked() -> bool:
        return await prompt_tokens(here, NEW) - tokens >= mirrored * (each - 8)

    await until_async(worked)
    engine = here.stand.engines[OLD][0]
    for number in range(20):
        body = chat_body(f"compared {number}, " * 10, model=MODEL, max_tokens=8)
        direct = await ask(here.stand.site.http, f"http://{engine.address}{CHAT}", body)
        through = await here.ask(f"compared {number}, " * 10)
        assert text_of(through) == text_of(direct)
    await until(lambda: here.charged() == here.spent)


async def test_under_load_shadows_go_first(here: Shadowed, measured: list[str]) -> None:
    """More clients than the engines have room for: all are answered, and hardly a request is sent again meanwhile."""
    held, sent = await here.drawn(*HELD), await here.drawn("mirrored")
    await here.stand.traits(OLD, decode_factor=4.0)
    answers = await here.many("crowded", count=500, clients=8 * BATCH)
    await here.stand.traits(OLD)
    held, sent = await here.drawn(*HELD) - held, await here.drawn("mirrored") - sent
    measured.append(
        f"with four times the clients that engines have room for, {held:g} shadows were held back, {sent:g} sent"
    )
    assert not [(answer.status, answer.headers, answer.body) for answer in answers if answer.status != 200]
    # Until the first page that shows the load, some pass.
    assert held > sent
    sent = await here.drawn("mirrored")
    await here.many("calm again", clients=BATCH)
    assert await here.drawn("mirrored") > sent


async def test_a_shadow_that_dies_is_not_noticed(here: Shadowed) -> None:
    """Its engines are killed while requests flow: all are answered, and soon none is sent there any more."""
    asking = asyncio.create_task(here.many("without a shadow", count=2 * REQUESTS))
    await asyncio.sleep(0.5)
    here.stand.engines[NEW][0].process.send(signal.SIGKILL)
    answers = await asking

    async def known() -> bool:
        await here.many("still without", count=40)
        return await here.drawn("no_endpoint") > 0

    await until_async(known)
    assert {(answer.status, answer.headers[VERSION_HEADER]) for answer in answers} == {(200, OLD)}


async def prompt_tokens(here: Shadowed, version: str) -> int:
    """Prompt tokens that a version's engines took."""
    return sum([await engine.prompt_tokens() for engine in here.stand.engines[version]])


def text_of(answer: Answer) -> str:
    """What a chat without a stream says."""
    return str(json.loads(answer.body)["choices"][0]["message"]["content"])
