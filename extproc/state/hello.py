"""The first words of a connection to Redis: login, database, name, and what the server says of itself."""

import ssl
from collections.abc import Sequence
from typing import Any, Final

from extproc.state.report import parse_info, too_old
from extproc.state.trouble import RefusedError, Trouble, UnreachableError
from extproc.state.where import Login

Command = tuple[str | int | float | bytes, ...]

# Of OpenSSL's verification errors the two whose remedy is another one than a CA file.
_HOST_DIFFERS: Final = {62, 64}
_EXPIRED: Final = 10


def commands(login: Login, name: str) -> dict[str, Command]:
    """What is sent first, in order, all of it in one write."""
    first: dict[str, Command] = {}
    if login.username:
        first["AUTH"] = ("AUTH", login.username, login.password)
    elif login.password:
        first["AUTH"] = ("AUTH", login.password)
    if login.database:
        first["SELECT"] = ("SELECT", login.database)
    first["SETNAME"] = ("CLIENT", "SETNAME", name)
    first["INFO"] = ("INFO",)
    return first


def check(names: Sequence[str], replies: Sequence[Any], *, master: bool) -> None:
    """Judge the replies to `commands`.

    A user who may not run CLIENT SETNAME or INFO is served all the same, unseen and unchecked.

    Args:
        names: names of the commands.
        replies: reply or exception to each.
        master: whether a replica is of no use.

    Raises:
        UnreachableError: this server cannot be used; the text names the remedy.
        StoreError: the connection was lost meanwhile.
    """
    for name, reply in zip(names, replies, strict=True):
        if not isinstance(reply, BaseException):
            continue
        if not isinstance(reply, RefusedError):
            raise reply
        if name == "AUTH":
            raise _login_refused(reply.code)
        if reply.code == "NOAUTH":
            raise UnreachableError(
                "Redis asks for a password (NOAUTH): write redis://user:password@host in redis.url",
                Trouble.WRONG_PASSWORD,
            )
        if name == "SELECT":
            raise _database_refused(reply.code)
    info = replies[-1]
    if isinstance(info, bytes):
        report = parse_info(info)
        if old := too_old(report):
            raise UnreachableError(old, Trouble.OLD_VERSION)
        if master and report.role == "replica":
            raise UnreachableError("what was the master is a replica; asking the sentinels again", Trouble.READ_ONLY)


def why(error: BaseException) -> UnreachableError:
    """What kept a connection from coming about, with its remedy where there is one, and no secret."""
    if isinstance(error, UnreachableError):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        return UnreachableError(_distrust(error.verify_code), Trouble.CERTIFICATE)
    if isinstance(error, ssl.SSLError):
        return UnreachableError(
            f"TLS failed ({error.reason or 'no reason given'}): see that redis.url names the TLS port, that the "
            "server's certificate and ssl_ca_certs fit, and that ssl_certfile is given where the server asks for one",
            Trouble.CERTIFICATE,
        )
    if isinstance(error, TimeoutError):
        return UnreachableError(
            "no answer to the login: see that redis.url names a Redis that may be reached, by the port "
            "that speaks what it says, TLS or not"
        )
    if isinstance(error, OSError):
        return UnreachableError(error.strerror or str(error) or type(error).__name__)
    return UnreachableError(str(error) or type(error).__name__)


def _login_refused(code: str) -> UnreachableError:
    remedy = {
        "WRONGPASS": "correct user and password in redis.url",
        "ERR": "leave the password out of redis.url, or set one in Redis",
    }.get(code, "see what its log says")
    return UnreachableError(f"Redis refused the login ({code}): {remedy}", Trouble.WRONG_PASSWORD)


def _database_refused(code: str) -> UnreachableError:
    if code == "NOPERM":
        return UnreachableError(
            "the user may not choose a database (NOPERM): allow +select, or use 0", Trouble.NO_PERMISSION
        )
    return UnreachableError(
        f"Redis refused the database of redis.url ({code}): choose one that it has; a cluster has none but 0",
        Trouble.REFUSED,
    )


def _distrust(code: int) -> str:
    if code in _HOST_DIFFERS:
        return "the certificate is for another host: name the host it is for in redis.url, or renew it with that host"
    if code == _EXPIRED:
        return "the certificate has expired: renew it on the server"
    return "no trusted authority signed the certificate: give the one that did as ssl_ca_certs in redis.url"
