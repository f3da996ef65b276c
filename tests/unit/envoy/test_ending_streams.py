"""A running request is ended by its charge: before its answer with an error, and settled once in any case."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from extproc.envoy.contract import Decision
from extproc.envoy.processor import Limits, Processor
from extproc.errors import FirstTokenLimitError
from tests.unit.envoy import gateway as gw
from tests.unit.envoy.gateway import BUFFERED, DUPLEX, PICK, Ledger, running

LIMITED = msgspec.structs.replace(PICK, limited=True)
ERROR = FirstTokenLimitError("too late")


@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX])
async def test_a_running_request_is_ended(tmp_path: Path, mode: int) -> None:
    """The gateway gets an answer that names the reason; the charge is settled when it closes the stream."""
    ledger = Ledger(LIMITED)
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=mode), gw.body(b"{}", end=True))
        await gw.until_true(lambda: len(processor.endable) == 1)
        assert await processor.endable.end("c-1", ERROR)
        reply = await stream.reply()
        while not reply.HasField("immediate_response"):
            reply = await stream.reply()
        answer = reply.immediate_response
        assert (answer.status.code, answer.details) == (504, "warmpath_time_limit_first_token")
        told = {each.header.key: each.header.raw_value for each in answer.headers.set_headers}
        assert told["x-warmpath-reason"] == b"time_limit_first_token"
        assert not await processor.endable.end("c-1", ERROR)
        await stream.finish()
        await gw.until_true(lambda: processor.counts.open == 0)
        await processor.settled()
    assert [decision.charge_id for decision, _ in ledger.settled] == ["c-1"]
    assert (len(processor.endable), processor.counts.unexpected, processor.counts.refused) == (0, 0, {})


async def test_what_is_over_or_unknown_is_not_ended(tmp_path: Path) -> None:
    """A charge of another process, of a request that ended, and of one without limits."""
    ledger = Ledger(PICK)
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=BUFFERED), gw.body(b"{}", end=True))
        await gw.until_true(lambda: processor.counts.decided == 1)
        assert not await processor.endable.end("c-1", ERROR)
        await stream.finish()
        await gw.until_true(lambda: processor.counts.open == 0)
        assert not await processor.endable.end("elsewhere-1", ERROR)


async def test_the_whole_time_ends_a_request_where_the_gateway_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign gateway may know no limits: the stream's own timer is the last resort."""
    monkeypatch.setattr("extproc.envoy.stream._GRACE_S", 0.0)
    ledger = Ledger(msgspec.structs.replace(LIMITED, total_s=0.05))
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path) as gateway:
        stream = gateway.open()
        await stream.send(gw.headers(mode=BUFFERED), gw.body(b"{}", end=True))
        async with asyncio.timeout(20):
            reply = await stream.reply()
            while not reply.HasField("immediate_response"):
                reply = await stream.reply()
        assert reply.immediate_response.details == "warmpath_time_limit"
        await stream.finish()
        await gw.until_true(lambda: processor.counts.open == 0)


async def test_a_request_that_ends_in_time_leaves_no_timer(tmp_path: Path) -> None:
    """Nothing of a request is left when its stream has closed."""
    ledger = Ledger(msgspec.structs.replace(LIMITED, total_s=3600.0))
    processor = Processor(ledger, Limits())
    async with running(processor, tmp_path) as gateway:
        before = len(asyncio.all_tasks())
        stream = gateway.open()
        await stream.send(gw.headers(mode=BUFFERED), gw.body(b"{}", end=True))
        await gw.until_true(lambda: len(processor.endable) == 1)
        await stream.finish()
        await gw.until_true(lambda: processor.counts.open == 0)
        await processor.settled()
        await gw.until_true(lambda: len(asyncio.all_tasks()) <= before)
    assert len(processor.endable) == 0


def test_further_headers_go_to_the_gateways_router() -> None:
    """Limits that Envoy enforces by itself travel as request headers."""
    from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

    from extproc.envoy.replies import on_body

    decision: Decision = msgspec.structs.replace(PICK, headers={"x-envoy-upstream-rq-per-try-timeout-ms": "700"})
    reply = pb.ProcessingResponse.FromString(on_body(decision))
    told = {each.header.key: each.header.raw_value for each in reply.request_body.response.header_mutation.set_headers}
    assert told["x-envoy-upstream-rq-per-try-timeout-ms"] == b"700"
