"""A decision that replaces the request's body, behind a real Envoy: what the engine then gets, in both body modes."""

import io
from collections.abc import AsyncIterator
from typing import Literal

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from tests.acceptance import h2c
from tests.wire.test_services import MIB, Stack, eventually, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"

Client = Literal["http/1 with a length", "http/1 in chunks", "http/2"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "duplex"])
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """One stack in each body mode."""
    async with running_stack(request.param) as running:
        yield running


def replace(stack: Stack, body: bytes, *order: int) -> None:
    """Make the desk pick these engines, in order, and send them `body`."""
    stack.desk.outcome = msgspec.structs.replace(stack.pick(*order), body=body)


async def send(stack: Stack, client: Client, body: bytes, query: str = "") -> int:
    """Send one request in one of the ways clients do; the status of its answer."""
    if client == "http/2":
        address = stack.envoy.url.removeprefix("http://")
        return (await h2c.post(address, f"{CHAT}{query}", body, {"content-length": str(len(body))}))[0]

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]

    data = pieces() if client == "http/1 in chunks" else io.BytesIO(body)
    async with stack.http.post(f"{stack.envoy.url}{CHAT}{query}", data=data) as answer:
        await answer.read()
        return answer.status


def length_at_engine(stack: Stack, size: int) -> str:
    """The `content-length` an engine must see.

    Envoy takes the header away in full-duplex mode, where nobody knows the length at the time of the headers, and
    sends such a body in chunks.
    """
    buffered = stack.processor.limits.body_mode == "buffered"
    return str(size) if buffered else ""


@pytest.mark.parametrize("client", ["http/1 with a length", "http/1 in chunks", "http/2"])
@pytest.mark.parametrize(
    ("old", "new"),
    [(2, 0), (2, 1), (13, 13), (16_000, 15_999), (100, 200_000)],
    ids=["none left", "shorter", "as long", "one byte less", "over one piece"],
)
async def test_engine_gets_exactly_the_new_bytes(stack: Stack, client: Client, old: int, new: int) -> None:
    """However the client sent its body, the engine gets the decision's, whole, under a length that is right."""
    body = bytes(at % 251 for at in range(new))
    replace(stack, body, 1)
    assert await send(stack, client, b"o" * old) == 200
    assert stack.desk.calls[-1].body == b"o" * old
    assert stack.engines[1].last_body == body
    assert stack.engines[1].lengths[-1] == length_at_engine(stack, new)
    await eventually(lambda: not stack.desk.open and stack.processor.counts.held_bytes == 0)


async def test_long_bodies_can_be_replaced(stack: Stack) -> None:
    """Megabytes, well past every buffer of a connection, arrive whole."""
    # Made fast: the services that Envoy asks for their health are on this thread too.
    body = np.arange(2 * MIB, dtype="<u4").tobytes()
    replace(stack, body, 2)
    assert await send(stack, "http/1 with a length", b"o" * 3 * MIB) == 200
    assert stack.engines[2].last_body == body
    assert stack.engines[2].lengths[-1] == length_at_engine(stack, len(body))


@pytest.mark.parametrize("size", [12, 100_000])
async def test_a_retry_sends_the_new_body_again(stack: Stack, size: int) -> None:
    """The second endpoint of the list gets the same replaced body that the first one refused."""
    first, second = stack.engines[0], stack.engines[1]
    first.last_body = second.last_body = b""
    body = b"n" * size
    replace(stack, body, 0, 1)
    assert await send(stack, "http/1 with a length", b"{}", f"?full={first.address}") == 200
    assert (first.last_body, second.last_body) == (body, body)
    assert first.lengths[-1] == second.lengths[-1] == length_at_engine(stack, size)


async def test_request_without_a_body_stays_without(stack: Stack) -> None:
    """A decision's body has no effect on a GET, nor on a POST of nothing."""
    replace(stack, b"not for you", 0)
    async with stack.http.get(f"{stack.envoy.url}/v1/models") as answer:
        assert answer.status == 200
    assert stack.engines[0].last_body == b""
    for client in ("http/1 with a length", "http/1 in chunks", "http/2"):
        assert await send(stack, client, b"") == 200
        assert stack.engines[0].last_body == b""


async def test_new_bodies_leave_nothing_unexpected(stack: Stack) -> None:
    """Nothing that a real Envoy said in this module was outside the phase table, and everything was settled."""
    await eventually(lambda: stack.processor.counts.open == 0)
    await stack.processor.settled()
    assert stack.processor.counts.unexpected == stack.processor.counts.unreadable == 0
    assert stack.processor.counts.settled == stack.processor.counts.decided
