"""`redis.url` read: which kind of deployment, at which addresses, with which login and certificates."""

import ssl
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec

from extproc.errors import ConfigError
from extproc.state.trouble import Trouble, UnreachableError

Kind = Literal["single", "sentinel", "cluster"]

_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_MAX_PORT: Final = 65535
_MOST_DIGITS: Final = 9
_KINDS: Final[dict[str, Kind]] = {
    "redis": "single",
    "rediss": "single",
    "unix": "single",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}
_TLS_PARAMETERS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL_PARAMETERS: Final = ("sentinel_username", "sentinel_password")
_ESCAPES: Final = "write `%2F` for a `/`, `%40` for an `@`, `%3F` for a `?` and `%25` for a `%` in a password"
_FORMS: Final[dict[Kind, str]] = {
    "single": "write redis://[user:password@]host[:port][/database]",
    "sentinel": "write redis+sentinel://[user:password@]host[:port],host[:port]/master-name[/database]",
    "cluster": "write redis+cluster://[user:password@]host[:port],host[:port]",
}


class Address(NamedTuple):
    """Where one server listens: a host and its TCP port, or with port 0 the path of a Unix socket."""

    host: str
    port: int


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """How a TLS connection is verified.

    Attributes:
        ca_certs: PEM file of the authorities to trust; the system's when empty.
        certfile: PEM file of the certificate that is shown; none when empty.
        keyfile: PEM file of its key; in `certfile` when empty.
        verify: refuse a server whose certificate no trusted authority signed.
        check_hostname: refuse a server whose certificate is not for the host that was asked for.
    """

    ca_certs: str = ""
    certfile: str = ""
    keyfile: str = ""
    verify: bool = True
    check_hostname: bool = True

    def context(self) -> ssl.SSLContext:
        """The files as they are at this moment, so that a renewed one counts at the next connection. Blocks.

        Raises:
            UnreachableError: a file is not there, or holds something else.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_certs or None)
            context.check_hostname = self.verify and self.check_hostname
            if not self.verify:
                context.verify_mode = ssl.CERT_NONE
            if self.certfile:
                context.load_cert_chain(self.certfile, self.keyfile or None)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UnreachableError(
                f"cannot use the file of ssl_ca_certs, ssl_certfile or ssl_keyfile ({reason}): name PEM files in "
                "redis.url that this process can read",
                Trouble.CERTIFICATE,
            ) from None
        return context


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection says of itself. Its text shows no secret.

    Attributes:
        username: ACL user; `default` when empty.
        password: its password; no login when both are empty.
        database: number of the database.
        tls: how to verify; None for a connection in the clear.
    """

    username: str = ""
    password: str = ""
    database: int = 0
    tls: Tls | None = None

    def __repr__(self) -> str:
        return f"Login(database={self.database}, tls={self.tls is not None})"


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment.

    Attributes:
        kind: one server, a master that sentinels know, or a cluster.
        addresses: the server, the sentinels, or some nodes of the cluster.
        login: at the servers that hold data.
        master: name under which the sentinels know it.
        sentinel_login: at the sentinels.
    """

    kind: Kind
    addresses: tuple[Address, ...]
    login: Login = Login()
    master: str = ""
    sentinel_login: Login = Login()


def parse(url: str) -> Where:
    """Read a store URL.

    Args:
        url: `redis://`, `rediss://`, `unix://`, or one of the first two with `+sentinel` or `+cluster`. Parameters
            after a `?` are named as redis-py names them.

    Raises:
        ConfigError: it cannot be read. The text names the remedy and shows nothing of the URL but names of
            parameters: it may hold a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in _KINDS:
        raise ConfigError(f"begins with none of {', '.join(f'{name}://' for name in _KINDS)}: {_FORMS['single']}")
    kind = _KINDS[scheme]
    rest, _, query = rest.partition("?")
    hosts, slash, path = rest.partition("/")
    user, at, hosts = hosts.rpartition("@")
    parameters = _parameters(query, kind, tls=scheme.startswith("rediss"))
    username, _, password = user.partition(":")
    tls = _tls(parameters) if scheme.startswith("rediss") else None
    master, database = _path(kind, path, parameters) if scheme != "unix" else ("", parameters.get("db", ""))
    if database and not _is_number(database):
        raise ConfigError(f"has something else than a number for its database: {_FORMS[kind]}; {_ESCAPES}")
    if scheme != "unix" and not hosts:
        raise ConfigError(f"names no host: {_FORMS[kind]}")
    if scheme == "unix":
        if not path:
            raise ConfigError("names no socket: write unix:///path/of/the.socket")
        addresses: tuple[Address, ...] = (Address(slash + unquote(path), 0),)
    else:
        addresses = _addresses(kind, hosts)
    login = Login(
        username=unquote(username) if at else "",
        password=unquote(password) if at else "",
        database=int(database or 0),
        tls=tls,
    )
    sentinel_login = Login(
        username=parameters.get("sentinel_username", ""),
        password=parameters.get("sentinel_password", ""),
        tls=tls if kind == "sentinel" else None,
    )
    return Where(kind=kind, addresses=addresses, login=login, master=master, sentinel_login=sentinel_login)


