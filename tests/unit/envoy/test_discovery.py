"""Endpoint discovery over real gRPC, as Envoy speaks it: answers, acknowledgements, refusals, reconnects."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.endpoint.v3 import eds_pb2_grpc

from extproc.envoy.discovery import TYPE_URL, Discovery, Member, MemberHealth, Roster, response
from extproc.envoy.server import bind, make_server
from tests.unit.envoy.gateway import connected, until_true

A, B, C = Member("10.0.0.1:8000"), Member("10.0.0.2:8000"), Member("[fd00::1]:8000")


class Envoy:
    """One EDS stream, from Envoy's end."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def request(
        self, names: Sequence[str], answered: discovery_pb2.DiscoveryResponse | None = None, error: str = ""
    ) -> None:
        """Subscribe, acknowledge `answered`, or refuse it with `error`."""
        request = discovery_pb2.DiscoveryRequest(type_url=TYPE_URL, resource_names=names)
        if answered is not None:
            request.response_nonce = answered.nonce
            request.version_info = answered.version_info
        if error:
            request.error_detail.message = error
        await self.call.write(request)

    async def answer(self) -> Any:
        """The next answer."""
        return await asyncio.wait_for(self.call.read(), 20)


def members(answer: Any) -> dict[str, list[tuple[str, int, int]]]:
    """Host, port and health of every endpoint, by cluster."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for resource in answer.resources:
        assert resource.type_url == answer.type_url == TYPE_URL
        load = endpoint_pb2.ClusterLoadAssignment.FromString(resource.value)
        found[load.cluster_name] = [
            (
                endpoint.endpoint.address.socket_address.address,
                endpoint.endpoint.address.socket_address.port_value,
                endpoint.health_status,
            )
            for locality in load.endpoints
            for endpoint in locality.lb_endpoints
        ]
    return found


HEALTHY, DRAINING = health_check_pb2.HEALTHY, health_check_pb2.DRAINING
HOST_A, HOST_B = ("10.0.0.1", 8000, HEALTHY), ("10.0.0.2", 8000, HEALTHY)


@asynccontextmanager
async def discovering(discovery: Discovery, folder: Path) -> AsyncIterator[Any]:
    """A discovery service on a Unix socket, and a stub connected to it."""
    address = f"unix:{folder / 'eds.sock'}"
    server = make_server([discovery.handler()], max_body_bytes=1024)
    bind(server, address)
    await server.start()
    try:
        async with connected(address) as channel:
            yield eds_pb2_grpc.EndpointDiscoveryServiceStub(channel)
    finally:
        discovery.close()
        await server.stop(0)


async def test_change_is_pushed_and_acknowledged(tmp_path: Path) -> None:
    """The first answer holds every member asked for; a change comes by itself, with a new version and nonce."""
    roster = Roster({"p": [A], "q": [B]})
    discovery = Discovery(roster)
    async with discovering(discovery, tmp_path) as stub:
        envoy = Envoy(stub.StreamEndpoints())
        await envoy.request(["p"])
        first = await envoy.answer()
        assert members(first) == {"p": [HOST_A]}
        await envoy.request(["p"], first)
        await until_true(lambda: discovery.counts.acknowledged == 1)
        roster.replace({"p": [A, Member(B.address, MemberHealth.DRAINING)], "q": [B]})
        second = await envoy.answer()
        assert members(second) == {"p": [HOST_A, ("10.0.0.2", 8000, DRAINING)]}
        assert first.version_info != second.version_info
        assert first.nonce != second.nonce
        assert discovery.counts.sent == 2


async def test_change_of_another_pool_sends_nothing(tmp_path: Path) -> None:
    """A stream hears only of the pools it asked for."""
    roster = Roster({"p": [A], "q": []})
    discovery = Discovery(roster)
    async with discovering(discovery, tmp_path) as stub:
        envoy = Envoy(stub.StreamEndpoints())
        await envoy.request(["p"])
        await envoy.request(["p"], await envoy.answer())
        roster.replace({"p": [A], "q": [B]})
        roster.replace({"p": [B], "q": [B]})
        assert members(await envoy.answer()) == {"p": [HOST_B]}
        assert discovery.counts.sent == 2


async def test_new_names_are_answered_at_once(tmp_path: Path) -> None:
    """A subscription that grows is answered in full; a name that is no pool has no members, so Envoy need not wait."""
    async with discovering(Discovery(Roster({"p": [A], "q": [C]})), tmp_path) as stub:
        envoy = Envoy(stub.StreamEndpoints())
        await envoy.request(["p"])
        await envoy.request(["p", "q", "nobody"], await envoy.answer())
        assert members(await envoy.answer()) == {"nobody": [], "p": [HOST_A], "q": [("fd00::1", 8000, HEALTHY)]}


async def test_a_pool_whose_names_are_not_resolved_yet_is_left_out(tmp_path: Path) -> None:
    """An Envoy that knows the pool's endpoints from before keeps them: it is not told that there are none."""
    async with discovering(Discovery(Roster({"p": [A], "unresolved": []})), tmp_path) as stub:
        envoy = Envoy(stub.StreamEndpoints())
        await envoy.request(["p", "unresolved"])
        assert members(await envoy.answer()) == {"p": [HOST_A]}


