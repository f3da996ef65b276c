"""What a server tells of itself, and what of it is found wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.state.report import Report, findings, parse_info, too_old

INFO = b"""# Server\r
redis_version:7.2.4\r
server_name:valkey\r
valkey_version:9.1.2\r
uptime_in_seconds:77\r
\r
# Clients\r
connected_clients:3\r
# Memory\r
used_memory:1200\r
maxmemory:4096\r
maxmemory_policy:volatile-lru\r
# Stats\r
evicted_keys:5\r
# Replication\r
role:slave\r
"""


def test_info_is_read() -> None:
    """Valkey's own version goes before the one of Redis that it is compatible with; `slave` is our replica."""
    assert parse_info(INFO) == Report(
        kind="valkey",
        version="9.1.2",
        role="replica",
        used_bytes=1200,
        max_bytes=4096,
        policy="volatile-lru",
        evicted_keys=5,
        connected_clients=3,
        uptime_s=77,
    )


@given(st.binary(max_size=300) | st.text("abc:_\r\n#1", max_size=100).map(str.encode))
def test_no_info_is_too_strange(text: bytes) -> None:
    """Lines that are unknown, cut off or no text are passed over, and nothing is found wrong with what is not told."""
    assert isinstance(findings(parse_info(text)), tuple)


def test_what_is_not_told_is_not_wrong() -> None:
    """A service that hides its settings gets no finding."""
    assert findings(parse_info(b"")) == ()


@pytest.mark.parametrize(
    ("kind", "version", "old"),
    [
        ("redis", "6.2.0", False),
        ("redis", "6.0.16", True),
        ("redis", "5.0.14", True),
        ("redis", "8.0.1", False),
        ("redis", "10.0", False),
        ("valkey", "7.2.5", False),
        ("valkey", "7.1.9", True),
        ("redis", "unstable", False),
        ("redis", "", False),
    ],
)
def test_versions_are_compared_by_number(kind: str, version: str, old: bool) -> None:
    """Redis 6.2 and Valkey 7.2 will do; a version that is no number is believed to be new."""
    report = Report(kind=kind, version=version)
    assert bool(too_old(report)) is old
    assert ("is too old" in " ".join(findings(report))) is old


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-ttl", "volatile-random"])
def test_a_policy_that_evicts_the_ledger_is_found(policy: str) -> None:
    """With a limit, any policy that may take keys without which the ledger is wrong; without a limit, none does."""
    (found,) = findings(Report(max_bytes=100, policy=policy))
    assert policy in found
    assert "set it to volatile-lru" in found
    assert findings(Report(policy=policy)) == ()


def test_a_server_that_will_refuse_is_found() -> None:
    """`noeviction` with a limit refuses every write once it is reached."""
    (found,) = findings(Report(max_bytes=100, policy="noeviction"))
    assert "set maxmemory-policy to volatile-lru" in found


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-lfu"])
def test_a_good_policy_is_not_found(policy: str) -> None:
    """Those that let go of pins unused for longest, or least."""
    assert findings(Report(max_bytes=100, policy=policy)) == ()


def test_a_nearly_full_server_is_found() -> None:
    """From nine tenths of the limit on."""
    assert findings(Report(used_bytes=899, max_bytes=1000, policy="volatile-lru")) == ()
    (found,) = findings(Report(used_bytes=900, max_bytes=1000, policy="volatile-lru"))
    assert "90 % full: raise maxmemory" in found


def test_a_replica_is_found() -> None:
    """It takes no writes."""
    (found,) = findings(Report(role="replica"))
    assert "let redis.url name the master" in found
    assert findings(Report(role="master")) == ()
