"""What a keeper asks its workers, over real gRPC."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from extproc import inner
from extproc.choose.explain import Explanation
from extproc.envoy.contract import Call
from extproc.envoy.health import Health
from extproc.envoy.server import bind, make_server
from extproc.errors import UnknownDecisionError, UnknownModelError, WarmpathError, WorkerError
from extproc.inner import Question
from tests.unit.top.parts import explanation

LONGEST = 9 * 1024 * 1024


class Oracle:
    """Explains: as it was told, or the call itself by its sizes."""

    def __init__(self, refusal: WarmpathError | None = None) -> None:
        self.refusal = refusal
        self.calls: list[Call] = []

    async def explain(self, call: Call) -> Explanation:
        """See `inner.Explains`."""
        self.calls.append(call)
        return self.recall("")

    def recall(self, name: str) -> Explanation:
        """See `inner.Explains`."""
        if self.refusal is not None:
            raise self.refusal
        return explanation(request_id=name)


@contextlib.asynccontextmanager
async def worker(
    path: Path, page: Callable[[], bytes] = bytes, health: Health | None = None, oracle: Oracle | None = None
) -> AsyncIterator[str]:
    """A server with a worker's inner services; gives its address."""
    health = health or Health()
    services = [inner.handler(page, oracle or Oracle()), health.handler()]
    server = make_server(services, max_body_bytes=LONGEST)
    address = f"unix:{path / 'w.sock'}"
    bind(server, address)
    await server.start()
    try:
        yield address
    finally:
        health.close()
        await server.stop(None)


async def test_the_page_is_read_as_it_is_at_that_moment(tmp_path: Path) -> None:
    """Every question asks the worker anew."""
    pages = iter([b"one\n", b"two\n"])
    async with worker(tmp_path, lambda: next(pages)) as address, inner.channel(address) as channel:
        assert await inner.read_page(channel) == b"one\n"
        assert await inner.read_page(channel) == b"two\n"


async def test_a_long_page_comes_whole(tmp_path: Path) -> None:
    """A pool with thousands of endpoints makes pages over 4 MiB, where grpc stops unless told otherwise."""
    page = b"x" * (9 * 1024 * 1024)
    async with worker(tmp_path, lambda: page) as address, inner.channel(address) as channel:
        assert await inner.read_page(channel) == page


async def test_a_worker_that_is_not_there_is_told_from_one_that_is(tmp_path: Path) -> None:
    """No answer is an error of its own kind, and not ready."""
    async with inner.channel(f"unix:{tmp_path / 'none.sock'}") as channel:
        with pytest.raises(WorkerError, match="UNAVAILABLE"):
            await inner.read_page(channel)
        assert not await inner.is_ready(channel)


async def test_a_page_that_fails_is_an_error_of_that_worker(tmp_path: Path) -> None:
    """A fault in making the page reaches the keeper as a worker that did not answer."""
    pages: Iterator[bytes] = iter(())
    async with worker(tmp_path, lambda: next(pages)) as address, inner.channel(address) as channel:
        with pytest.raises(WorkerError):
            await inner.read_page(channel)


async def test_readiness_follows_the_workers_health(tmp_path: Path) -> None:
    """Ready when the worker says so, not ready before and after."""
    health = Health()
    async with worker(tmp_path, bytes, health) as address, inner.channel(address) as channel:
        assert not await inner.is_ready(channel)
        health.set_ready(True)
        assert await inner.is_ready(channel)
        health.set_ready(False)
        assert not await inner.is_ready(channel)


async def test_a_question_reaches_the_worker_as_it_is(tmp_path: Path) -> None:
    """Path, headers and every byte of the longest body arrive; the explanation comes back as JSON."""
    oracle, body = Oracle(), bytes(range(256)) * (LONGEST // 256)
    async with worker(tmp_path, oracle=oracle) as address, inner.channel(address) as channel:
        told = await inner.explain(channel, Question("/v1/x", {"a": "b"}, body))
    assert oracle.calls == [Call("POST", "/v1/x", {"a": "b"}, body)]
    assert (told.status, msgspec.json.decode(told.body, type=Explanation)) == (200, explanation())


async def test_a_past_decision_is_asked_for_by_name(tmp_path: Path) -> None:
    """The name goes there, the explanation comes back."""
    async with worker(tmp_path) as address, inner.channel(address) as channel:
        told = await inner.recall(channel, "r-1")
    assert (told.status, msgspec.json.decode(told.body, type=Explanation).request_id) == (200, "r-1")


@pytest.mark.parametrize("refusal", [UnknownDecisionError("forgotten"), UnknownModelError("no such model")])
async def test_what_a_worker_refuses_comes_back_with_its_status(tmp_path: Path, refusal: WarmpathError) -> None:
    """An error raised on purpose is an answer, with the body that a client would see."""
    async with worker(tmp_path, oracle=Oracle(refusal)) as address, inner.channel(address) as channel:
        for told in (await inner.recall(channel, "x"), await inner.explain(channel, Question("/", {}, b""))):
            assert (told.status, told.body) == (404, refusal.body())


async def test_a_worker_that_is_gone_explains_nothing(tmp_path: Path) -> None:
    """No answer is an error of its own kind."""
    async with inner.channel(f"unix:{tmp_path / 'none.sock'}") as channel:
        with pytest.raises(WorkerError, match="UNAVAILABLE"):
            await inner.explain(channel, Question("/", {}, b""))
        with pytest.raises(WorkerError, match="UNAVAILABLE"):
            await inner.recall(channel, "x")
