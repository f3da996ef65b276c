"""Who may call the operator API."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admin.entry import Asking, Entry, is_loopback, operator, read_token, refusal
from extproc.clock import ManualClock
from extproc.errors import ConfigError, ForbiddenError, TokenUnusableError, UnauthorizedError

TOKEN = "0123456789abcdef"  # noqa: S105 -- of these tests
JSON = {"host": "127.0.0.1:9103", "content-type": "application/json"}


def asking(peer: str = "127.0.0.1", **headers: str) -> Asking:
    """A call over HTTP as the command makes it; headers, with underscores, are laid over its own."""
    return Asking(peer, {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}})


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", ""])
def test_without_a_token_this_host_may_call(peer: str) -> None:
    """By any loopback address, or a Unix socket."""
    assert refusal(asking(peer), listens_locally=True) == ""


@pytest.mark.parametrize(
    "peer", ["10.0.0.7", "::ffff:10.0.0.7", "fe80::1", "128.0.0.1", "0.0.0.0", "localhost.evil", "-"]
)
def test_without_a_token_nobody_else_may(peer: str) -> None:
    """Neither over HTTP nor over gRPC, and the remedy is named."""
    for web in (True, False):
        told = refusal(Asking(peer, JSON, web=web), listens_locally=True)
        assert "gateway.sidecar.admin_token" in told


def test_a_listener_for_others_takes_no_calls_without_a_token() -> None:
    """Whoever comes from loopback there may be a port that was forwarded: the address was opened to others."""
    assert "listeners on loopback only" in refusal(asking(), listens_locally=False)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("origin", "http://evil.example"),
        ("origin", "null"),
        ("sec_fetch_site", "cross-site"),
        ("sec_fetch_site", "same-origin"),
        ("x_forwarded_for", "10.0.0.7"),
        ("forwarded", "for=10.0.0.7"),
        ("via", "1.1 proxy"),
        ("x_forwarded_host", "x"),
        ("host", "evil.example"),
        ("host", "evil.example:9103"),
        ("host", "127.0.0.1.evil.example"),
        ("host", ""),
        ("host", "127.0.0.1, evil.example"),
        ("content_type", "text/plain"),
        ("content_type", "application/x-www-form-urlencoded"),
        ("content_type", "text/plain; application/json"),
        ("content_type", ""),
    ],
)
def test_web_pages_and_proxies_change_nothing_without_a_token(header: str, value: str) -> None:
    """A page in a browser on this host connects from loopback too; so does a proxy that stands here."""
    assert refusal(asking(**{header: value}), listens_locally=True)


async def test_a_refusal_is_an_error_of_the_tree() -> None:
    """Without a token a call is let in, or forbidden."""
    await Entry(None, "127.0.0.1").admit(asking())
    with pytest.raises(ForbiddenError):
        await Entry(None, "10.0.0.1").admit(asking())


async def test_refused_calls_are_logged_and_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """At once, and then every ten seconds with how many there were; nothing of what was shown."""
    clock = ManualClock()
    entry = Entry(None, "127.0.0.1", clock)
    with caplog.at_level(logging.WARNING):
        for at in range(25):
            with pytest.raises(ForbiddenError):
                await entry.admit(asking("10.0.0.7", authorization=f"Bearer {TOKEN}"))
            clock.advance(1.0 if at else 0.0)
    said = [(record.__dict__["peer"], record.__dict__["calls"]) for record in caplog.records]
    assert said == [("10.0.0.7", 1), ("10.0.0.7", 11), ("10.0.0.7", 10)]
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9103", "LOCALHOST:1", "[::1]:9103", "127.0.0.1", "127.1.2.3:80"]
)
def test_this_host_has_several_names(host: str) -> None:
    """All of them are its own."""
    assert refusal(asking(host=host), listens_locally=True) == ""


def test_what_only_reads_needs_no_content_type() -> None:
    """There is nothing to describe; a page whose name was pointed here still reads nothing."""
    for host, admitted in (("localhost", True), ("evil.example", False)):
        assert (refusal(Asking("::1", {"host": host}, changes=False), listens_locally=True) == "") is admitted


async def test_with_a_token_only_that_counts(tmp_path: Path) -> None:
    """From anywhere, and through whatever."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    entry = Entry(tmp_path / "token", "0.0.0.0")
    await entry.admit(asking("10.0.0.7", authorization=f"Bearer {TOKEN}", origin="http://x", host="keeper.internal"))
    await entry.admit(asking("10.0.0.7", authorization=f"bearer  {TOKEN} "))


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer é",
        f"Bearer {TOKEN}, Bearer {TOKEN}",
        f"Bearer {TOKEN.upper()}",
    ],
)
async def test_with_a_token_no_other_will_do(tmp_path: Path, shown: str) -> None:
    """Not even for who is on this host; the answer does not show the token, or what was sent."""
    (tmp_path / "token").write_text(TOKEN)
    with pytest.raises(UnauthorizedError) as caught:
        await Entry(tmp_path / "token", "127.0.0.1").admit(asking(authorization=shown))
    assert TOKEN not in str(caught.value)


