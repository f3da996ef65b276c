"""A relay between a client and a stand-in for Envoy's inner listener."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest

from extproc import relaying
from extproc.config import Config, Model, Pool, Relay, Timeouts
from extproc.config_limits import TimeoutRule
from extproc.engines import prometheus
from extproc.relay.asked import Asked
from extproc.relay.server import Server
from tests.ports import free_port
from tests.unit.top.inner_listener import InnerListener, Play
from tests.waiting import until, until_async

CHAT = "/v1/chat/completions"
LOST = Play(then="cut")
"""An engine that dies behind its headers."""


def event(text: str, reason: str | None = None, token: int = 0, **more: Any) -> bytes:
    """One event of a chat, with a token id."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason, "token_ids": [token], **more}
    return b"data: %s\n\n" % json.dumps({"id": "one", "choices": [choice]}).encode()


def role(prompt_ids: Sequence[int] = (1, 2)) -> bytes:
    """The event that opens a chat."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return b"data: %s\n\n" % json.dumps({"id": "one", "choices": [choice], "prompt_token_ids": prompt_ids}).encode()


def text_event(text: str, reason: str | None = None, token: int = 0) -> bytes:
    """One event of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": reason, "token_ids": [token]}
    return b"data: %s\n\n" % json.dumps({"id": "two", "choices": [choice]}).encode()


DONE = b"data: [DONE]\n\n"
WHOLE = Play(pieces=[role(), event("ab"), event("c", "stop"), DONE], served="10.0.0.2:8000")
REST = Play(pieces=[text_event("c", "stop", 9), DONE], served="10.0.0.2:8000")
HALF = Play(pieces=[role(), event("a", token=7), event("b", token=8)], then="cut")


class Answer(msgspec.Struct, frozen=True):
    """What the client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> list[Any]:
        """The data of its events, `[DONE]` as text."""
        lines = [line.removeprefix(b"data: ") for line in self.body.splitlines() if line]
        return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]

    @property
    def text(self) -> str:
        """Its text, of a whole stream."""
        assert self.data[-1] == "[DONE]"
        choices = [choice for one in self.data[:-1] for choice in one["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    @property
    def error(self) -> dict[str, Any]:
        """The error that a stream ends in, or that it is."""
        told = self.data[-1] if self.headers["content-type"].startswith("text/event-stream") else json.loads(self.body)
        found: dict[str, Any] = told["error"]
        return found


class Bench:
    """A running relay, what lies behind it, and a client."""

    def __init__(self, server: Server, inner: InnerListener, http: aiohttp.ClientSession, url: str) -> None:
        self.server = server
        self.inner = inner
        self.http = http
        self.url = url

    async def ask(self, *plays: Play, headers: dict[str, str] | None = None, path: str = CHAT, **fields: Any) -> Answer:
        """Send a chat for a stream, which meets these answers."""
        self.inner.plays, self.inner.heard = list(plays), []
        body = {"model": "m", "messages": [{"role": "user", "content": "p"}], "stream": True, "max_tokens": 9}
        async with self.http.post(f"{self.url}{path}", json=body | fields, headers=headers) as answer:
            told = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(answer.status, told, await answer.read())

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Bodies that engines got."""
        return [json.loads(one.body) for one in self.inner.heard]

    async def count(self, name: str, **labels: str) -> float:
        """A sample of the relay's metrics page; 0 when it is not there."""
        async with self.http.get(f"{self.url}/metrics") as page:
            found = prometheus.read(await page.read(), (name,)).get(name, ())
        return sum(one.value for one in found if labels.items() <= dict(one.labels).items())


@contextlib.asynccontextmanager
async def relay(timeouts: Timeouts | None = None, **settings: Any) -> AsyncIterator[Bench]:
    """A relay with these settings."""
    async with InnerListener() as inner, aiohttp.ClientSession() as http:
        port = free_port()
        config = Config(
            models={"m": Model(pool="p"), "trt": Model(pool="t")},
            pools={
                "p": Pool(endpoints=["127.0.0.1:1"]),
                "t": Pool(endpoints=["127.0.0.1:2"], engine="tensorrt_llm"),
            },
            relay=Relay(enabled=True, port=port, listen=inner.address, **settings),
            timeouts=timeouts or Timeouts(),
        )
        async with relaying.serving(config) as server:
            yield Bench(server, inner, http, f"http://127.0.0.1:{port}")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A relay with default settings, but for short patience."""
    async with relay(stall_s=0.3) as running:
        yield running


async def test_an_undisturbed_stream_passes(bench: Bench) -> None:
    """Status, kind and text are the engine's; what only the relay needs to know is not told."""
    answer = await bench.ask(msgspec.structs.replace(WHOLE, headers={"x-warmpath-model": "m2"}))
    assert (answer.status, answer.text) == (200, "abc")
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-warmpath-model"] == "m2"
    assert "x-warmpath-served" not in answer.headers
    assert await bench.count("warmpath_relay_requests_total", outcome="whole") == 1


