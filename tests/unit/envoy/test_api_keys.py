"""API keys: how they are made and kept, what a file of them may say, and which header lets whom in."""

import contextlib
import hashlib
import secrets
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.envoy import api_keys
from extproc.errors import ConfigError

FILE = Path("/etc/keys")
KEY = "wp-" + "k" * 43
CLIENTS = {hashlib.sha256(KEY.encode()).digest(): "acme", hashlib.sha256(b"other-key").digest(): "other"}


def test_a_key_is_256_random_bits() -> None:
    """Two keys differ, and each can be sent in a header as it is."""
    asked: list[int] = []

    def random(count: int) -> str:
        asked.append(count)
        return secrets.token_urlsafe(count)

    one, other = api_keys.new(random), api_keys.new(random)
    assert asked == [32, 32]
    assert one != other
    assert one.startswith("wp-")
    assert one.isascii()
    assert one.isprintable()


def test_the_file_keeps_a_hash_and_no_key() -> None:
    """The line of a key is `NAME sha256:HASH`, by the published algorithm."""
    assert api_keys.line("acme", KEY) == f"acme sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "-a", "ä", "x" * 64, "a sha256:"])
def test_a_client_needs_a_name_that_can_be_a_header_and_a_label(name: str) -> None:
    """Anything else is refused before it is written."""
    with pytest.raises(ConfigError, match="cannot name a client"):
        api_keys.line(name, KEY)


def test_what_is_written_is_read() -> None:
    """Several keys of one client, empty lines, comments, blanks and line ends of another system."""
    lines = ["# keys", api_keys.line("acme", KEY), "", f"  {api_keys.line('acme', 'old')}  ", api_keys.line("b", "x")]
    told = api_keys.parse("\r\n".join(lines).encode(), FILE)
    assert told == {api_keys.digest(KEY.encode()): "acme", api_keys.digest(b"old"): "acme", api_keys.digest(b"x"): "b"}


@pytest.mark.parametrize(
    "wrong", [f"acme {KEY}", KEY, "acme sha256:12", f"acme sha256:{'A' * 64}", f"acme md5:{'a' * 64}", "acme"]
)
def test_a_wrong_line_is_told_by_its_number_and_never_quoted(wrong: str) -> None:
    """Whoever puts a key into the file by mistake does not find it in a log."""
    with pytest.raises(ConfigError) as caught:
        api_keys.parse(f"# one\n{api_keys.line('b', 'x')}\n{wrong}\n".encode(), FILE)
    assert str(caught.value).startswith("/etc/keys:3: ")
    assert "warmpath key" in str(caught.value)
    assert KEY not in str(caught.value)


def test_one_key_is_one_clients() -> None:
    """The same key under two names would make the tenant a matter of chance."""
    with pytest.raises(ConfigError, match=r"/etc/keys:2: the same key is another client's"):
        api_keys.parse(f"{api_keys.line('a', KEY)}\n{api_keys.line('b', KEY)}\n".encode(), FILE)


def test_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    """Missing, no text, far too large."""
    with pytest.raises(ConfigError, match=r"cannot be read .*warmpath key"):
        api_keys.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 1"):
        api_keys.parse(b"a\xff", FILE)
    with pytest.raises(ConfigError, match="larger than"):
        api_keys.parse(b"#" * (16 * 1024 * 1024 + 1), FILE)


@given(st.binary(max_size=200))
def test_any_content_is_read_or_refused(content: bytes) -> None:
    """No bytes make the reader fail in another way than with an error of ours."""
    told: dict[bytes, str] = {}
    with contextlib.suppress(ConfigError):
        told = api_keys.parse(content, FILE)
    assert all(len(key) == 32 and name for key, name in told.items())


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ({"authorization": [b"Bearer " + KEY.encode()]}, "acme"),
        ({"authorization": [b"  bEaReR   " + KEY.encode() + b" "]}, "acme"),
        ({"api-key": [KEY.encode()]}, "acme"),
        ({"x-api-key": [b"nothing", KEY.encode()]}, "acme"),
        ({"authorization": [b"Bearer nothing"], "x-api-key": [b"other-key"]}, "other"),
        ({"authorization": [b"Bearer other-key"], "x-api-key": [KEY.encode()]}, "other"),
        ({"authorization": [KEY.encode()]}, None),
        ({"authorization": [b"Basic " + KEY.encode()]}, None),
        ({"authorization": [b"Bearer"]}, None),
        ({"authorization": [b"Bearer " + KEY.encode() + b"," + KEY.encode()]}, None),
        ({"x-api-key": [KEY.encode()[:-1]]}, None),
        ({"x-api-key": [b""]}, None),
        ({"x-api-key": [b"\xff\x00"]}, None),
        ({"x-warmpath-tenant": [b"acme"]}, None),
        ({}, None),
    ],
)
def test_a_header_lets_in_whose_key_it_holds(headers: dict[str, list[bytes]], client: str | None) -> None:
    """Each form that SDKs send is read, the first one that is known counts, and nothing else lets in."""
    assert api_keys.client_of(headers, CLIENTS) == client


def test_no_file_means_nobody() -> None:
    """An empty file lets in nobody, not everybody."""
    assert api_keys.client_of({"x-api-key": [b""], "authorization": [b"Bearer "]}, {}) is None