async def test_a_new_token_counts_at_once(tmp_path: Path) -> None:
    """The file is read at each call; the old one is worth nothing any more."""
    file = tmp_path / "token"
    entry = Entry(file, "127.0.0.1")
    file.write_text(TOKEN)
    await entry.admit(asking(authorization=f"Bearer {TOKEN}"))
    file.write_text(TOKEN[::-1])
    await entry.admit(asking(authorization=f"Bearer {TOKEN[::-1]}"))
    with pytest.raises(UnauthorizedError):
        await entry.admit(asking(authorization=f"Bearer {TOKEN}"))


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"short", b"x" * 15, b"x" * 5000, b"two lines\nare no token", b"\xff" * 32, b" " * 40]
)
async def test_a_token_that_is_none_opens_nothing(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for an empty token nor for the content itself. It is said once, not at each try, and never shown."""
    (tmp_path / "token").write_bytes(content)
    entry = Entry(tmp_path / "token", "127.0.0.1")
    with caplog.at_level(logging.ERROR):
        for shown in ("", f"Bearer {content.decode('latin-1')}", "Bearer "):
            with pytest.raises(TokenUnusableError) as caught:
                await entry.admit(asking(authorization=shown))
            assert str(tmp_path) not in str(caught.value)
    [said] = [record for record in caplog.records if "operator API is closed" in record.message]
    assert "are no token" not in str(said.__dict__)


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
async def test_what_is_no_file_is_not_waited_for(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """A pipe that nobody writes to would keep a thread for each call, until the keeper has none left."""
    put(tmp_path / "token")
    with pytest.raises(TokenUnusableError):
        await Entry(tmp_path / "token", "127.0.0.1").admit(asking(authorization="Bearer x"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Key, file, reason and remedy."""
    with pytest.raises(ConfigError, match=r"gateway\.sidecar\.admin_token: .*none: cannot be read .*openssl rand"):
        read_token(tmp_path / "none")


@given(st.text(max_size=300))
def test_an_operator_is_one_short_line_and_never_the_controller(name: str) -> None:
    """Whatever is sent: it goes into logs and onto terminals."""
    told = operator({"x-warmpath-operator": name})
    assert 0 < len(told) <= 64 + len("operator ")
    assert told.isprintable()
    assert told.lower() != "controller"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ann@ops", "ann@ops"),
        ("", "operator"),
        ("\x1b[31m", "31m"),
        ("Controller", "operator Controller"),
        ("a\nb", "ab"),
    ],
)
def test_operators_names(name: str, told: str) -> None:
    """Letters and some signs stay; what a terminal obeys, and line ends, go."""
    assert operator({"x-warmpath-operator": name}) == told


@given(st.text(max_size=40))
def test_any_text_is_loopback_or_not(host: str) -> None:
    """Nothing raises."""
    assert is_loopback(host) in (True, False)