async def test_the_limit_of_a_request_is_for_all_tries_together() -> None:
    """Past it a stream ends in an error event, and an answer that has not begun is 504; no other engine is asked."""
    async with relay(timeouts=Timeouts(request_s=0.2)) as bench:
        told = await bench.ask(Play(pieces=[role(), event("ab")], then="hang"))
        assert (told.status, told.error["type"]) == (200, "timeout_error")
        for stream in (True, False):
            told = await bench.ask(Play(silent=True), stream=stream)
            assert (told.status, told.headers["x-warmpath-reason"]) == (504, "time_limit")
        assert len(bench.inner.heard) == 1
        assert await bench.count("warmpath_relay_requests_total", outcome="failed") == 3.0


async def test_a_model_may_have_more_time_than_the_rest() -> None:
    """Its rule counts in the relay, too; 0 is no limit."""
    late = Play(pieces=[role(), event("ab"), event("c", "stop")], late_s=0.4)
    for request_s in (30.0, 0.0):
        timeouts = Timeouts(request_s=0.2, rules=[TimeoutRule(model="m", request_s=request_s)])
        async with relay(timeouts=timeouts) as bench:
            assert (await bench.ask(late)).text == "abc"


async def test_an_alias_has_the_limits_and_engines_of_its_model() -> None:
    """The relay sees the client's name: rules are of the model's own."""
    models = {"m": Model(pool="main", aliases=["gpt"]), "n": Model(pool="other", aliases=["en"])}
    pools = {
        "main": Pool(endpoints=["10.0.0.1:80"], engine="tensorrt_llm"),
        "other": Pool(endpoints=["10.0.0.2:80"], ask_usage=True),
    }
    timeouts = Timeouts(request_s=9.0, rules=[TimeoutRule(model="m", request_s=30.0)])
    config = Config(models=models, pools=pools, timeouts=timeouts)
    limits = relaying.limits_of(config)
    assert {name: limits.request_s(Asked("chat", model=name)) for name in ("m", "gpt", "n", "en", "x")} == {
        "m": 30.0,
        "gpt": 30.0,
        "n": 9.0,
        "en": 9.0,
        "x": 9.0,
    }
    assert limits.silent == {"m", "gpt"}
    assert relaying.telling(config) == {"n", "en"}


async def test_what_comes_behind_the_end_is_not_sent(bench: Bench) -> None:
    """An answer ends once: events behind `[DONE]`, in the same piece too, are not the client's."""
    told = await bench.ask(Play(pieces=[role(), event("ab"), event("c", "stop"), DONE + event("zz", "stop") + DONE]))
    assert told.text == "abc"
    assert told.data.count("[DONE]") == 1


async def test_an_engine_is_let_end_its_answer(bench: Bench) -> None:
    """A connection that is closed behind `[DONE]`, but before the end, looks like a client that left."""
    assert (await bench.ask(msgspec.structs.replace(WHOLE, late_s=0.05))).text == "abc"
    await until(lambda: bench.inner.heard[0].over)
    assert not bench.inner.heard[0].left


async def test_a_request_moves_before_anything_was_sent(bench: Bench) -> None:
    """It is asked for anew, whole, and the engine that was lost is left out."""
    answer = await bench.ask(LOST, WHOLE)
    assert answer.text == "abc"
    first, second = bench.inner.heard
    assert first.body == second.body
    assert "x-warmpath-avoid" not in first.headers
    assert second.headers["x-warmpath-avoid"] == "10.0.0.1:8000"
    assert await bench.count("warmpath_relay_requests_total", outcome="moved") == 1
    assert await bench.count("warmpath_relay_deaths_total", how="cut") == 1


