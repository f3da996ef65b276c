"""A sidecar's metrics page as a few figures, and errors where it tells nothing."""

import asyncio

import pytest

from extproc.errors import EngineError, StackError
from extproc.replay import told
from extproc.replay.told import Told
from extproc.telemetry.metrics import Decided, Finished, Metrics


def decided(pool: str, moved: bool, predicted: float) -> Decided:
    """A decision of that pool."""
    session = "moved" if moved else "pinned"
    return Decided(
        pool=pool,
        policy="predicted_ttft",
        session=session,  # type: ignore[arg-type]
        seconds=0.001,
        predicted_cached_tokens=predicted,
        best_cached_tokens=predicted,
    )


def finished(cached: int, expected_cached: float, ttft_s: float, expected_s: float, pool: str = "engines") -> Finished:
    """An answer to a prompt of 1,000 tokens."""
    return Finished(
        pool=pool,
        endpoint="e",
        outcome="ok",
        ttft_s=ttft_s,
        prompt_tokens=1000,
        cached_tokens=cached,
        output_tokens=5,
        predicted_ttft_s=expected_s,
        predicted_cached_tokens=expected_cached,
    )


def test_counts_are_summed_over_pools() -> None:
    """Moved sessions are one outcome among others, and every pool's predictions count."""
    metrics = Metrics()
    for pool, moved in (("engines", True), ("engines", False), ("others", True)):
        metrics.decided(decided(pool, moved, 600.0))
    heard = told.read(metrics.page())
    assert (heard.moved_sessions, heard.predicted_cached_tokens) == (2, 1800.0)


def test_errors_are_medians_to_the_width_of_a_bucket() -> None:
    """One wild answer among five moves neither; the TTFT's error is by the real time, whichever is the longer."""
    metrics = Metrics()
    for _ in range(2):
        metrics.finished(finished(400, 430.0, ttft_s=0.095, expected_s=0.1))
        metrics.finished(finished(400, 370.0, ttft_s=0.105, expected_s=0.1))
    metrics.finished(finished(0, 900.0, ttft_s=9.0, expected_s=0.1))
    heard = told.read(metrics.page())
    # 3 % of the prompt lies between the bounds 2 and 5 %; 0.95 and 1.05 lie in the middle of theirs.
    assert heard.cached_error == pytest.approx(0.035)
    assert heard.ttft_error == pytest.approx(1 / 0.95 - 1)


def test_errors_are_of_all_pools_together() -> None:
    """A pool with one bad answer does not hide another one with three good ones."""
    metrics = Metrics()
    for _ in range(3):
        metrics.finished(finished(400, 405.0, ttft_s=0.105, expected_s=0.1))
    metrics.finished(finished(0, 900.0, ttft_s=0.9, expected_s=0.1, pool="others"))
    assert told.read(metrics.page()).cached_error == pytest.approx(0.005)


def test_what_lies_beyond_the_last_bound_counts_as_that_bound() -> None:
    """Nothing larger is known of it; a TTFT of five times the expected and more was off by four fifths or more."""
    metrics = Metrics()
    metrics.finished(finished(400, 400.0, ttft_s=60.0, expected_s=0.1))
    assert told.read(metrics.page()).ttft_error == pytest.approx(0.8)


def test_a_sidecar_that_never_predicted_is_not_one_that_predicted_nothing() -> None:
    """Policies that do not look at caches have no predictions, and so no errors."""
    assert told.read(Metrics().page()) == Told(0, None, None, None)


def test_a_page_that_cannot_be_read_is_an_error() -> None:
    """A half-written number is not passed on as a result."""
    with pytest.raises(EngineError, match="line 1"):
        told.read(b'warmpath_sessions_total{outcome="moved"} x\n')


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"])
async def test_a_sidecar_that_does_not_answer_is_an_error_of_the_stack(answer: bytes) -> None:
    """Gone or not ready: the text names the part, and no figures are made up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(StackError, match="sidecar"):
        await told.ask(f"http://127.0.0.1:{port}/metrics")
    server.close()
