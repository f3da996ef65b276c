"""The ext_proc service over real gRPC on a Unix socket: what a gateway gets back in each mode."""

from pathlib import Path

import pytest

from extproc.envoy.contract import POOL, REASON, Call, Decision
from extproc.envoy.processor import Limits, Processor
from extproc.errors import (
    BodyTooLargeError,
    NoEndpointError,
    OverloadedError,
    ShuttingDownError,
    StoreError,
    UnknownModelError,
    WarmpathError,
)
from tests.unit.envoy import gateway as gw
from tests.unit.envoy.gateway import BUFFERED, DUPLEX, NONE, PICK, STREAMED, Ledger, running


async def test_buffered_headers_pass_and_body_carries_the_pick(tmp_path: Path) -> None:
    """Buffered: the headers are let through untouched, the reply to the body carries the pick, the end settles."""
    ledger = Ledger()
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        first = await stream.ask(gw.headers({"x-session-id": "s1"}, mode=BUFFERED))
        assert first.WhichOneof("response") == "request_headers"
        assert not first.request_headers.HasField("response")
        second = await stream.ask(gw.body(b'{"model":"m"}', end=True))
        assert second.WhichOneof("response") == "request_body"
        gw.assert_picks(second, second.request_body.response)
        assert ledger.settled == []
        assert processor.counts.held_bytes == 0
        assert await stream.finish() == []
        await gw.until_true(lambda: ledger.settled == [(PICK, "")])
    assert ledger.calls == [Call("POST", "/v1/chat/completions", {"x-session-id": "s1"}, b'{"model":"m"}')]
    assert processor.counts.unexpected == 0


@pytest.mark.parametrize("mode", [None, BUFFERED, DUPLEX, STREAMED, NONE])
async def test_request_without_body_is_picked_at_its_headers(tmp_path: Path, mode: int | None) -> None:
    """A GET has no body to wait for: its headers are answered with the pick, in every mode."""
    ledger = Ledger()
    async with running(Processor(ledger, Limits()), tmp_path) as gateway:
        stream = gateway.open()
        reply = await stream.ask(gw.headers(path="/v1/models", method="GET", end=True, mode=mode))
        gw.assert_picks(reply, reply.request_headers.response)
        assert await stream.finish() == []
    assert ledger.calls == [Call("GET", "/v1/models", {})]
    assert ledger.settled == [(PICK, "")]


async def test_streamed_mode_is_picked_by_headers_and_body_passes(tmp_path: Path) -> None:
    """A body that comes in pieces can no longer change the pick: the headers decide, every piece is let through."""
    ledger = Ledger()
    async with running(Processor(ledger, Limits()), tmp_path) as gateway:
        stream = gateway.open()
        reply = await stream.ask(gw.headers(mode=STREAMED))
        gw.assert_picks(reply, reply.request_headers.response)
        for end in (False, True):
            reply = await stream.ask(gw.body(b"piece", end=end))
            assert reply.WhichOneof("response") == "request_body"
            assert not reply.request_body.HasField("response")
        assert await stream.finish() == []
    assert [call.body for call in ledger.calls] == [b""]


@pytest.mark.parametrize("chunks", [[b""], [b"abc"], [b"a", b"b", b""], [b"x" * 70_000, b"y" * 130_000]])
async def test_duplex_echoes_the_body_with_one_end(tmp_path: Path, chunks: list[bytes]) -> None:
    """Duplex: nothing before the body's end; then the pick on the headers, then the same bytes, one end of stream."""
    ledger = Ledger()
    async with running(Processor(ledger, Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=DUPLEX))
        await stream.send(*[gw.body(chunk, end=chunk is chunks[-1]) for chunk in chunks])
        first = await stream.reply()
        gw.assert_picks(first, first.request_headers.response)
        pieces = [reply.request_body.response for reply in await stream.finish()]
    whole = b"".join(chunks)
    echoed = [piece.body_mutation.streamed_response for piece in pieces]
    assert b"".join(piece.body for piece in echoed) == whole
    assert [piece.end_of_stream for piece in echoed] == [False] * (len(echoed) - 1) + [True]
    assert all(len(piece.body) <= 62_000 for piece in echoed)
    assert not any(piece.HasField("header_mutation") or piece.clear_route_cache for piece in pieces)
    assert ledger.calls[0].body == whole


