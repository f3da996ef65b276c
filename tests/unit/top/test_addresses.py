"""Where processes listen, how they are reached, and where the store is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import addresses
from extproc.config import Redis, Sidecar
from extproc.errors import ConfigError


@pytest.mark.parametrize(
    ("bind", "bound", "reached"),
    [
        ("127.0.0.1", "127.0.0.1:9004", "127.0.0.1:9004"),
        ("0.0.0.0", "0.0.0.0:9004", "127.0.0.1:9004"),
        ("10.0.0.0", "10.0.0.0:9004", "10.0.0.0:9004"),
        ("::", "[::]:9004", "[::1]:9004"),
        ("[::]", "[::]:9004", "[::1]:9004"),
        ("fd00::7", "[fd00::7]:9004", "[fd00::7]:9004"),
        ("sidecar.local", "sidecar.local:9004", "sidecar.local:9004"),
    ],
)
def test_a_worker_is_reached_where_it_listens(bind: str, bound: str, reached: str) -> None:
    """IPv6 addresses get brackets; only one that means every address is reached over loopback."""
    sidecar = Sidecar(bind=bind)
    assert addresses.worker(sidecar, 2) == bound
    assert addresses.local_worker(sidecar, 2) == reached


def test_sockets_lie_in_the_configured_folder() -> None:
    """With `socket_dir`, both ends use the same path, and no port."""
    sidecar = Sidecar(socket_dir="/run/warmpath")
    assert addresses.worker(sidecar, 0) == addresses.local_worker(sidecar, 0) == "unix:/run/warmpath/worker-0.sock"
    assert addresses.keeper(sidecar) == "unix:/run/warmpath/keeper.sock"


def test_the_keeper_has_a_port_of_its_own() -> None:
    """The keeper's port does not depend on the number of workers."""
    assert addresses.keeper(Sidecar(bind="::1", keeper_port=7)) == "[::1]:7"


@pytest.mark.parametrize("url", ["redis://h", "redis://:p%2Fw@h:1/2", "rediss://u:p@h/0", "unix:///run/valkey.sock"])
def test_a_readable_url_is_the_stores(url: str) -> None:
    """What can be read is passed on as it is."""
    assert addresses.store(Redis(url=url)) == url


def test_without_a_url_the_remedy_is_told() -> None:
    """`serve` needs a store; the error says what to do."""
    with pytest.raises(ConfigError, match=r"redis\.url is missing: give a Redis URL, or use `warmpath up`"):
        addresses.store(Redis())


@given(password=st.text("abcdefghijkq", min_size=12))
def test_an_unreadable_url_is_refused_without_showing_it(password: str) -> None:
    """A `/` in a password ends the host: what stands before it would look like a port, and must not be printed."""
    with pytest.raises(ConfigError) as caught:
        addresses.store(Redis(url=f"redis://:{password}/x@host:6379"))
    assert password not in str(caught.value)
    assert "%2F" in str(caught.value)
    assert caught.value.__suppress_context__