async def test_every_try_has_a_request_id_of_its_own_and_the_clients_headers(bench: Bench) -> None:
    """Each decision can be explained; a key that forbids a second try goes with the first alone."""
    sent = {"x-request-id": "r", "idempotency-key": "k", "x-session-id": "s", "x-warmpath-tenant": "t"}
    await bench.ask(LOST, WHOLE, headers=sent | {"x-warmpath-relay": "1", "x-warmpath-avoid": "x"})
    first, second = (one.headers for one in bench.inner.heard)
    assert (first["x-request-id"], second["x-request-id"]) == ("r", "r-2")
    assert first["idempotency-key"] == "k"
    assert "idempotency-key" not in second
    for names in (first, second):
        assert (names["x-session-id"], names["x-warmpath-tenant"]) == ("s", "t")
        assert "x-warmpath-relay" not in names
    assert "x-warmpath-avoid" not in first


async def test_an_answer_goes_on_where_its_engine_was_lost(bench: Bench) -> None:
    """The next engine gets the prompt's and the answer's token ids, and the client one seamless stream."""
    answer = await bench.ask(HALF, REST, stream_options={"include_usage": True})
    assert answer.text == "abc"
    assert {one["id"] for one in answer.data[:-1]} == {"one"}
    assert bench.inner.heard[1].path == "/v1/completions"
    assert (bench.bodies[1]["prompt"], bench.bodies[1]["max_tokens"]) == ([1, 2, 7, 8], 7)
    assert answer.data[-2]["usage"]["completion_tokens"] == 3
    assert await bench.count("warmpath_relay_requests_total", outcome="continued") == 1
    assert await bench.count("warmpath_relay_resumed_total", form="ids") == 1


async def test_engines_may_be_lost_again_and_again(bench: Bench) -> None:
    """Each of them is left out from then on; three are tried."""
    more = Play(pieces=[text_event("c", token=9)], then="cut", served="10.0.0.2:8000")
    last = Play(pieces=[text_event("d", "stop", 10), DONE])
    assert (await bench.ask(HALF, more, last)).text == "abcd"
    assert bench.inner.heard[2].headers["x-warmpath-avoid"] == "10.0.0.1:8000,10.0.0.2:8000"
    assert bench.bodies[2]["prompt"] == [1, 2, 7, 8, 9]


async def test_half_an_event_is_never_sent(bench: Bench) -> None:
    """The client sees whole events only, and the token of the half one once."""
    torn = Play(pieces=[role(), event("a", token=7) + event("b", token=8)[:25]], then="cut")
    answer = await bench.ask(torn, Play(pieces=[text_event("bc", "stop", 8), DONE]))
    assert answer.text == "abc"
    assert bench.bodies[1]["prompt"] == [1, 2, 7]


async def test_a_stream_that_stands_still_counts_as_dead(bench: Bench) -> None:
    """Before the head, before the first token, and between tokens."""
    for lost in (Play(silent=True), Play(then="hang")):
        assert (await bench.ask(lost, WHOLE)).text == "abc"
    assert (await bench.ask(msgspec.structs.replace(HALF, then="hang"), REST)).text == "abc"
    assert await bench.count("warmpath_relay_deaths_total", how="stalled") == 3
    assert bench.inner.heard[0].left


async def test_an_error_event_is_a_death_and_is_not_passed_on(bench: Bench) -> None:
    """A vLLM whose core died ends its 200 with an error and `[DONE]`."""
    error = b'data: {"error":{"message":"EngineCore","type":"InternalServerError","param":null,"code":500}}\n\n'
    dying = Play(pieces=[role(), event("a", token=7), event("b", token=8), error, DONE])
    assert (await bench.ask(dying, REST)).text == "abc"
    assert await bench.count("warmpath_relay_deaths_total", how="error") == 1


async def test_a_500_is_asked_for_elsewhere(bench: Bench) -> None:
    """A vLLM answers 500 while its core is dead. When every engine says so, the client sees it."""
    failing = Play(status=500, kind="application/json", pieces=[b'{"error":{"message":"m"}}'])
    assert (await bench.ask(failing, WHOLE)).text == "abc"
    answer = await bench.ask(failing, failing, failing)
    assert (answer.status, answer.body) == (500, b'{"error":{"message":"m"}}')
    assert await bench.count("warmpath_relay_requests_total", outcome="passed") == 1


@pytest.mark.parametrize("status", [400, 404, 429, 503, 504])
async def test_other_errors_are_the_clients_to_see(bench: Bench, status: int) -> None:
    """Envoy has tried others already, or no other engine would say otherwise; body and headers stay."""
    headers = {"retry-after": "7", "x-warmpath-reason": "overloaded"}
    answer = await bench.ask(Play(status=status, kind="application/json", pieces=[b'{"error":1}'], headers=headers))
    assert (answer.status, answer.body, answer.headers["retry-after"]) == (status, b'{"error":1}', "7")
    assert answer.headers["x-warmpath-reason"] == "overloaded"
    assert len(bench.inner.heard) == 1


