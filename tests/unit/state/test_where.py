"""Store URLs: every form that is promised, and errors that name a remedy and never a password."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ConfigError
from extproc.state.where import Address, Login, Tls, Where, parse

SCHEMES = (
    "redis://",
    "rediss://",
    "unix://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "redis+cluster://",
    "rediss+cluster://",
)


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://h", Where(kind="single", addresses=(Address("h", 6379),))),
        ("redis://h:7/", Where(kind="single", addresses=(Address("h", 7),))),
        ("redis://[fd00::1]:7/3", Where(kind="single", addresses=(Address("fd00::1", 7),), login=Login(database=3))),
        ("redis://[::1]", Where(kind="single", addresses=(Address("::1", 6379),))),
        (
            "redis://me:p%40%2F%3F%25@h?db=2",
            Where(
                kind="single",
                addresses=(Address("h", 6379),),
                login=Login(username="me", password="p@/?%", database=2),
            ),
        ),
        ("redis://:pw@h", Where(kind="single", addresses=(Address("h", 6379),), login=Login(password="pw"))),
        ("redis://:p@ss:w@h", Where(kind="single", addresses=(Address("h", 6379),), login=Login(password="p@ss:w"))),
        ("rediss://h", Where(kind="single", addresses=(Address("h", 6379),), login=Login(tls=Tls()))),
        (
            "rediss://h?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem&ssl_check_hostname=false",
            Where(
                kind="single",
                addresses=(Address("h", 6379),),
                login=Login(tls=Tls(ca_certs="/ca.pem", certfile="/c.pem", keyfile="/k.pem", check_hostname=False)),
            ),
        ),
        (
            "rediss://h?ssl_cert_reqs=none",
            Where(kind="single", addresses=(Address("h", 6379),), login=Login(tls=Tls(verify=False))),
        ),
        ("unix:///run/a%20b.sock", Where(kind="single", addresses=(Address("/run/a b.sock", 0),))),
        (
            "unix://me:pw@/run/v.sock?db=4",
            Where(
                kind="single",
                addresses=(Address("/run/v.sock", 0),),
                login=Login(username="me", password="pw", database=4),
            ),
        ),
        (
            "redis+sentinel://me:pw@a,b:7,[::1]:8/the%20master/5?sentinel_username=s&sentinel_password=q",
            Where(
                kind="sentinel",
                addresses=(Address("a", 26379), Address("b", 7), Address("::1", 8)),
                login=Login(username="me", password="pw", database=5),
                master="the master",
                sentinel_login=Login(username="s", password="q"),
            ),
        ),
        (
            "rediss+sentinel://a/m?ssl_ca_certs=/ca.pem",
            Where(
                kind="sentinel",
                addresses=(Address("a", 26379),),
                login=Login(tls=Tls(ca_certs="/ca.pem")),
                master="m",
                sentinel_login=Login(tls=Tls(ca_certs="/ca.pem")),
            ),
        ),
        (
            "redis+cluster://me:pw@a:1,b:2/0",
            Where(
                kind="cluster",
                addresses=(Address("a", 1), Address("b", 2)),
                login=Login(username="me", password="pw"),
            ),
        ),
        ("rediss+cluster://a", Where(kind="cluster", addresses=(Address("a", 6379),), login=Login(tls=Tls()))),
    ],
)
def test_every_form_is_read(url: str, where: Where) -> None:
    """Hosts, ports that go without saying, brackets, percent signs, databases, masters and TLS files."""
    assert parse(url) == where


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://", r"names no host: write redis://"),
        ("unix://", r"names no socket: write unix:///path"),
        ("redis+sentinel://a,b", r"names no master: write redis\+sentinel://"),
        ("redis+sentinel:///m", r"names no host: write redis\+sentinel://"),
        ("redis+sentinel://a/m/x", r"something else than a number for its database: write redis\+sentinel"),
        ("redis+cluster://", r"names no host: write redis\+cluster://"),
        ("redis+cluster://a/1", r"a cluster has none but 0"),
        ("redis://a,b", r"several hosts: write redis\+sentinel:// or redis\+cluster://"),
        ("redis+cluster://a,,b", r"host that cannot be read"),
        ("redis://h:0", r"a port from 1 to 65535"),
        ("redis://h:65536", r"a port from 1 to 65535"),
        ("redis://h:" + "9" * 5000, r"a port from 1 to 65535"),
        ("redis://::1", r"an IPv6 address in brackets"),
        ("redis://[::1", r"an IPv6 address in brackets"),
        ("redis://h/x", r"number for its database"),
        ("redis://h?timeout=3", r"a parameter that is not known: known are db, ssl_ca_certs"),
        ("redis://h?ssl_ca_certs=x", r"has ssl_ca_certs without TLS: write rediss://"),
        ("redis://h?sentinel_password=x", r"has sentinel_password without Sentinel: write redis\+sentinel"),
        ("rediss://h?ssl_cert_reqs=maybe", r"write none or required"),
        ("rediss://h?ssl_check_hostname=maybe", r"write true or false"),
        ("rediss://h?ssl_keyfile=x", r"add ssl_certfile"),
        ("http://h", r"begins with none of redis://, rediss://, unix://"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(url: str, text: str) -> None:
    """Each rule that a URL can break has an error of its own that says what to write."""
    with pytest.raises(ConfigError, match=text):
        parse(url)


@given(st.sampled_from(SCHEMES), st.text("abq:/@?#%[],=&1", max_size=40))
def test_no_text_is_read_with_another_error(scheme: str, rest: str) -> None:
    """Whatever stands behind the scheme, it is read, or refused as a configuration is."""
    try:
        assert parse(scheme + rest).addresses
    except ConfigError:
        return


@given(
    st.sampled_from(SCHEMES),
    st.text("qwzjkQWZJK", min_size=12, max_size=20),
    st.sampled_from(["/", "?", "@", ":", "#", "%", ",", "["]),
    st.sampled_from(["", "/m", "/x", "?y=1", ":0"]),
)
def test_neither_error_nor_value_shows_a_password(scheme: str, password: str, special: str, rest: str) -> None:
    """Characters that should have been escaped cut the password in two; neither half reaches a text."""
    half = len(password) // 2
    url = f"{scheme}me:{password[:half]}{special}{password[half:]}@host{rest}"
    try:
        text = repr(parse(url).login)
    except ConfigError as error:
        text = str(error)
    assert password[:half] not in text
    assert password[half:] not in text
