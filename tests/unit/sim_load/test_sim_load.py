"""The client tells every way in which an answer can go wrong, and always comes to an end. Real sockets throughout."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from extproc.sim.client import Client, Failure
from extproc.sim.counters import read_prefilled, since
from extproc.sim.fleet import SimFleet
from extproc.sim.load import LoadSettings, Outcome, Run, in_flight, run
from extproc.sim.settings import EngineSettings, SimSettings
from extproc.sim.workload import WorkloadSettings, mixed, requests, steady

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
HELLO = b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}\n\n'
ERROR = b'data: {"error":{"message":"engine died","type":"internal_error","code":500}}\n\n'
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Return `data` as one chunk of an HTTP body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status: bytes, body: bytes) -> bytes:
    """Return an answer with a length."""
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    """Serve each connection with `script`; yields the base URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await script(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Read one request, head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def answering(*pieces: bytes, reset: bool = False) -> Script:
    """Return a script that answers the first request with `pieces`, then closes or resets the connection."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if reset:
            writer.transport.abort()

    return script


async def ask_once(url: str, *, stream: bool, settings: LoadSettings | None = None) -> Outcome:
    """Send one request and return what became of it."""
    done = await run(url, steady(1, 1, seed=1, stream_share=float(stream), prompt_tokens=20), settings)
    assert len(done.outcomes) == 1
    return done.outcomes[0]


STREAM_ENDS = {
    "a status that is not 200": (Failure.STATUS, (whole(b"503 No", b'{"error":{"message":"busy"}}'),)),
    "a 200 that is no stream": (Failure.NO_DONE, (whole(b"200 OK", b"{}"),)),
    "nothing at all": (Failure.BROKEN, ()),
    "a head alone": (Failure.BROKEN, (HEAD,)),
    "a stream cut between events": (Failure.BROKEN, (HEAD, chunk(ROLE), chunk(HELLO))),
    "a stream cut inside an event": (Failure.BROKEN, (HEAD, chunk(HELLO)[:20])),
    "a stream cut after its last event": (Failure.BROKEN, (HEAD, chunk(HELLO + USAGE + DONE))),
    "a stream without its end mark": (Failure.NO_DONE, (HEAD, chunk(HELLO + USAGE), END)),
    "an error event": (Failure.ERROR_EVENT, (HEAD, chunk(HELLO), chunk(ERROR + DONE), END)),
    "an error event first": (Failure.ERROR_EVENT, (HEAD, chunk(ERROR + DONE), END)),
    "an event that is not JSON": (Failure.MALFORMED, (HEAD, chunk(HELLO + b"data: {oops\n\n" + USAGE + DONE), END)),
    "a stream without usage": (Failure.MALFORMED, (HEAD, chunk(HELLO + DONE), END)),
    "a stream without content": (Failure.MALFORMED, (HEAD, chunk(ROLE + USAGE + DONE), END)),
    "bytes that are not HTTP": (Failure.MALFORMED, (b"SSH-2.0-OpenSSH\r\n\r\n",)),
}


@pytest.mark.parametrize("case", STREAM_ENDS)
async def test_a_stream_that_ends_badly_is_told_by_its_kind(case: str) -> None:
    """Each way a stream can end badly has its own reason, and none passes for an answer."""
    expected, pieces = STREAM_ENDS[case]
    async with serving(answering(*pieces)) as url:
        outcome = await ask_once(url, stream=True)
    assert outcome.failure is expected
    assert outcome.ttft_s is None


async def test_a_reset_is_a_broken_answer() -> None:
    """A reset in mid-stream counts as broken, with the content that had come noted."""
    async with serving(answering(HEAD, chunk(HELLO), reset=True)) as url:
        outcome = await ask_once(url, stream=True)
    assert outcome.failure is Failure.BROKEN
    assert outcome.status in (0, 200)  # a reset may overtake what was sent before it


WHOLE = b'{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":9,"completion_tokens":2}}'
WHOLE_ENDS = {
    "a good answer": (None, whole(b"200 OK", WHOLE)),
    "an error with status 200": (Failure.ERROR_EVENT, whole(b"200 OK", b'{"error":{"message":"no"}}')),
    "no JSON": (Failure.MALFORMED, whole(b"200 OK", b"<html>")),
    "no usage": (Failure.MALFORMED, whole(b"200 OK", b'{"choices":[{"message":{"content":"hi"}}]}')),
    "half a body": (Failure.BROKEN, whole(b"200 OK", WHOLE)[:-10]),
    "a status that is not 200": (Failure.STATUS, whole(b"429 Slow", b"{}")),
}


@pytest.mark.parametrize("case", WHOLE_ENDS)
async def test_an_answer_in_one_piece_is_judged_the_same_way(case: str) -> None:
    """Without a stream too, only complete JSON with content and usage is an answer."""
    expected, answer = WHOLE_ENDS[case]
    async with serving(answering(answer)) as url:
        outcome = await ask_once(url, stream=False)
    assert outcome.failure is expected


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_stream_is_read_however_it_is_cut_into_pieces(size: int) -> None:
    """Events may be split anywhere; the first content, not the role event, is the first token."""
    body = ROLE + HELLO + USAGE + DONE
    pieces = [chunk(body[at : at + size]) for at in range(0, len(body), size)]
    async with serving(answering(HEAD, *pieces, END)) as url:
        outcome = await ask_once(url, stream=True)
    assert outcome.failure is None
    assert outcome.first_byte_s is not None
    assert outcome.first_s is not None
    assert outcome.sent_s <= outcome.first_byte_s <= outcome.first_s <= outcome.end_s
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (9, 0, 1)


async def test_the_first_token_is_the_first_content_not_the_first_byte() -> None:
    """The role event comes early in real engines; it must not stop the clock of the TTFT."""
    released = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(ROLE))
        await released.wait()
        writer.write(chunk(HELLO + USAGE + DONE) + END)
        await writer.drain()

    async with serving(script) as url:
        asking = asyncio.create_task(ask_once(url, stream=True))
        await asyncio.sleep(0.05)
        moment = asyncio.get_running_loop().time()
        released.set()
        outcome = await asking
    assert outcome.first_byte_s is not None
    assert outcome.first_s is not None
    assert outcome.first_byte_s < moment <= outcome.first_s


async def test_a_refused_connection_is_told() -> None:
    """Nothing listens: every request fails by `connect`."""
    async with serving(answering()) as url:
        pass
    assert (await ask_once(url, stream=True)).failure is Failure.CONNECT


async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Take requests and never answer."""
    await reader.read()


async def test_a_silent_gateway_runs_into_the_time_limit_of_the_request() -> None:
    """A request without an answer ends by its own limit."""
    async with serving(silent) as url:
        outcome = await ask_once(url, stream=True, settings=LoadSettings(timeout_s=0.05))
    assert outcome.failure is Failure.TIMEOUT


async def test_a_run_stops_at_its_limit_and_accounts_for_every_request() -> None:
    """At the limit, what is in flight is `stopped` and what was not sent is `unsent`; nothing is left out."""
    workload = steady(20, 60, seed=1, prompt_tokens=10)
    async with serving(silent) as url, asyncio.timeout(30):
        done = await run(url, workload, LoadSettings(limit_s=3.0, timeout_s=60))
    assert len(done.outcomes) == requests(workload)
    assert {one.failure for one in done.outcomes} == {Failure.STOPPED, Failure.UNSENT}


async def test_too_many_requests_in_flight_are_counted_not_queued() -> None:
    """Beyond the limit of the client itself a request fails at once, for waiting would hide the delay."""
    workload = steady(1000, 0.02, seed=1, prompt_tokens=10)
    async with serving(silent) as url:
        done = await run(url, workload, LoadSettings(max_in_flight=5, timeout_s=0.3))
    reasons = [one.failure for one in done.outcomes]
    assert reasons.count(Failure.TIMEOUT) == 5
    assert reasons.count(Failure.CLIENT_LIMIT) == 15


async def test_a_connection_is_kept_after_an_answer_and_dropped_after_a_failure() -> None:
    """Requests one after the other share a connection; after one that was given up there is a new one."""
    connections: list[int] = []
    left = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        while True:
            request = await read_request(reader)
            connections[-1] += 1
            if b"hang" in request:
                assert not await reader.read()
                left.set()
            else:
                writer.write(whole(b"200 OK", b"{}"))

    class Ignored:
        def status(self, code: int) -> None:
            """Ignore it."""

        def body(self, data: bytes) -> None:
            """Ignore it."""

    async with serving(script) as url, Client(url) as client:
        post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
        assert await client.send(post + b"okay", Ignored(), 30) is None
        assert await client.send(post + b"okay", Ignored(), 30) is None
        assert await client.send(post + b"hang", Ignored(), 0.05) is Failure.TIMEOUT
        async with asyncio.timeout(30):
            await left.wait()
        assert await client.send(post + b"okay", Ignored(), 30) is None
    assert connections == [3, 1]


@pytest.fixture
async def fleet() -> AsyncIterator[SimFleet]:
    """Two simulated engines at fifty times the speed, with fault control."""
    settings = SimSettings(engine=EngineSettings(), time_factor=50.0, control=True)
    async with SimFleet(2, settings) as running:
        yield running


async def test_sessions_send_the_real_answers_and_find_them_cached(fleet: SimFleet) -> None:
    """On one engine, a session's later turns find what went before, the engine's own answers included, in its cache."""
    settings = WorkloadSettings(
        seconds=1.0,
        rate=8.0,
        session_share=1.0,
        document_share=0.0,
        header_share=1.0,
        turns=(3, 3),
        question_tokens=(100, 100),
        answer_tokens=(40, 40),
        think_s=(0.0, 0.05),
    )
    workload = mixed(settings, seed=2)
    before = await read_prefilled(fleet.addresses)
    done = await run(f"http://{fleet.addresses[0]}", workload)
    after = await read_prefilled(fleet.addresses)
    assert not done.failed
    by_turn = {(one.session, one.turn): one for one in done.outcomes}
    assert len(by_turn) == requests(workload) > 0
    for (session, turn), one in by_turn.items():
        if turn:
            grown = one.prompt_tokens - by_turn[session, turn - 1].prompt_tokens
            assert 140 <= grown < 160  # answer, question and the frames around them
            assert one.prompt_tokens - one.cached_tokens < 140  # question, frames and the block the answer ends in
    prefilled = since(before, after)
    assert prefilled[fleet.addresses[0]] == sum(one.prompt_tokens - one.cached_tokens for one in done.outcomes)
    assert prefilled[fleet.addresses[1]] == 0


async def _inject(fleet: SimFleet, body: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.endpoints[0].port)
    writer.write(b"POST /sim/fail HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
    await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("status", Failure.STATUS),
        ("reset", Failure.BROKEN),
        ("stream", Failure.ERROR_EVENT),
        ("cut", Failure.BROKEN),
    ],
)
async def test_faults_of_an_engine_are_seen_as_what_they_are(fleet: SimFleet, mode: str, expected: Failure) -> None:
    """Each fault the simulator can inject is counted once, under its name; requests around it succeed."""
    await _inject(fleet, b'{"count":1,"mode":"%s"}' % mode.encode())
    seen: list[Outcome] = []
    workload = steady(50, 0.2, seed=4, stream_share=1.0, prompt_tokens=50)
    done: Run = await run(f"http://{fleet.addresses[0]}", workload, watch=seen.append)
    assert [one.failure for one in done.failed] == [expected]
    assert tuple(seen) == done.outcomes
    failed = done.failed[0]
    assert failed in in_flight(done.outcomes, failed.sent_s)
