"""Requests are ended in the process that decided them, whichever process of the fleet saw their limit run out."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from extproc import ending, inner
from extproc.clock import ManualClock
from extproc.config import Sidecar
from extproc.ending import Ending
from extproc.envoy.endable import Endable
from extproc.envoy.server import bind, make_server
from extproc.errors import WarmpathError
from extproc.telemetry.families import Families
from extproc.telemetry.limit_metrics import LimitMetrics
from tests.unit.top.test_inner import Oracle
from tests.waiting import until


class Request:
    """A running request that remembers how it was ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    async def end(self, error: WarmpathError) -> bool:
        """See `endable.Ends`."""
        self.reasons.append(error.reason)
        return True


class Process:
    """A worker as far as ending goes."""

    def __init__(self, replica: str, fleet: Sequence[str], clock: ManualClock) -> None:
        self.registry = CollectorRegistry()
        self.endable = Endable()
        self.resolved = 0
        metrics = LimitMetrics(Families(self.registry))

        async def resolve() -> Sequence[str]:
            self.resolved += 1
            return fleet

        self.ending = Ending(self.endable, replica, resolve, metrics, clock)

    def calls(self, outcome: str) -> float:
        """Calls to other workers."""
        return self.registry.get_sample_value("warmpath_time_limit_calls_total", {"outcome": outcome}) or 0.0


class Fleet:
    """Two workers on sockets of one folder, and one that is gone."""

    def __init__(self, folder: Path, clock: ManualClock) -> None:
        self.addresses = [f"unix:{folder}/{name}.sock" for name in ("a", "b", "gone")]
        self.a, self.b = (Process(name, self.addresses, clock) for name in ("a", "b"))


@contextlib.asynccontextmanager
async def serving(process: Process, address: str) -> AsyncIterator[None]:
    """Let others ask it."""
    server = make_server([inner.handler(bytes, Oracle(), process.ending.asked)], max_body_bytes=1024)
    bind(server, address)
    await server.start()
    try:
        yield
    finally:
        await process.ending.close()
        await server.stop(None)


@contextlib.asynccontextmanager
async def fleet(folder: Path, clock: ManualClock | None = None) -> AsyncIterator[Fleet]:
    """Both serve."""
    made = Fleet(folder, clock or ManualClock())
    async with serving(made.a, made.addresses[0]), serving(made.b, made.addresses[1]):
        yield made


async def test_ones_own_request_is_ended_here(tmp_path: Path) -> None:
    """Nobody else is asked."""
    async with fleet(tmp_path) as all_:
        request = Request()
        all_.a.endable.add("a-1", request)
        all_.a.ending.end("a-1", "first_token")
        await all_.a.ending.idle()
        assert request.reasons == ["time_limit_first_token"]
        assert (all_.a.resolved, all_.a.calls("told")) == (0, 0)


async def test_anothers_request_is_ended_there(tmp_path: Path) -> None:
    """All are told at first, also when one of them is gone; from then on only the worker that has it."""
    async with fleet(tmp_path) as all_:
        first, second = Request(), Request()
        all_.b.endable.add("b-1", first)
        all_.a.ending.end("b-1", "stall")
        await until(lambda: first.reasons == ["time_limit_stall"])
        await until(lambda: (all_.a.calls("told"), all_.a.calls("unreachable")) == (2, 1))
        all_.b.endable.add("b-2", second)
        all_.a.ending.end("b-2", "stall")
        await until(lambda: second.reasons == ["time_limit_stall"])
        await until(lambda: all_.a.calls("told") == 3)
        assert (all_.a.calls("unreachable"), all_.a.resolved) == (1, 1)


async def test_many_requests_go_in_one_call(tmp_path: Path) -> None:
    """What runs out in one batch of entries is told at once."""
    async with fleet(tmp_path) as all_:
        requests = [Request() for _ in range(50)]
        for number, request in enumerate(requests):
            all_.b.endable.add(f"b-{number}", request)
            all_.a.ending.end(f"b-{number}", "stall")
        await until(lambda: all(request.reasons for request in requests))
        assert all_.a.calls("told") <= 4


async def test_a_request_that_nobody_has_harms_nothing(tmp_path: Path) -> None:
    """Its worker died: all are told, and nothing ends."""
    async with fleet(tmp_path) as all_:
        all_.a.ending.end("dead-1", "stall")
        await until(lambda: all_.a.calls("told") == 2)


async def test_the_fleet_is_looked_up_again(tmp_path: Path) -> None:
    """Hosts come and go: names are resolved again after ten seconds."""
    clock = ManualClock()
    async with fleet(tmp_path, clock) as all_:
        for wait_s, resolved in ((0.0, 1), (9.9, 1), (0.2, 2)):
            clock.advance(wait_s)
            all_.a.ending.end("dead-1", "stall")
            await all_.a.ending.idle()
            assert all_.a.resolved == resolved


async def test_workers_of_all_hosts_are_found() -> None:
    """Each address of each host, with each worker's port; a host that has none is left out."""
    sidecar = Sidecar(hosts=["127.0.0.1", "127.0.0.2", "[::1]", "no.such.host.invalid"], workers=2, worker_port=9002)
    assert await ending.workers(sidecar) == [
        "127.0.0.1:9002",
        "127.0.0.1:9003",
        "127.0.0.2:9002",
        "127.0.0.2:9003",
        "[::1]:9002",
        "[::1]:9003",
    ]
    sockets = Sidecar(socket_dir="/run/warmpath", workers=2)
    assert await ending.workers(sockets) == ["unix:/run/warmpath/worker-0.sock", "unix:/run/warmpath/worker-1.sock"]
