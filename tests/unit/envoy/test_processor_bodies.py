"""Decisions that replace the request's body: what a gateway gets back in each mode, and what is kept of it."""

from pathlib import Path

import pytest

from extproc.envoy.contract import Decision
from extproc.envoy.processor import Limits, Processor
from tests.unit.envoy import gateway as gw
from tests.unit.envoy.gateway import BUFFERED, DUPLEX, NONE, PICK, STREAMED, Ledger, running


def changed(body: bytes) -> Decision:
    """The usual pick, with another body for the engine."""
    return Decision(PICK.pool, PICK.destinations, PICK.charge_id, PICK.metadata, body)


@pytest.mark.parametrize("new", [b"", b"new", b"n" * 200_000])
async def test_buffered_reply_carries_new_body_and_its_length(tmp_path: Path, new: bytes) -> None:
    """Buffered: one mutation holds all of the new body, and `content-length` fits it."""
    ledger = Ledger(changed(new))
    async with running(Processor(ledger, Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.ask(gw.headers(mode=BUFFERED))
        reply = await stream.ask(gw.body(b"old", end=True))
        gw.assert_picks(reply, reply.request_body.response, more={"content-length": str(len(new))})
        mutation = reply.request_body.response.body_mutation
        assert (mutation.WhichOneof("mutation"), mutation.body) == ("body", new)
        assert await stream.finish() == []
    assert ledger.calls[0].body == b"old"
    assert ledger.settled == [(PICK, "")]


@pytest.mark.parametrize("new", [b"", b"new", b"n" * 200_000])
async def test_duplex_echoes_the_new_body_in_pieces(tmp_path: Path, new: bytes) -> None:
    """Duplex: the pieces hold the new body, with one end of stream; the client's own bytes go nowhere."""
    ledger = Ledger(changed(new))
    async with running(Processor(ledger, Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=DUPLEX), gw.body(b"o", end=False), gw.body(b"ld", end=True))
        first = await stream.reply()
        gw.assert_picks(first, first.request_headers.response)
        pieces = [reply.request_body.response.body_mutation for reply in await stream.finish()]
    assert {piece.WhichOneof("mutation") for piece in pieces} == {"streamed_response"}
    echoed = [piece.streamed_response for piece in pieces]
    assert b"".join(piece.body for piece in echoed) == new
    assert all(len(piece.body) <= 62_000 for piece in echoed)
    assert [piece.end_of_stream for piece in echoed] == [False] * (len(echoed) - 1) + [True]
    assert ledger.settled == [(PICK, "")]


@pytest.mark.parametrize("new", [b"", b"new"])
async def test_duplex_new_body_ends_before_the_trailers(tmp_path: Path, new: bytes) -> None:
    """With request trailers no piece of the new body is the last message: the trailers are."""
    async with running(Processor(Ledger(changed(new)), Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=DUPLEX), gw.body(b"old", end=False), gw.trailers())
        replies = await stream.finish()
    bodies = [r.request_body.response.body_mutation.streamed_response for r in replies if r.HasField("request_body")]
    assert b"".join(piece.body for piece in bodies) == new
    assert not any(piece.end_of_stream for piece in bodies)
    assert replies[-1].WhichOneof("response") == "request_trailers"


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX, STREAMED, NONE])
async def test_request_without_body_gets_none(tmp_path: Path, mode: int) -> None:
    """A GET stays without a body, in every mode."""
    async with running(Processor(Ledger(changed(b"new")), Limits()), tmp_path) as gateway:
        stream = gateway.open()
        reply = await stream.ask(gw.headers(method="GET", end=True, mode=mode))
        gw.assert_picks(reply, reply.request_headers.response)
        assert not reply.request_headers.response.HasField("body_mutation")
        assert await stream.finish() == []


async def test_empty_body_stays_empty(tmp_path: Path) -> None:
    """A body message without a byte is a request without a body."""
    async with running(Processor(Ledger(changed(b"new")), Limits()), tmp_path) as gateway:
        buffered, duplex = gateway.open(), gateway.open()
        await buffered.ask(gw.headers(mode=BUFFERED))
        reply = await buffered.ask(gw.body(b"", end=True))
        gw.assert_picks(reply, reply.request_body.response)
        assert not reply.request_body.response.HasField("body_mutation")
        await duplex.send(gw.headers(mode=DUPLEX), gw.body(b"", end=True))
        await duplex.reply()
        piece = (await duplex.reply()).request_body.response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (b"", True)
        assert await buffered.finish() == await duplex.finish() == []


async def test_body_that_passes_in_pieces_stays_as_it_is(tmp_path: Path) -> None:
    """Streamed mode picks by the headers: the pieces that follow are let through untouched."""
    async with running(Processor(Ledger(changed(b"new")), Limits()), tmp_path) as gateway:
        stream = gateway.open()
        await stream.ask(gw.headers(mode=STREAMED))
        reply = await stream.ask(gw.body(b"old", end=True))
        assert not reply.request_body.HasField("response")
        assert await stream.finish() == []
