"""Mirrored requests on a real Envoy: the shadow gets them, and the client never notices."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from extproc.envoy.contract import SHADOW_HEADER, shadow_cluster
from tests.waiting import until, until_async
from tests.wire.shadow_parts import MIB, Stand, running_stand, whole

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKED = "n=5&size=200&gap=0.02"
ANSWER = whole(5, 200)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "duplex"])
async def stand(request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    """Requests are mirrored, two at once."""
    async with running_stand("mirror", request.param, most=2) as stand:
        yield stand


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def fresh(stand: Stand) -> None:
    """Engines and decisions as they were at first."""
    stand.desk.headers = {SHADOW_HEADER: shadow_cluster("new")}
    for engine in (stand.old, stand.new):
        engine.got.clear()
        engine.wait_s, engine.deaf = 0.0, False


async def test_a_mirrored_request_reaches_both_versions(stand: Stand) -> None:
    """The shadow gets the same path and body; nothing that names the client's key, or speaks for this gateway."""
    sent = {"authorization": "Bearer secret", "idempotency-key": "k", "x-request-id": "7c9e6679"}
    status, body, _ = await stand.ask(ASKED, body=b'{"model":"m","messages":[]}', headers=sent)
    assert (status, body) == (200, ANSWER)
    await until(lambda: len(stand.new.got) == 1)
    [client], [shadow] = stand.old.got, stand.new.got
    assert shadow.body == client.body == b'{"model":"m","messages":[]}'
    assert client.headers["authorization"] == "Bearer secret"
    assert {"authorization", "idempotency-key"} & shadow.headers.keys() == set()
    assert not [name for each in (client, shadow) for name in each.headers if name.startswith("x-warmpath-shadow")]
    assert not [name for name in shadow.headers if name.startswith(("x-warmpath", "x-gateway"))]


async def test_a_request_whose_decision_names_no_shadow_goes_to_one_engine(stand: Stand) -> None:
    """Only sampled requests are mirrored, and no client can ask for it."""
    stand.desk.headers = {}
    forged = {SHADOW_HEADER: shadow_cluster("new")}
    for _ in range(3):
        assert (await stand.ask("n=1", headers=forged))[0] == 200
    await asyncio.sleep(0.2)
    assert len(stand.old.got) == 3
    assert stand.new.got == []
    assert SHADOW_HEADER not in stand.desk.asked[-1].headers


async def test_an_unknown_cluster_is_passed_over(stand: Stand) -> None:
    """A worker may be newer than the gateway's configuration."""
    stand.desk.headers = {SHADOW_HEADER: "warmpath_shadow_gone"}
    assert (await stand.ask(ASKED))[:2] == (200, ANSWER)


async def test_a_silent_shadow_changes_nothing_and_is_bounded(stand: Stand) -> None:
    """Its circuit allows two at once; further ones are dropped, and clients get the whole answer all the same."""
    stand.new.wait_s = 4.0
    answers = await asyncio.gather(*(stand.ask(ASKED) for _ in range(12)))
    assert {answer[:2] for answer in answers} == {(200, ANSWER)}
    assert 1 <= len(stand.new.got) <= 3
    dropped = await _stat(stand, "upstream_rq_pending_overflow")
    assert dropped > 0
    # What is under way there is given up by the test's end: the engine closes its connections.
    await stand.new.stop()
    await stand.new.start()
    await until_async(lambda: _idle(stand))


async def test_a_shadow_that_does_not_read_holds_little_memory(stand: Stand) -> None:
    """A body of 20 MB is sent to both; the client is answered while the shadow has read next to nothing."""
    stand.new.deaf = True
    before = await _memory(stand)
    big = b'{"model":"m","x":"' + b"x" * (20 * MIB) + b'"}'
    status, body, _ = await stand.ask(ASKED, body=big)
    assert (status, body) == (200, ANSWER)
    held = await _memory(stand) - before
    assert held < 2 * len(big)
    await stand.new.stop()
    await stand.new.start()
    await until_async(lambda: _idle(stand))


async def test_a_dead_shadow_changes_nothing(stand: Stand) -> None:
    """Nothing listens there: connections are refused."""
    await stand.new.stop()
    try:
        for _ in range(5):
            assert (await stand.ask(ASKED))[:2] == (200, ANSWER)
    finally:
        await stand.new.start()


async def _stat(stand: Stand, name: str) -> int:
    page = await stand.envoy.get(f"/stats?filter=^cluster.{shadow_cluster('new')}.{name}$")
    return int(page.rpartition(":")[2]) if ":" in page else 0


async def _idle(stand: Stand) -> bool:
    return await _stat(stand, "upstream_rq_active") == 0


async def _memory(stand: Stand) -> int:
    return int(json.loads(await stand.envoy.get("/memory"))["allocated"])
