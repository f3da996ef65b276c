"""Asking a shadow's engine: its answer is kept as it comes, and nothing that goes wrong is anybody's fault."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from extproc.request.model import RouteKind
from extproc.shadow import sender as sender_module
from extproc.shadow.answer import Answer, Collector
from extproc.shadow.sender import Letter, Sender, passed
from tests.ports import free_port
from tests.waiting import until

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'


class Engine:
    """Answers as the path says.

    Attributes:
        got: headers and body of each request.
    """

    def __init__(self) -> None:
        self.address = ""
        self.got: list[tuple[dict[str, str], bytes]] = []

    async def start(self) -> web.AppRunner:
        """Listen on a free port."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/{how}", self._answer)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"127.0.0.1:{site.port}"
        return runner

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.got.append(({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        how = request.match_info["how"]
        if how == "silent":
            await asyncio.sleep(30)
        if how == "elsewhere":
            raise web.HTTPFound("/whole")
        if how == "busy":
            return web.json_response({}, status=503)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(CHUNK.replace(b'"stop"', b"null") if how == "cut" else CHUNK)
        if how == "cut" and request.transport is not None:
            await asyncio.sleep(0.02)
            request.transport.abort()
        if how == "endless":
            for _ in range(1000):
                await answer.write(CHUNK)
        if how == "whole":
            await answer.write(b"data: [DONE]\n\n")
        return answer


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    """An engine."""
    engine = Engine()
    runner = await engine.start()
    yield engine
    await runner.cleanup()


async def asked(address: str, how: str, timeout_s: float = 5.0) -> Answer:
    """What comes of one request."""
    collector = Collector(RouteKind.CHAT, True, time.monotonic())
    sender = Sender(time.monotonic)
    headers = passed({"authorization": "Bearer secret", "accept": "*/*", "x-session-id": "s"})
    try:
        await sender.send(Letter(address, f"/{how}", headers, b'{"a":1}', timeout_s), collector)
    finally:
        await sender.close()
    return collector.answer()


async def test_an_answer_is_kept(engine: Engine) -> None:
    """Text, times and that it is whole; the engine sees a body and who sends it, no key and no session."""
    answer = await asked(engine.address, "whole")
    assert (answer.status, answer.flaw, answer.text) == (200, "", "hi")
    assert answer.ttft_s is not None
    [(headers, body)] = engine.got
    assert body == b'{"a":1}'
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"] == "warmpath-shadow"
    assert not {"authorization", "x-session-id", "cookie"} & headers.keys()


@pytest.mark.parametrize(
    ("how", "status", "flaw"),
    [("cut", 200, "cut"), ("busy", 503, "status"), ("elsewhere", 302, "status"), ("silent", 0, "unreached")],
)
async def test_what_goes_wrong_is_the_answer(engine: Engine, how: str, status: int, flaw: str) -> None:
    """Half an answer, a refusal, a redirect that is not followed, none in time."""
    answer = await asked(engine.address, how, timeout_s=0.3 if how == "silent" else 5.0)
    assert (answer.status, answer.flaw) == (status, flaw)


async def test_a_large_body_is_sent_whole(engine: Engine) -> None:
    """With its length, as engines that take no chunks need it."""
    sender, body = Sender(time.monotonic), b'{"a":"' + b"x" * 1_500_000 + b'"}'
    collector = Collector(RouteKind.CHAT, True, time.monotonic())
    await sender.send(Letter(engine.address, "/whole", passed({}), body, 10.0), collector)
    await sender.close()
    [(headers, got)] = engine.got
    assert got == body
    assert headers["content-length"] == str(len(body))


async def test_an_engine_that_is_not_there_is_unreached() -> None:
    """Nobody listens."""
    assert (await asked(f"127.0.0.1:{free_port()}", "whole")).flaw == "unreached"


async def test_an_endless_answer_is_read_no_further(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by what is kept of an answer."""
    monkeypatch.setattr(sender_module, "LONGEST", 2 * len(CHUNK))
    collector = Collector(RouteKind.CHAT, True, time.monotonic(), 2 * len(CHUNK))
    sender = Sender(time.monotonic)
    await sender.send(Letter(engine.address, "/endless", passed({}), b"{}", 5.0), collector)
    await sender.close()
    assert collector.answer().flaw == "too_long"


async def test_one_that_is_given_up_leaves_no_connection(engine: Engine) -> None:
    """Its engine sees the client go."""
    sender, collector = Sender(time.monotonic), Collector(RouteKind.CHAT, True, time.monotonic())
    sending = asyncio.create_task(sender.send(Letter(engine.address, "/silent", passed({}), b"{}", 60.0), collector))
    await until(lambda: bool(engine.got))
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert sending.cancelled()
    await sender.close()
