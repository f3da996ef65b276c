"""What becomes of a request's prefill backlog when it ends before an engine can have done it."""

import pytest

from tests.unit.router.parts import Bench, endpoints, text

RATE = 10_000.0


async def test_a_prompt_that_is_refused_at_once_waits_for_nothing() -> None:
    """An engine answers 400 to a prompt beyond its context within milliseconds: no work is left in the ledger."""
    bench = Bench(*endpoints(1))
    other = await bench.chat(text(4000))
    before = await bench.store.loads("main")
    refused = await bench.chat(text(100_000, "v"))
    assert (await bench.store.loads("main"))["e0"].backlog_tokens > 20 * before["e0"].backlog_tokens
    await bench.router.settle(refused)
    after = (await bench.store.loads("main"))["e0"]
    assert after.backlog_tokens == pytest.approx(before["e0"].backlog_tokens)
    assert after.running == before["e0"].running
    await bench.router.settle(other)
    assert (await bench.store.loads("main"))["e0"].running == 0


async def test_what_was_prefilled_takes_nothing_of_others_with_it() -> None:
    """The backlog has drained by as much: given back once more, it would be that of the requests behind."""
    bench = Bench(*endpoints(1))
    first = await bench.chat(text(20_000))
    behind = await bench.chat(text(20_000, "v"))
    done_s = float(first.metadata["uncached_tokens"]) / RATE
    bench.clock.advance(done_s)
    left = (await bench.store.loads("main"))["e0"].backlog_tokens
    assert left == pytest.approx(float(behind.metadata["uncached_tokens"]))
    await bench.router.settle(first)
    assert (await bench.store.loads("main"))["e0"].backlog_tokens == pytest.approx(left)


async def test_one_that_was_served_before_others_takes_nothing_of_theirs_with_it() -> None:
    """Engines mix prompts: it is done before the ledger thinks so, and its work was part of what has drained."""
    bench = Bench(*endpoints(1))
    await bench.chat(text(100_000))
    behind = await bench.chat(text(60_000, "v"))
    bench.clock.advance(float(behind.metadata["uncached_tokens"]) / RATE)
    left = (await bench.store.loads("main"))["e0"].backlog_tokens
    await bench.router.settle(behind)
    assert (await bench.store.loads("main"))["e0"].backlog_tokens == pytest.approx(left)
