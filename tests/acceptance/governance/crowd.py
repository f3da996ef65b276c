"""Clients that ask for more than a stack can do, and what they got."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from tests.acceptance.local import CHAT, chat_body

_NUMBERS = itertools.count()
_PATIENT = aiohttp.ClientTimeout(total=90.0)


class Got(msgspec.Struct, frozen=True):
    """One answer: which crowd asked, status, when it was sent and when it had ended, by the loop's clock."""

    crowd: str
    status: int
    sent_s: float
    ended_s: float
    headers: Mapping[str, str]

    @property
    def took_s(self) -> float:
        """Seconds from one to the other."""
        return self.ended_s - self.sent_s


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """Clients of one kind.

    Attributes:
        name: of the crowd.
        clients: how many; each asks again as soon as it has its answer.
        per_s: requests a second in place of that, whatever becomes of them; 0 for clients.
        headers: sent with each request.
        tokens: of each answer.
        pause_s: how long a client waits after it was refused.
    """

    name: str = "all"
    clients: int = 0
    per_s: float = 0.0
    headers: Mapping[str, str] = {}
    tokens: int = 24
    pause_s: float = 0.2


class Tally:
    """All answers so far."""

    def __init__(self) -> None:
        self.answers: list[Got] = []

    def per_s(self, since_s: float, until_s: float, crowd: str = "", status: int = 200) -> float:
        """Answers a second that ended in this time."""
        found = [
            one
            for one in self.answers
            if since_s <= one.ended_s < until_s and one.status == status and crowd in ("", one.crowd)
        ]
        return len(found) / (until_s - since_s)

    def outcomes(self) -> Counter[str]:
        """How many of each status and reason."""
        return Counter(f"{one.status} {one.headers.get('x-warmpath-reason', '')}".strip() for one in self.answers)

    def took(self, share: float, crowd: str = "") -> float:
        """Seconds that this share of the answers with 200 took at most."""
        took = sorted(one.took_s for one in self.answers if one.status == 200 and crowd in ("", one.crowd))
        return took[min(len(took) - 1, int(share * len(took)))]


@asynccontextmanager
async def asking(url: str, crowds: Sequence[Crowd]) -> AsyncIterator[Tally]:
    """Let these clients ask until the block ends; then those that still wait leave."""
    tally = Tally()
    async with aiohttp.ClientSession(timeout=_PATIENT, connector=aiohttp.TCPConnector(limit=0)) as http:
        tasks = []
        for crowd in crowds:
            if crowd.per_s:
                tasks.append(asyncio.create_task(_at_rate(http, url, crowd, tally)))
            tasks += [asyncio.create_task(_again(http, url, crowd, tally, at)) for at in range(crowd.clients)]
        try:
            yield tally
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _again(http: aiohttp.ClientSession, url: str, crowd: Crowd, tally: Tally, at: int) -> None:
    # One after the other: a gateway that gets all of them at once is measured at that.
    await asyncio.sleep(at / crowd.clients)
    while True:
        if (await ask(http, url, crowd, tally)).status != 200:
            await asyncio.sleep(crowd.pause_s)


async def _at_rate(http: aiohttp.ClientSession, url: str, crowd: Crowd, tally: Tally) -> None:
    loop = asyncio.get_running_loop()
    began, sent = loop.time(), 0
    async with asyncio.TaskGroup() as tasks:
        while True:
            while sent < (loop.time() - began) * crowd.per_s:
                tasks.create_task(ask(http, url, crowd, tally))
                sent += 1
            await asyncio.sleep(0.02)


async def ask(http: aiohttp.ClientSession, url: str, crowd: Crowd, tally: Tally) -> Got:
    """Send one request of a crowd; one that is not answered in time, or not whole, counts with status 0."""
    loop = asyncio.get_running_loop()
    prompt = f"{next(_NUMBERS)} clients stand before a gate that lets few in"
    body = chat_body(prompt, max_tokens=crowd.tokens, ignore_eos=True)
    headers = {"content-type": "application/json", **crowd.headers}
    began = loop.time()
    try:
        async with http.post(f"{url}{CHAT}", data=body, headers=headers) as answer:
            await answer.read()
            told = {name.lower(): text for name, text in answer.headers.items()}
            got = Got(crowd.name, answer.status, began, loop.time(), told)
    except (aiohttp.ClientError, TimeoutError):
        got = Got(crowd.name, 0, began, loop.time(), {})
    tally.answers.append(got)
    return got
