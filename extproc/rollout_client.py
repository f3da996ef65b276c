"""The client of the operator API that `warmpath rollout` uses: one call each over HTTP, with every failure named."""

import getpass
import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from extproc import addresses
from extproc.admin.entry import OPERATOR_HEADER, read_token
from extproc.config import Config
from extproc.errors import ConfigError, WarmpathError

_PATIENCE_S: Final = 30.0
_MOST_ANSWER: Final = 16 * 1024 * 1024


class Client(msgspec.Struct, frozen=True):
    """A keeper to ask.

    Attributes:
        url: `http://host:port`, or with https where a proxy in front of it speaks TLS.
        token: what it is shown; empty for nothing.
        operator: name for its audit log.
    """

    url: str
    token: str = ""
    operator: str = ""

    def ask(
        self,
        method: str,
        path: tuple[str, ...],
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> bytes:
        """One call; returns the JSON of its answer.

        Args:
            method: `GET` or `POST`.
            path: parts of the path below `/v1/rollouts`, as they are.
            body: sent as JSON; None for none.
            query: parameters of the URL.

        Raises:
            WarmpathError: nobody answers, or the keeper refuses; the text says why.
        """
        page = "/".join(("/v1/rollouts", *map(_part, path))) + (f"?{urlencode(query)}" if query else "")
        headers = {"content-type": "application/json", OPERATOR_HEADER: self.operator}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        connection = _connection(self.url)
        try:
            connection.request(method, page, None if body is None else json.dumps(body).encode(), headers)
            # Where the keeper ends the connection, it is the answer's to close.
            with connection.getresponse() as answer:
                status, told = answer.status, answer.read(_MOST_ANSWER)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            # UnicodeError: a name that DNS does not allow.
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise WarmpathError(
                f"the keeper at {self.url} does not answer ({reason}): start it with `warmpath serve` or `warmpath "
                "up`, or name another one with --url, or the configuration it runs with with --config"
            ) from error
        finally:
            connection.close()
        if status == 200:
            return told
        raise WarmpathError(_refusal(told) or f"{self.url} answered {status} with something else: is it a keeper?")


def client_of(config: Config, url: str | None, token_file: Path | None) -> Client:
    """The keeper of this host, or the one that is named.

    Args:
        config: configuration of the sidecar.
        url: another keeper's `http://host:port`; None for `gateway.sidecar.admin`.
        token_file: file with the token; None for `gateway.sidecar.admin_token`.

    Raises:
        ConfigError: the URL is none, or the token cannot be read.
    """
    sidecar = config.gateway.sidecar
    where = url or f"http://{addresses.reachable(sidecar.admin)}"
    try:
        parts = urlsplit(where)
        fits = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
        fits = fits and all(letter.isprintable() and not letter.isspace() for letter in where)
    except ValueError:
        fits = False
    if not fits or parts.username or parts.query or parts.fragment or parts.path not in ("", "/"):
        raise ConfigError("--url: write it as http://HOST:PORT, the admin address of a keeper")
    named = token_file or (Path(sidecar.admin_token) if sidecar.admin_token else None)
    token = read_token(named).decode("ascii") if named else ""
    return Client(where.rstrip("/"), token, _user())


def _part(text: str) -> str:
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        # Bytes of the command line that are no UTF-8 come as lone surrogates.
        raise ConfigError("MODEL: not UTF-8 text; write it as warmpath.yaml has it") from error


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no such user in a container
        return ""
    return name if name.isascii() and name.isprintable() else ""


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=_PATIENCE_S, context=context)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_PATIENCE_S)


class _Error(msgspec.Struct):
    message: str


class _Refused(msgspec.Struct):
    """The OpenAI-shaped body of an error."""

    error: _Error


def _refusal(told: bytes) -> str:
    try:
        return msgspec.json.decode(told, type=_Refused).error.message
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
