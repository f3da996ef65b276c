"""Copies of answers on a real Envoy: a worker gets them, and no client waits for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoy.contract import CAPTURE_HEADER, Copy
from tests.waiting import until
from tests.wire.shadow_parts import MIB, PATH, Kept, Stand, running_stand, whole

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED = "n=5&size=200&gap=0.02"
ANSWER = whole(5, 200)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "duplex"])
async def stand(request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    """Answers can be copied."""
    async with running_stand("compare", request.param) as stand:
        yield stand


def wanted(stand: Stand) -> Kept:
    """The next request's answer is to be copied."""
    stand.desk.headers = {CAPTURE_HEADER: "1"}
    kept = Kept()
    stand.copies.expect(f"r-{stand.desk.decided + 1}", kept)
    return kept


def only(kept: Kept) -> Copy:
    """The copy that came."""
    [copy] = kept.copies
    assert copy is not None
    return copy


def body_of(copy: Copy) -> bytes:
    """All that was copied."""
    return b"".join(piece for _, piece in copy.pieces)


async def test_a_copy_is_what_the_client_got(stand: Stand) -> None:
    """Status, headers and every piece, each with its own time."""
    kept = wanted(stand)
    status, body, _ = await stand.ask(ASKED)
    await until(lambda: bool(kept.copies))
    copy = only(kept)
    assert (status, body) == (200, ANSWER)
    assert (copy.status, copy.complete, body_of(copy)) == (200, True, ANSWER)
    assert copy.headers["content-type"] == "text/event-stream"
    times = [at for at, _ in copy.pieces]
    assert len(times) > 1
    assert times == sorted(times)
    assert copy.began_at <= times[0]
    assert times[-1] <= copy.over_at
    assert stand.copies.held == 0


async def test_only_marked_requests_are_copied(stand: Stand) -> None:
    """Others have no further stream, and no client can ask for a copy; engines do not see the mark."""
    stand.desk.headers = {}
    before = await _streams(stand)
    kept = Kept()
    stand.copies.expect(f"r-{stand.desk.decided + 1}", kept)
    assert (await stand.ask(ASKED, headers={CAPTURE_HEADER: "1"}))[0] == 200
    assert await _streams(stand) == before
    assert kept.copies == []
    marked = wanted(stand)
    await stand.ask(ASKED)
    await until(lambda: bool(marked.copies))
    assert await _streams(stand) == before + 1
    assert CAPTURE_HEADER not in stand.old.got[-1].headers
    stand.copies.give(f"r-{stand.desk.decided - 1}", None)


async def test_many_at_once_keep_their_own_answers(stand: Stand) -> None:
    """Copies are told apart by the charge of their decision."""
    stand.desk.headers = {CAPTURE_HEADER: "1"}
    first = stand.desk.decided + 1
    kept = [Kept() for _ in range(6)]
    for index, each in enumerate(kept):
        stand.copies.expect(f"r-{first + index}", each)
    answers = await asyncio.gather(*(stand.ask(f"n={index + 2}&size=300") for index in range(6)))
    await until(lambda: all(each.copies for each in kept))
    assert sorted(body_of(only(each)) for each in kept) == sorted(body for _, body, _ in answers)


async def test_an_error_of_the_engine_is_copied_as_one(stand: Stand) -> None:
    """A status that is none of success is a result, too."""
    kept = wanted(stand)
    await stand.old.stop()
    try:
        status, _, _ = await stand.ask(ASKED)
    finally:
        await stand.old.start()
    assert status == 503
    await until(lambda: bool(kept.copies))
    assert only(kept).status == 503


async def test_a_client_that_leaves_leaves_no_whole_copy(stand: Stand) -> None:
    """The copy ends where the client left, and says so."""
    kept = wanted(stand)
    charge = f"r-{stand.desk.decided + 1}"
    async with stand.http.post(f"{stand.envoy.url}{PATH}?n=200&size=100&gap=0.05", data=b"{}") as answer:
        await answer.content.readany()
        answer.close()
    stand.copies.ended(charge)
    await until(lambda: bool(kept.copies))
    [copy] = kept.copies
    assert copy is None or not copy.complete
    assert stand.copies.held == 0


async def test_an_engine_that_breaks_off_leaves_no_whole_copy(stand: Stand) -> None:
    """Half an answer is not taken for a whole one."""
    kept = wanted(stand)
    stand.old.cut = True
    with contextlib.suppress(aiohttp.ClientError):
        await stand.ask(ASKED)
    stand.old.cut = False
    stand.copies.ended(f"r-{stand.desk.decided}")
    await until(lambda: bool(kept.copies))
    [copy] = kept.copies
    assert copy is None or not copy.complete


async def test_an_answer_that_is_too_long_is_given_up(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets all of it; the worker keeps none of it."""
    monkeypatch.setattr(stand.copies, "_longest", MIB)
    kept = wanted(stand)
    status, body, _ = await stand.ask("n=400&size=8000")
    assert (status, body) == (200, whole(400, 8000))
    await until(lambda: bool(kept.copies))
    assert kept.copies == [None]
    assert stand.copies.held == 0


async def test_a_worker_that_fails_at_a_copy_is_not_noticed(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of the copy breaks in the middle of the answer, which goes on."""

    async def take(*_: object) -> None:
        await asyncio.sleep(0.05)
        raise RuntimeError

    monkeypatch.setattr(stand.copies, "take", take)
    stand.desk.headers = {CAPTURE_HEADER: "1"}
    assert (await stand.ask(ASKED))[:2] == (200, ANSWER)


async def _streams(stand: Stand) -> int:
    page = await stand.envoy.get("/stats?filter=ext_proc.captures.streams_started$")
    return int(page.rpartition(":")[2]) if ":" in page else 0