async def test_an_answer_in_one_piece_is_held_until_it_is_whole(bench: Bench) -> None:
    """What was half received is thrown away, and asked for anew."""
    half = Play(kind="application/json", pieces=[b'{"id":"x","choi'], then="cut")
    whole = Play(kind="application/json", pieces=[b'{"id":"y"}'])
    answer = await bench.ask(half, whole, stream=False)
    assert (answer.status, answer.body) == (200, b'{"id":"y"}')
    assert bench.inner.heard[1].headers["x-warmpath-avoid"] == "10.0.0.1:8000"
    assert bench.inner.heard[0].body == bench.inner.heard[1].body
    assert await bench.count("warmpath_relay_held_bytes") == 0


async def test_a_body_that_cannot_be_read_passes_as_it_is(bench: Bench) -> None:
    """The engine says what is wrong with it."""
    bench.inner.plays, bench.inner.heard = [Play(status=400, kind="application/json", pieces=[b"no"])], []
    async with bench.http.post(f"{bench.url}{CHAT}", data=b'{"stream":') as answer:
        assert (answer.status, await answer.read()) == (400, b"no")
    assert bench.inner.heard[0].body == b'{"stream":'


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"tools": [{"type": "function"}]}, "tools"), ({"n": 2}, "choices"), ({"model": "trt"}, "engine")],
)
async def test_what_cannot_be_continued_ends_in_an_error_event(
    bench: Bench, fields: dict[str, Any], reason: str
) -> None:
    """Some of it was sent: the client is told that the rest is missing, and gets no `[DONE]`."""
    no_ids = Play(pieces=[event("a", token_ids=None)], then="cut")
    answer = await bench.ask(no_ids, **fields)
    assert answer.status == 200
    assert (answer.error["type"], answer.error["code"]) == ("service_unavailable", 503)
    assert b"[DONE]" not in answer.body
    assert await bench.count("warmpath_relay_failures_total", reason=reason) == 1
    assert await bench.count("warmpath_relay_requests_total", outcome="failed") == 1


async def test_what_cannot_be_continued_moves_before_its_first_token(bench: Bench) -> None:
    """Until then any request may start anew."""
    lost = Play(pieces=[role()], then="cut")
    answer = await bench.ask(lost, WHOLE, tools=[{"type": "function"}])
    assert answer.text == "abc"
    assert answer.body.count(b'"role"') == 1


async def test_tries_are_bounded(bench: Bench) -> None:
    """Three engines lost: an error, whether before the first byte or in the middle."""
    answer = await bench.ask(LOST, LOST, LOST)
    assert (answer.status, answer.headers["x-warmpath-reason"]) == (503, "engine_lost")
    none = Play(then="cut")
    answer = await bench.ask(HALF, none, none)
    assert answer.status == 200
    assert "max_attempts" in answer.error["message"]
    assert await bench.count("warmpath_relay_failures_total", reason="attempts") == 2


async def test_a_continuation_that_is_refused_is_not_asked_for_again(bench: Bench) -> None:
    """A 4xx says that no engine of this kind takes it; a full one is no reason to give up."""
    refused = Play(status=400, kind="application/json", pieces=[b"{}"])
    answer = await bench.ask(HALF, refused)
    assert answer.error["code"] == 503
    assert await bench.count("warmpath_relay_failures_total", reason="refused") == 1
    full = Play(status=503, kind="application/json", pieces=[b"{}"])
    assert (await bench.ask(HALF, full, REST)).text == "abc"


async def test_the_model_that_began_an_answer_goes_on_with_it(bench: Bench) -> None:
    """A saturated pool lets another model answer: its tokens mean nothing to the client's own, nor the reverse."""
    small = {"x-warmpath-fallback": "small"}
    assert (await bench.ask(msgspec.structs.replace(HALF, headers=small), REST)).text == "abc"
    assert [one["model"] for one in bench.bodies] == ["m", "small"]
    assert (await bench.ask(HALF, msgspec.structs.replace(REST, headers=small), REST)).text == "abc"
    assert [one["model"] for one in bench.bodies] == ["m", "m", "m"]


