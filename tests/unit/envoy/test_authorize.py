"""The service that Envoy asks whether a request may come in."""

import hashlib
import logging

import pytest
from envoy.service.auth.v3 import external_auth_pb2 as pb

from extproc.envoy.authorize import Authorizer
from extproc.request.shapes import TENANT_HEADER

KEY = b"wp-secret"
CLIENTS = {hashlib.sha256(KEY).digest(): "acme"}


class Outcomes:
    """Counts."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def asked(self, outcome: str) -> None:
        """See `authorize.Recorder`."""
        self.seen.append(outcome)


async def check(outcomes: Outcomes, *headers: tuple[str, bytes]) -> pb.CheckResponse:
    """What is answered to a request with these headers."""
    request = pb.CheckRequest()
    for name, value in headers:
        request.attributes.request.http.header_map.headers.add(key=name, raw_value=value)
    authorizer = Authorizer(lambda: CLIENTS, outcomes)
    return pb.CheckResponse.FromString(await authorizer._check(request, None))


async def test_a_key_sets_the_tenant_over_whatever_was_there() -> None:
    """Envoy is told to overwrite, not to append."""
    outcomes = Outcomes()
    answer = await check(outcomes, ("authorization", b"Bearer " + KEY))
    assert answer.status.code == 0
    [option] = answer.ok_response.headers
    assert (option.header.key, option.header.value) == (TENANT_HEADER, "acme")
    assert option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD
    assert outcomes.seen == ["key"]


async def test_a_verified_token_keeps_its_tenant() -> None:
    """The header can only come from Envoy's own check of a token: no key is asked for then."""
    outcomes = Outcomes()
    answer = await check(outcomes, (TENANT_HEADER, b"red"))
    assert answer.status.code == 0
    assert not answer.ok_response.headers
    assert outcomes.seen == ["token"]


@pytest.mark.parametrize("headers", [(), (("x-api-key", b"nothing"),), ((TENANT_HEADER, b""),)])
async def test_nothing_else_lets_in(headers: tuple[tuple[str, bytes], ...]) -> None:
    """401, whose body Envoy writes."""
    outcomes = Outcomes()
    answer = await check(outcomes, *headers)
    assert answer.status.code == 16
    assert answer.denied_response.status.code == 401
    assert outcomes.seen == ["refused"]


async def test_keys_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the level."""
    caplog.set_level(logging.DEBUG)
    await check(Outcomes(), ("x-api-key", KEY))
    await check(Outcomes(), ("x-api-key", b"nothing"))
    assert caplog.text == ""