def parse_address(text: str, port: int) -> Address | None:
    """Read `host`, `host:port` or `[ipv6]:port`; None for anything else. `port` is the one that goes without saying."""
    host, colon, number = text.rpartition(":")
    if not colon or number.endswith("]"):
        host, number = text, str(port)
    if host.startswith("["):
        if not host.endswith("]"):
            return None
        host = host[1:-1]
    elif ":" in host:
        return None
    known = _is_number(number) and 1 <= int(number) <= _MAX_PORT
    return Address(host, int(number)) if host and known else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _addresses(kind: Kind, hosts: str) -> tuple[Address, ...]:
    port = _SENTINEL_PORT if kind == "sentinel" else _PORT
    found = [parse_address(unquote(each), port) for each in hosts.split(",")]
    if kind == "single" and len(found) > 1:
        raise ConfigError("names several hosts: write redis+sentinel:// or redis+cluster://, or keep one host")
    addresses = tuple(each for each in found if each is not None)
    if len(addresses) < len(found):
        raise ConfigError(
            f"has a host that cannot be read: {_FORMS[kind]}, with an IPv6 address in brackets and a port from 1 to "
            f"{_MAX_PORT}; {_ESCAPES}"
        )
    return addresses


def _path(kind: Kind, path: str, parameters: dict[str, str]) -> tuple[str, str]:
    """Name of the master, and the database as a text, from what follows the hosts."""
    first, _, second = path.partition("/")
    if kind == "sentinel":
        if not first:
            raise ConfigError(f"names no master: {_FORMS[kind]}")
        return unquote(first), parameters.get("db", second.rstrip("/"))
    database = parameters.get("db", path.rstrip("/"))
    if kind == "cluster" and database not in {"", "0"}:
        raise ConfigError(f"names a database, and a cluster has none but 0: {_FORMS[kind]}; {_ESCAPES}")
    return "", database


def _parameters(query: str, kind: Kind, *, tls: bool) -> dict[str, str]:
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    known = ("db", *_TLS_PARAMETERS, *_SENTINEL_PARAMETERS)
    for name in parameters:
        if name not in known:
            # What stands before the `=` may be half of a password that held a `?`.
            raise ConfigError(f"has a parameter that is not known: known are {', '.join(known)}; {_ESCAPES}")
        if name in _TLS_PARAMETERS and not tls:
            raise ConfigError(f"has {name} without TLS: write rediss:// for TLS, or leave it out")
        if name in _SENTINEL_PARAMETERS and kind != "sentinel":
            raise ConfigError(f"has {name} without Sentinel: write redis+sentinel://, or leave it out")
    return parameters


def _tls(parameters: dict[str, str]) -> Tls:
    required = parameters.get("ssl_cert_reqs", "required")
    if required not in {"none", "optional", "required"}:
        raise ConfigError("has an ssl_cert_reqs that is not known: write none or required")
    checked = parameters.get("ssl_check_hostname", "true").lower()
    if checked not in {"true", "false", "yes", "no", "1", "0"}:
        raise ConfigError("has an ssl_check_hostname that is not known: write true or false")
    if parameters.get("ssl_keyfile") and not parameters.get("ssl_certfile"):
        raise ConfigError("has an ssl_keyfile without the certificate that it is the key of: add ssl_certfile")
    return Tls(
        ca_certs=parameters.get("ssl_ca_certs", ""),
        certfile=parameters.get("ssl_certfile", ""),
        keyfile=parameters.get("ssl_keyfile", ""),
        verify=required != "none",
        check_hostname=checked in {"true", "yes", "1"},
    )