async def test_the_version_that_began_an_answer_goes_on_with_it(bench: Bench) -> None:
    """A completion of nobody is drawn anew at each try: tokens of one version mean nothing to another."""
    old, new = {"x-warmpath-version": "old"}, {"x-warmpath-version": "new"}
    begun, other, same = (
        msgspec.structs.replace(play, headers=headers) for play, headers in ((HALF, old), (REST, new), (REST, old))
    )
    assert (await bench.ask(begun, other, same)).text == "abc"
    assert len(bench.bodies) == 3
    assert (await bench.ask(begun, same)).text == "abc"
    assert len(bench.bodies) == 2


async def test_nothing_goes_on_where_it_may_not() -> None:
    """`restart_before_first` moves a request but continues none; `fail` does neither."""
    async with relay(on_death="restart_before_first") as bench:
        assert (await bench.ask(LOST, WHOLE)).text == "abc"
        assert "relay.on_death" in (await bench.ask(HALF)).error["message"]
    async with relay(on_death="fail") as bench:
        assert (await bench.ask(LOST)).status == 503
        assert (await bench.ask(LOST, stream=False)).status == 503


async def test_an_engine_is_let_go_when_the_client_leaves() -> None:
    """At once, though the engine says nothing just then."""
    body = {"model": "m", "messages": [], "stream": True}
    async with relay(stall_s=60) as patient:
        patient.inner.plays = [Play(pieces=[role()], then="hang")]
        async with patient.http.post(f"{patient.url}{CHAT}", json=body) as answer:
            await answer.content.readany()
            answer.close()
        await until(lambda: patient.inner.heard[0].left)

        async def counted() -> bool:
            return await patient.count("warmpath_relay_requests_total", outcome="gone") == 1

        await until_async(counted)
        assert await patient.count("warmpath_relay_open") == 0


async def test_a_slow_client_slows_its_engine(bench: Bench) -> None:
    """The relay reads no faster than the client does: what it holds for one client stays small."""
    bench.inner.plays, bench.inner.heard = [Play(pieces=[role(), event("x" * 10_000)], then="flood")], []
    body = {"model": "m", "messages": [], "stream": True}
    async with bench.http.post(f"{bench.url}{CHAT}", json=body) as answer:
        await answer.content.readany()
        heard = bench.inner.heard[0]
        before = -1
        while before != heard.sent and heard.sent < 64 << 20:
            before = heard.sent
            await asyncio.sleep(0.5)  # longer than the patience for engines: waiting for a client is none of theirs
        # Buffers of three sockets and of the client library.
        assert heard.sent < 64 << 20
        answer.close()


async def test_what_is_too_large_or_too_much_is_refused() -> None:
    """With the statuses and reasons that the gateway uses as well."""
    async with relay(max_body=2000, max_open=1, stall_s=60) as bench:
        answer = await bench.ask(messages=[{"role": "user", "content": "x" * 2000}])
        assert (answer.status, answer.headers["x-warmpath-reason"]) == (413, "body_too_large")
        answer = await bench.ask(Play(kind="application/json", pieces=[b"x" * 2001]), stream=False)
        assert answer.status == 503
        bench.inner.plays = [Play(silent=True)]
        waiting = asyncio.create_task(bench.http.post(f"{bench.url}{CHAT}", json={"stream": True}))
        await until(lambda: len(bench.inner.heard) == 2)
        answer = await bench.ask()
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        waiting.cancel()


async def test_only_chats_and_completions_are_relayed(bench: Bench) -> None:
    """Envoy sends nothing else; pages of the relay's own are not behind the public routes."""
    assert (await bench.ask(path="/v1/embeddings")).status == 404
    assert (await bench.ask(WHOLE, path="/a/v1/chat/completions/?q=1")).text == "abc"
    assert bench.inner.heard[0].path == "/a/v1/chat/completions/?q=1"


async def test_a_relay_that_stops_finishes_what_it_has(bench: Bench) -> None:
    """New requests are told to come again, and Envoy that there is no relay."""
    bench.inner.plays, bench.inner.heard = [msgspec.structs.replace(WHOLE, then="hang")], []
    async with bench.http.post(f"{bench.url}{CHAT}", json={"stream": True, "messages": []}) as open_:
        draining = asyncio.create_task(bench.server.drain(60))
        async with bench.http.get(f"{bench.url}/healthz") as health:
            assert health.status == 503
        assert (await bench.ask()).headers["x-warmpath-reason"] == "shutting_down"
        assert b"[DONE]" in await open_.read()
    await draining
