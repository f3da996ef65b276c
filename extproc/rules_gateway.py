"""What the keys of `gateway` must agree on, once each value is right by itself."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from extproc.config import Config
from extproc.config_mistakes import Mistake


def gateway_agrees(config: Config) -> Iterator[Mistake]:
    """The mistakes in the section `gateway` that concern TLS, authentication and routes."""
    yield from _tls_is_whole(config)
    yield from _tokens_are_whole(config)
    yield from _files_are_absolute(config)
    yield from _routes_differ(config)


def _tls_is_whole(config: Config) -> Iterator[Mistake]:
    tls = config.gateway.tls
    if tls.certificate and not tls.key:
        yield Mistake("$.gateway.tls.key", "is missing: name the file of the certificate's private key")
    for key in ("key", "client_ca"):
        if getattr(tls, key) and not tls.certificate:
            yield Mistake("$.gateway.tls.certificate", f"is missing: gateway.tls.{key} has no use without it")


def _tokens_are_whole(config: Config) -> Iterator[Mistake]:
    jwt = config.gateway.auth.jwt
    place = "$.gateway.auth.jwt"
    if (jwt.issuer or jwt.audiences) and not jwt.jwks:
        yield Mistake(f"{place}.jwks", "is missing: name the file or URL of the issuer's public keys")
    if not jwt.jwks:
        return
    if "://" in jwt.jwks and (urlsplit(jwt.jwks).scheme not in {"http", "https"} or not urlsplit(jwt.jwks).hostname):
        yield Mistake(f"{place}.jwks", "is neither a path nor an http:// or https:// URL with a host")
    if not jwt.issuer:
        yield Mistake(f"{place}.issuer", "is missing: anybody's token would do; write what its claim `iss` says")
    if not jwt.audiences:
        yield Mistake(f"{place}.audiences", "is empty: tokens made for other services would do; name what `aud` says")


def _files_are_absolute(config: Config) -> Iterator[Mistake]:
    gateway = config.gateway
    tls, auth = gateway.tls, gateway.auth
    files = {
        "tls.certificate": tls.certificate,
        "tls.key": tls.key,
        "tls.client_ca": tls.client_ca,
        "auth.keys": auth.keys,
        "auth.jwt.jwks": "" if "://" in auth.jwt.jwks else auth.jwt.jwks,
        "auth.jwt.ca": auth.jwt.ca,
    }
    for key, path in files.items():
        if path and not PurePosixPath(path).is_absolute():
            yield Mistake(f"$.gateway.{key}", f"found {path!r}: write an absolute path; others run in another folder")
    token = gateway.sidecar.admin_token
    if token and not PurePosixPath(token).is_absolute():
        # What stands there may be the token itself, and is not repeated.
        text = "is no absolute path: write that of a file which holds the token, not the token itself"
        yield Mistake("$.gateway.sidecar.admin_token", text)


def _routes_differ(config: Config) -> Iterator[Mistake]:
    gateway = config.gateway
    seen: set[str] = set()
    for index, route in enumerate(gateway.routes):
        place = f"$.gateway.routes[{index}]"
        bare = route.path.rstrip("/")
        if bare in seen:
            yield Mistake(f"{place}.path", f"{route.path} is there twice: keep one")
        seen.add(bare)
        if (route.max_body_bytes or 0) > gateway.max_body_bytes:
            yield Mistake(f"{place}.max_body_bytes", "is above gateway.max_body_bytes: lower it, or raise that")
