"""Configured addresses become endpoints, and stay right while names and configurations change."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import Config, Model, Pool
from extproc.fleet.membership import Membership, system_resolver


class Names:
    """A resolver whose answers the test turns by hand."""

    def __init__(self, **found: Sequence[str]) -> None:
        self.found: dict[str, Sequence[str]] = dict(found)
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Sequence[str]:
        """See `Resolver`."""
        self.asked.append(host)
        if host not in self.found:
            raise OSError("no such name")
        return self.found[host]


def _config(**pools: list[str]) -> Config:
    return Config(
        models={"m": Model(pool=next(iter(pools)))},
        pools={name: Pool(endpoints=endpoints) for name, endpoints in pools.items()},
    )


async def _endpoints(names: Names, *addresses: str) -> Mapping[str, str]:
    membership = Membership(names)
    await membership.apply(_config(chat=list(addresses)))
    return membership.current()["chat"]


async def test_an_ip_address_is_its_own_id_and_asks_nobody() -> None:
    """Literal addresses, of both families, need no resolver."""
    names = Names()
    assert await _endpoints(names, "10.0.0.1:8000", "[::1]:8001", "[0:0::2]:1") == {
        "10.0.0.1:8000": "10.0.0.1:8000",
        "[::1]:8001": "[::1]:8001",
        "[::2]:1": "[::2]:1",
    }
    assert names.asked == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["10.0.0.7"], {"a:8000": "10.0.0.7:8000"}),
        (["::7"], {"a:8000": "[::7]:8000"}),
        (["::1", "127.0.0.1"], {"a:8000": "127.0.0.1:8000"}),
        (
            ["10.0.0.10", "10.0.0.9"],
            {"10.0.0.9:8000": "10.0.0.9:8000", "10.0.0.10:8000": "10.0.0.10:8000"},
        ),
        (["10.0.0.9", "10.0.0.9"], {"a:8000": "10.0.0.9:8000"}),
    ],
)
async def test_a_name_is_one_endpoint_or_one_for_each_address(found: list[str], expected: dict[str, str]) -> None:
    """One address keeps the configured id; several are endpoints by address; IPv4 wins over IPv6."""
    assert await _endpoints(Names(a=found), "a:8000") == expected


async def test_one_destination_is_one_endpoint() -> None:
    """Two addresses that lead to the same engine count once, under the id configured first."""
    names = Names(a=["10.0.0.1"], both=["10.0.0.1", "10.0.0.2"])
    assert await _endpoints(names, "a:8000", "10.0.0.1:8000", "both:8000") == {
        "a:8000": "10.0.0.1:8000",
        "10.0.0.2:8000": "10.0.0.2:8000",
    }


async def test_a_name_that_cannot_be_resolved_keeps_what_it_had(caplog: pytest.LogCaptureFixture) -> None:
    """A resolver that fails changes nothing, is said once, and is believed again when it answers."""
    caplog.set_level(logging.WARNING, "extproc.fleet.membership")
    names = Names(a=["10.0.0.1"])
    membership = Membership(names)
    await membership.apply(_config(chat=["a:8000", "b:8000"]))
    assert membership.current()["chat"] == {"a:8000": "10.0.0.1:8000"}
    names.found = {}
    await membership.refresh()
    await membership.refresh()
    assert membership.current()["chat"] == {"a:8000": "10.0.0.1:8000"}
    assert membership.version == 1
    assert [vars(record)["host"] for record in caplog.records] == ["b", "a"]
    names.found = {"a": ["10.0.0.2"], "b": ["10.0.0.3"]}
    await membership.refresh()
    assert membership.current()["chat"] == {"a:8000": "10.0.0.2:8000", "b:8000": "10.0.0.3:8000"}
    names.found = {}
    await membership.refresh()
    assert [vars(record)["host"] for record in caplog.records] == ["b", "a", "a", "b"]


async def test_names_that_dns_cannot_hold_are_a_failure_like_any_other() -> None:
    """A label over 63 characters makes the operating system's resolver raise; the endpoint is merely absent."""
    membership = Membership(system_resolver)
    await membership.apply(_config(chat=["a" * 64 + ":8000", "127.0.0.1:8000"]))
    assert list(membership.current()["chat"]) == ["127.0.0.1:8000"]


async def test_the_operating_system_resolves_localhost_to_one_endpoint() -> None:
    """`localhost` has addresses of both families on many hosts, and is still one engine."""
    membership = Membership()
    await membership.apply(_config(chat=["localhost:8000"]))
    assert list(membership.current()["chat"]) == ["localhost:8000"]


async def test_versions_count_changes_and_wake_those_who_wait() -> None:
    """`changed` returns at once when behind, waits when not, and an equal answer is no change."""
    names = Names(a=["10.0.0.1"])
    membership = Membership(names)
    first = asyncio.create_task(membership.changed(0))
    await membership.apply(_config(chat=["a:8000"]))
    assert await first == 1
    assert await membership.changed(0) == 1
    waiting = asyncio.create_task(membership.changed(1))
    await membership.refresh()
    await asyncio.sleep(0)
    assert not waiting.done()
    names.found["a"] = ["10.0.0.2"]
    await membership.refresh()
    assert await waiting == 2


async def test_a_new_configuration_replaces_pools_while_others_read_the_old() -> None:
    """`apply` swaps the whole view; a view already taken does not change under its reader."""
    membership = Membership(Names(a=["10.0.0.1"]))
    await membership.apply(_config(chat=["a:8000"], long=["10.0.0.9:1"]))
    before = membership.current()
    await membership.apply(_config(chat=["a:8000", "10.0.0.2:8000"]))
    assert before == {"chat": {"a:8000": "10.0.0.1:8000"}, "long": {"10.0.0.9:1": "10.0.0.9:1"}}
    assert membership.current() == {"chat": {"a:8000": "10.0.0.1:8000", "10.0.0.2:8000": "10.0.0.2:8000"}}
    assert membership.version == 2


async def test_run_looks_names_up_again() -> None:
    """While `run` goes, a name that moved is noticed without a call."""
    names = Names(a=["10.0.0.1"])
    membership = Membership(names, every_s=0.001)
    await membership.apply(_config(chat=["a:8000"]))
    running = asyncio.create_task(membership.run())
    names.found["a"] = ["10.0.0.2"]
    async with asyncio.timeout(10):
        await membership.changed(1)
    running.cancel()
    await asyncio.wait([running])
    assert membership.current()["chat"] == {"a:8000": "10.0.0.2:8000"}


@given(
    found=st.lists(st.lists(st.ip_addresses().map(str), min_size=1, max_size=4), min_size=1, max_size=4),
    literals=st.lists(st.ip_addresses(v=4).map(str), max_size=3),
)
async def test_no_two_endpoints_share_an_id_or_a_destination(found: list[list[str]], literals: list[str]) -> None:
    """For any names and answers: destinations are unique, and an id that is an address is its own destination."""
    names = Names(**{f"n{i}": addresses for i, addresses in enumerate(found)})
    endpoints = await _endpoints(names, *(f"{name}:80" for name in names.found), *(f"{ip}:80" for ip in literals))
    assert len(set(endpoints.values())) == len(endpoints)
    assert {f"{ip}:80" for ip in literals} <= set(endpoints.values())
    assert all(endpoint == destination for endpoint, destination in endpoints.items() if not endpoint.startswith("n"))
