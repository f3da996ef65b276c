"""Looks at the files that the section `gateway` names, before Envoy or a worker finds one missing."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from extproc.config import Config
from extproc.envoy import api_keys
from extproc.errors import ConfigError

_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"


def check(config: Config, name: str) -> None:
    """Raise ConfigError for the first file that cannot be used; `name` stands for the configuration in its text."""
    for key, path, remedy in _files(config):
        try:
            with Path(path).open("rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigError(f"{name}: gateway.{key}: {path} cannot be read ({error.strerror}): {remedy}") from error
    _check_pair(config, name)
    if config.gateway.auth.keys:
        check_keys(config, name)


def check_keys(config: Config, name: str) -> None:
    """Raise ConfigError when the file of API keys cannot be used; `name` as for `check`."""
    try:
        api_keys.load(Path(config.gateway.auth.keys))
    except ConfigError as error:
        raise ConfigError(f"{name}: gateway.auth.keys: {error}") from None


def _files(config: Config) -> Iterator[tuple[str, str, str]]:
    """Key, path and remedy of each file that this host's Envoy would read."""
    tls, jwt = config.gateway.tls, config.gateway.auth.jwt
    remedy = "put it there, or let this user read it"
    if tls.certificate:
        yield "tls.certificate", tls.certificate, remedy
        yield "tls.key", tls.key, remedy
    if tls.client_ca:
        yield "tls.client_ca", tls.client_ca, remedy
    if jwt.jwks.startswith("https://"):
        yield "auth.jwt.ca", jwt.ca, "name the file of your system's certificate authorities"
    elif jwt.jwks and "://" not in jwt.jwks:
        yield "auth.jwt.jwks", jwt.jwks, remedy


def _check_pair(config: Config, name: str) -> None:
    tls = config.gateway.tls
    if not tls.certificate:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a passphrase would be asked for at the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        if not _holds(tls.certificate, _CERTIFICATE) and _holds(tls.key, _CERTIFICATE):
            raise ConfigError(
                f"{name}: gateway.tls: the certificate is in {tls.key}, the file of the key: swap certificate and key"
            ) from error
        reason = getattr(error, "reason", "") or "needs a passphrase"
        raise ConfigError(
            f"{name}: gateway.tls: {tls.certificate} and {tls.key} are no pair of certificate and key in PEM"
            f" ({reason}): give both as they were issued together, the key without a passphrase"
        ) from error
    if not tls.client_ca:
        return
    try:
        context.load_verify_locations(tls.client_ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{name}: gateway.tls.client_ca: {tls.client_ca} holds no certificate in PEM") from error


def _holds(path: str, mark: bytes) -> bool:
    return mark in Path(path).read_bytes()
