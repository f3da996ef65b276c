"""Who may call the operator API: whoever knows the token, or, where there is none, who is on this host itself."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from extproc.clock import Clock, SystemClock
from extproc.errors import ConfigError, ForbiddenError, TokenUnusableError, UnauthorizedError, WarmpathError

_KEY: Final = "gateway.sidecar.admin_token"
OPERATOR_HEADER: Final = "x-warmpath-operator"
"""Header, or key of gRPC metadata, with the name of who calls, for the audit log. Anybody may write any name."""
LEAST_TOKEN: Final = 16
_MOST_TOKEN: Final = 4096
_VISIBLE: Final = re.compile(rb"[!-~]+")
_UNNAMEABLE: Final = re.compile(r"[^\w.@:+ -]+")
_MOST_NAME: Final = 64
_BROWSERS: Final = ("origin", "sec-fetch-site")
_PROXIES: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "via")
_RESERVED: Final = "controller"
_TELL_EVERY_S: Final = 10.0

log = logging.getLogger(__name__)


class Asking(msgspec.Struct, frozen=True):
    """Who calls, and how.

    Attributes:
        peer: address that the connection comes from, without its port; empty for a Unix socket, whose file says who may
            connect.
        headers: headers, or gRPC metadata, by lower-case name; of those that were sent twice all, joined by commas.
        web: it came over HTTP/1, as browsers send it.
        changes: the call changes something.
    """

    peer: str
    headers: Mapping[str, str]
    web: bool = True
    changes: bool = True


class Entry:
    """Admits calls, or says why not. The file of the token is read at each call: a new token counts at once."""

    def __init__(self, token: Path | None, listens_on: str, clock: Clock | None = None) -> None:
        """What is asked of callers.

        Args:
            token: file with the token; None lets in who is on this host.
            listens_on: host that the listener is bound to; empty for a Unix socket.
            clock: paces what is logged of refused calls.
        """
        self._token = token
        self._local = is_loopback(listens_on)
        self._clock = clock or SystemClock()
        self._complaint = ""
        self._refused = 0
        self._told_at = -_TELL_EVERY_S

    async def admit(self, asking: Asking) -> None:
        """Return when the call may go on.

        Raises:
            UnauthorizedError: the token is missing or wrong.
            ForbiddenError: there is no token, and the call does not come from this host, or may come from a web page.
            TokenUnusableError: the token cannot be read; the log says why.
        """
        try:
            await self._admit(asking)
        except (UnauthorizedError, ForbiddenError) as error:
            self._tell(asking, error)
            raise

    async def _admit(self, asking: Asking) -> None:
        if self._token is None:
            if told := refusal(asking, listens_locally=self._local):
                raise ForbiddenError(told)
            return
        try:
            token = await asyncio.to_thread(_kept_token, self._token)
        except ConfigError as error:
            if str(error) != self._complaint:
                log.error("the operator API is closed: its token cannot be used", extra={"error": str(error)})
            self._complaint = str(error)
            raise TokenUnusableError("this host's token cannot be used; its log says why") from None
        self._complaint = ""
        if not _equal(token, shown_token(asking.headers)):
            raise UnauthorizedError(
                "the operator API wants `authorization: Bearer TOKEN`, with the token of the file that this host's "
                f"{_KEY} names (`warmpath rollout` has --token-file for it)"
            )

    def _tell(self, asking: Asking, error: WarmpathError) -> None:
        """Log refused calls: somebody may be guessing. One line in ten seconds, or they could fill the log."""
        self._refused += 1
        if self._clock.monotonic() - self._told_at >= _TELL_EVERY_S:
            told = {"peer": asking.peer or "unix", "reason": error.reason, "calls": self._refused}
            log.warning("calls of the operator API are refused", extra=told)
            self._refused, self._told_at = 0, self._clock.monotonic()


def refusal(asking: Asking, *, listens_locally: bool) -> str:
    """Why a call is refused where no token is asked for; empty when it is not.

    A page in a browser on this host may send requests here as well, and so may a proxy on behalf of others: both betray
    themselves by headers. A page whose name was pointed at this host sends that name as `host`. What browsers send
    without asking first has no content type of JSON.
    """
    remedy = f"set {_KEY} to a file with a token, and send that"
    if not listens_locally:
        return f"without a token the operator API is for listeners on loopback only: {remedy}"
    if not is_loopback(asking.peer):
        return f"without a token the operator API is for callers on this host only: {remedy}"
    return _web_refusal(asking, remedy) if asking.web else ""


def _web_refusal(asking: Asking, remedy: str) -> str:
    for name in (*_BROWSERS, *_PROXIES):
        if name in asking.headers:
            what = "web pages" if name in _BROWSERS else "proxies"
            return f"without a token the operator API takes nothing from {what} (header `{name}`): {remedy}"
    if not is_loopback(_host(asking.headers.get("host", ""))):
        return f"without a token the operator API must be asked at localhost, or at the loopback address: {remedy}"
    kind = asking.headers.get("content-type", "").partition(";")[0].strip().lower()
    return "send `content-type: application/json`" if asking.changes and kind != "application/json" else ""


def is_loopback(host: str) -> bool:
    """Whether a host is this one, by a loopback address or as `localhost`; an empty one stands for a Unix socket."""
    if host in ("", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _host(header: str) -> str:
    """Host of a `host` header, without its port; one that has none is not this host."""
    host = re.sub(r":\d*\Z", "", header.strip().lower())
    return host or "-"


def shown_token(headers: Mapping[str, str]) -> bytes:
    """The token that a call shows; empty without one."""
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    return token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""


def _equal(one: bytes, other: bytes) -> bool:
    """Whether two tokens are the same, in a time that tells neither where they differ nor how long they are."""
    return hmac.compare_digest(hashlib.sha256(one).digest(), hashlib.sha256(other).digest())


def _kept_token(path: Path) -> bytes:
    """The token of this host. Raises ConfigError, also for a pipe, which a thread would wait at for ever."""
    with contextlib.suppress(OSError):  # What cannot be looked at cannot be read either, which says why.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{_KEY}: {path}: cannot be read (no file): write the token into one")
    return read_token(path)


def read_token(path: Path) -> bytes:
    """The token of a file.

    Raises:
        ConfigError: it cannot be read, is too short to be one, or no single line of visible ASCII. Nothing of it is
            ever shown.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_TOKEN + 1)
    except OSError as error:
        remedy = f"write one into it, as by `openssl rand -hex 32 > {path}`"
        raise ConfigError(f"{_KEY}: {path}: cannot be read ({error.strerror}): {remedy}") from error
    token = content.strip()
    if len(token) < LEAST_TOKEN:
        raise ConfigError(f"{_KEY}: {path}: shorter than {LEAST_TOKEN} characters, which can be guessed: lengthen")
    if len(content) > _MOST_TOKEN or not _VISIBLE.fullmatch(token):
        raise ConfigError(f"{_KEY}: {path}: not one line of at most {_MOST_TOKEN} visible ASCII characters")
    return token


def operator(headers: Mapping[str, str]) -> str:
    """Who calls, for the audit log: what they say, cut and cleaned. Nobody passes for the controller."""
    name = _UNNAMEABLE.sub("", headers.get(OPERATOR_HEADER, ""))[:_MOST_NAME].strip()
    if not name:
        return "operator"
    return f"operator {name}" if name.lower() == _RESERVED else name