async def test_duplex_trailers_end_the_request_instead_of_the_body(tmp_path: Path) -> None:
    """With request trailers the body's last piece is not the end: the trailers are."""
    async with running(Processor(Ledger(), Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=DUPLEX), gw.body(b"abc", end=False), gw.trailers())
        replies = await stream.finish()
    assert [reply.WhichOneof("response") for reply in replies] == [
        "request_headers",
        "request_body",
        "request_trailers",
    ]
    piece = replies[1].request_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (b"abc", False)


async def test_duplex_response_is_handed_back_piece_by_piece(tmp_path: Path) -> None:
    """A gateway that streams the response through us gets every piece back at once, with one end of stream."""
    ledger = Ledger()
    async with running(Processor(ledger, Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.ask(gw.headers(end=True, mode=DUPLEX, response_mode=DUPLEX))
        assert (await stream.ask(gw.response_headers("10.0.0.2:8000"))).WhichOneof("response") == "response_headers"
        for chunk, end in ((b"data: 1", False), (b"", True)):
            reply = await stream.ask(gw.response_body(chunk, end=end))
            piece = reply.response_body.response.body_mutation.streamed_response
            assert (piece.body, piece.end_of_stream) == (chunk, end)
        assert await stream.finish() == []
    assert ledger.settled == [(PICK, "10.0.0.2:8000")]


async def test_who_answers_is_told_when_the_answer_begins(tmp_path: Path) -> None:
    """Once, as soon as a foreign gateway names the endpoint, and not only when the answer ends."""
    ledger = Ledger()
    async with running(Processor(ledger, Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.ask(gw.headers(end=True, mode=BUFFERED))
        await stream.ask(gw.response_headers("10.0.0.2:8000"))
        await gw.until_true(lambda: ledger.told == [(PICK, "10.0.0.2:8000")])
        assert ledger.settled == []
        await stream.ask(gw.response_trailers())
        assert await stream.finish() == []
    assert ledger.told == [(PICK, "10.0.0.2:8000")]


async def test_response_trailers_are_answered(tmp_path: Path) -> None:
    """Response trailers, which the lifeline configuration subscribes to, are let through."""
    async with running(Processor(Ledger(), Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.ask(gw.headers(end=True, mode=BUFFERED))
        assert (await stream.ask(gw.response_trailers())).WhichOneof("response") == "response_trailers"
        assert await stream.finish() == []


async def test_buffered_response_body_is_let_through(tmp_path: Path) -> None:
    """Outside duplex a response body is answered with the reply that changes nothing."""
    async with running(Processor(Ledger(), Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.ask(gw.headers(end=True, mode=BUFFERED, response_mode=BUFFERED))
        reply = await stream.ask(gw.response_body(b"{}", end=True))
        assert reply.WhichOneof("response") == "response_body"
        assert not reply.response_body.HasField("response")


async def test_no_destinations_leaves_the_pick_to_envoy(tmp_path: Path) -> None:
    """A decision without destinations sets the pool alone: no destination header, no `envoy.lb` metadata."""
    async with running(Processor(Ledger(Decision(pool="any")), Limits()), tmp_path) as gateway:
        reply = await gateway.open().ask(gw.headers(end=True, mode=BUFFERED))
    assert gw.set_headers(reply.request_headers.response.header_mutation) == {POOL: "any"}
    assert list(reply.dynamic_metadata.fields) == ["warmpath"]


@pytest.mark.parametrize(("hint", "subset"), [(None, None), ([], ()), (["10.0.0.1:80", "10.0.0.2:80"],) * 2])
async def test_subset_hint_reaches_the_decider(
    tmp_path: Path, hint: list[str] | None, subset: list[str] | None
) -> None:
    """No hint is None, an empty one is an empty tuple (nothing may be picked), else the addresses."""
    ledger = Ledger()
    async with running(Processor(ledger, Limits()), tmp_path) as gateway:
        await gateway.open().ask(gw.headers(end=True, mode=BUFFERED, subset=hint))
    assert ledger.calls[0].subset == (None if subset is None else tuple(subset))


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
@pytest.mark.parametrize(
    "error", [NoEndpointError("none"), OverloadedError("later", 7), UnknownModelError("what"), ShuttingDownError("bye")]
)
async def test_refusal_answers_the_client(tmp_path: Path, error: WarmpathError, mode: int) -> None:
    """An error on purpose becomes its own status, JSON body and reason; 429 says when to come back."""
    processor = Processor(Ledger(error), Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=mode), gw.body(b"{}", end=True))
        reply = (await stream.finish())[-1]
    answer = reply.immediate_response
    assert answer.status.code == error.status
    assert answer.body == error.body()
    sent = gw.set_headers(answer.headers)
    assert sent.pop("retry-after", None) == ("7" if isinstance(error, OverloadedError) else None)
    assert sent == {"content-type": "application/json", REASON: error.reason}
    assert processor.counts.refused == {error.reason: 1}
    assert processor.counts.settled == 0


@pytest.mark.parametrize("fault", [RuntimeError("the prompt was: hush"), StoreError("redis is gone")])
@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_fault_fails_open(tmp_path: Path, fault: Exception, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of ours lets the request go on unchanged, is counted, and is logged without the error's own text."""
    processor = Processor(Ledger(fault), Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=mode), gw.body(b"{}", end=True))
        head, tail = await stream.finish()
    assert not head.request_headers.HasField("response")
    assert not tail.request_body.response.HasField("header_mutation")
    if mode == DUPLEX:
        assert tail.request_body.response.body_mutation.streamed_response.body == b"{}"
    assert processor.counts.failed_open == 1
    assert type(fault).__name__ in caplog.text
    assert "hush" not in caplog.text


async def test_fault_answers_500_when_failing_closed(tmp_path: Path) -> None:
    """With `fail_open` off a fault of ours is a 500 that says nothing of its cause."""
    async with running(Processor(Ledger(RuntimeError("secret")), Limits(fail_open=False)), tmp_path) as gateway:
        reply = await gateway.open().ask(gw.headers(end=True, mode=BUFFERED))
    assert reply.immediate_response.status.code == 500
    assert b"secret" not in reply.immediate_response.body


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_20_mb_body_passes(tmp_path: Path, mode: int) -> None:
    """A body far over gRPC's own 4 MiB default arrives whole and, in duplex, goes back whole."""
    ledger = Ledger()
    whole = bytes(range(256)) * (20 * 4096)
    async with running(Processor(ledger, Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=mode))
        step = len(whole) if mode == BUFFERED else 1 << 16
        for start in range(0, len(whole), step):
            await stream.send(gw.body(whole[start : start + step], end=start + step >= len(whole)))
        replies = await stream.finish()
    assert ledger.calls[0].body == whole
    if mode == DUPLEX:
        pieces = [reply.request_body.response.body_mutation.streamed_response for reply in replies[1:]]
        assert b"".join(piece.body for piece in pieces) == whole


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_body_over_the_limit_is_413(tmp_path: Path, mode: int) -> None:
    """One byte over the limit is refused with 413 and never decided; what the gateway still sends is let drop."""
    ledger = Ledger()
    processor = Processor(ledger, Limits(max_body_bytes=1024))
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=mode), gw.body(b"x" * 1025, end=mode == BUFFERED))
        if mode == DUPLEX:
            await stream.send(gw.body(b"x", end=True))
        reply = (await stream.finish())[-1]
    assert reply.immediate_response.status.code == BodyTooLargeError.status
    assert ledger.calls == []
    assert processor.counts.refused == {"body_too_large": 1}
    assert processor.counts.held_bytes == 0
    assert processor.counts.unexpected == 0


async def test_held_bodies_are_bounded_over_all_streams(tmp_path: Path) -> None:
    """Half-sent duplex bodies share one budget: past it a request gets 429, and a reset gives its part back."""
    processor = Processor(Ledger(), Limits(max_held_bytes=2500))
    async with running(processor, tmp_path) as gateway:
        stalled = [gateway.open(), gateway.open()]
        for stream in stalled:
            await stream.send(gw.headers(mode=DUPLEX), gw.body(b"x" * 1000, end=False))
        await gw.until_true(lambda: processor.counts.held_bytes == 2000)
        late = gateway.open()
        await late.send(gw.headers(mode=DUPLEX), gw.body(b"x" * 1000, end=False))
        assert (await late.reply()).immediate_response.status.code == OverloadedError.status
        for stream in stalled:
            stream.reset()
        await gw.until_true(lambda: processor.counts.held_bytes == 0)
        again = gateway.open()
        await again.send(gw.headers(mode=DUPLEX), gw.body(b"x" * 1000, end=True))
        assert (await again.reply()).WhichOneof("response") == "request_headers"


async def test_gateway_without_protocol_config_gets_the_configured_mode(tmp_path: Path) -> None:
    """A gateway that does not name its mode is served in the configured one."""
    async with running(Processor(Ledger(), Limits(body_mode="duplex")), tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(), gw.body(b"{}", end=True))
        reply = await stream.reply()
        gw.assert_picks(reply, reply.request_headers.response)