async def test_refused_answer_is_counted_and_not_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A refusal is logged with Envoy's reason; the same content is not sent again, the next change is."""
    roster = Roster({"p": [A]})
    discovery = Discovery(roster)
    async with discovering(discovery, tmp_path) as stub:
        envoy = Envoy(stub.StreamEndpoints())
        await envoy.request(["p"])
        await envoy.request(["p"], await envoy.answer(), error="malformed IP address")
        await until_true(lambda: discovery.counts.rejected == 1)
        assert "malformed IP address" in caplog.text
        roster.replace({"p": [B]})
        assert members(await envoy.answer()) == {"p": [HOST_B]}
        assert discovery.counts.sent == 2
        assert discovery.counts.acknowledged == 0


async def test_request_that_answers_an_older_response_is_ignored(tmp_path: Path) -> None:
    """A late acknowledgement of a response that has been overtaken changes nothing."""
    roster = Roster({"p": [A]})
    discovery = Discovery(roster)
    async with discovering(discovery, tmp_path) as stub:
        envoy = Envoy(stub.StreamEndpoints())
        await envoy.request(["p"])
        first = await envoy.answer()
        roster.replace({"p": [B]})
        second = await envoy.answer()
        await envoy.request(["q"], first)
        await envoy.request(["p"], second)
        await until_true(lambda: discovery.counts.acknowledged == 1)
        roster.replace({"p": [A, B]})
        assert members(await envoy.answer()) == {"p": [HOST_A, HOST_B]}


async def test_reconnect_gets_everything(tmp_path: Path) -> None:
    """An Envoy that comes back, whatever version it claims to have, gets the full state."""
    discovery = Discovery(Roster({"p": [A, B]}))
    async with discovering(discovery, tmp_path) as stub:
        old = Envoy(stub.StreamEndpoints())
        await old.request(["p"])
        first = await old.answer()
        old.call.cancel()
        await until_true(lambda: discovery.counts.streams == 0)
        again = Envoy(stub.StreamEndpoints())
        request = discovery_pb2.DiscoveryRequest(
            type_url=TYPE_URL, resource_names=["p"], version_info=first.version_info
        )
        await again.call.write(request)
        second = await again.answer()
    assert members(second) == {"p": [HOST_A, HOST_B]}
    assert second.version_info == first.version_info


async def test_fetch_answers_every_pool(tmp_path: Path) -> None:
    """A plain fetch without names lists every pool."""
    async with discovering(Discovery(Roster({"p": [A], "q": [B]})), tmp_path) as stub:
        answer = await stub.FetchEndpoints(discovery_pb2.DiscoveryRequest(type_url=TYPE_URL))
    assert members(answer) == {"p": [HOST_A], "q": [HOST_B]}


async def test_streams_end_when_either_side_ends_them(tmp_path: Path) -> None:
    """A half-closed stream and a closed service both end cleanly, and the count of streams returns to 0."""
    discovery = Discovery(Roster())
    async with discovering(discovery, tmp_path) as stub:
        leaving, staying = Envoy(stub.StreamEndpoints()), Envoy(stub.StreamEndpoints())
        for envoy in (leaving, staying):
            await envoy.request(["p"])
            await envoy.answer()
        await leaving.call.done_writing()
        assert not hasattr(await leaving.answer(), "resources")
        discovery.close()
        assert not hasattr(await staying.answer(), "resources")
        await until_true(lambda: discovery.counts.streams == 0)


def test_version_tells_content_apart() -> None:
    """The version follows what is said, not when: equal members, equal version; another health, another version."""
    one = response({"p": [A]}, ["p"], nonce="1").version_info
    assert response({"p": [A], "q": [B]}, ["p"], nonce="9").version_info == one
    assert response({"p": [Member(A.address, MemberHealth.UNHEALTHY)]}, ["p"], nonce="1").version_info != one


def test_roster_announces_only_changes() -> None:
    """Members that are the same as before wake nobody."""
    roster = Roster({"p": [A]})
    roster.replace({"p": [A]})
    assert roster.changes.version == 0
    roster.replace({})
    assert roster.changes.version == 1
