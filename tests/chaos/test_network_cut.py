"""The network between worker and Redis is cut in mid-call: packets vanish, and no connection says so."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from extproc.state.redis import RedisStore
from tests.chaos.traffic import FLOWS, Traffic, all_is_well
from tests.valkey import Valkey
from tests.waiting import until


def iptables(action: str, direction: str, port: int) -> None:
    """Add (`-I`) or take away (`-D`) the rule that drops what goes to (`--dport`) or comes from (`--sport`) a port."""
    rule = ["-i", "lo", "-p", "tcp", direction, str(port), "-j", "DROP"]
    subprocess.run(["iptables", "-w", action, "INPUT", *rule], check=True, capture_output=True)


@contextlib.contextmanager
def cut(port: int) -> Iterator[None]:
    """No packet passes between the server on this port and anybody, in either direction."""
    with contextlib.ExitStack() as mending:
        for direction in ("--dport", "--sport"):
            iptables("-I", direction, port)
            mending.callback(iptables, "-D", direction, port)
        yield


@pytest.fixture
def cuttable(server: Valkey) -> Valkey:
    """The server, where this user may cut the network to it."""
    if os.geteuid() != 0 or shutil.which("iptables") is None:
        pytest.skip("cutting the network needs root and iptables")
    try:
        with cut(server.port):
            pass
    except subprocess.CalledProcessError as error:
        pytest.skip(f"iptables is not allowed here: {error.stderr.decode().strip()}")
    return server


@pytest.mark.parametrize("cut_s", [0.5, 4.0], ids=["short", "longer than a connection is kept"])
async def test_a_network_cut_in_mid_call_stops_no_decision(
    cuttable: Valkey, traffic: Traffic, witness: RedisStore, cut_s: float
) -> None:
    """Calls under way wait once, later ones do not ask; when the network is back, so is what is shared."""
    async with traffic.flowing():
        waited = traffic.waited
        with cut(cuttable.port):
            await until(lambda: traffic.store.degraded_in("p"))
            asked = traffic.store.stats.calls
            await asyncio.sleep(cut_s)
            await traffic.made(20 * FLOWS)
            assert traffic.store.stats.calls == asked
            assert traffic.waited - waited <= FLOWS
        await until(lambda: not traffic.store.degraded)
        await traffic.made(2 * FLOWS)
    await all_is_well(traffic, witness)
