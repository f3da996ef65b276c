"""Who a real Envoy lets in: API keys that the sidecar checks, tokens that Envoy checks, and who the tenant is."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from extproc.config import Gateway
from extproc.config_gateway import Auth, Jwt
from extproc.envoy import api_keys
from extproc.request.shapes import TENANT_HEADER
from tests.waiting import until_async
from tests.web_tokens import AUDIENCE, ISSUER, Issuer, unsigned
from tests.wire.gateway import Answer, Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Keys:
    """A file of keys, and the keys themselves."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys"
        self.acme, self.other = (api_keys.new(secrets.token_urlsafe) for _ in range(2))
        self.write(acme=self.acme, other=self.other)

    def write(self, **keys: str) -> None:
        """Replace the file's content."""
        self.file.write_text("".join(f"{api_keys.line(client, key)}\n" for client, key in keys.items()))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """One file of keys."""
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_keys(keys: Keys) -> AsyncIterator[Running]:
    """A gateway that asks for keys."""
    async with running_gateway(Gateway(auth=Auth(keys=str(keys.file)))) as running:
        yield running


def tenant(running: Running, answer: Answer) -> str:
    """The tenant of the last request, of which sidecar and engine were told the same."""
    assert answer.status == 200, answer.body
    told: str = answer.json["headers"][TENANT_HEADER]
    assert running.desk.calls[-1].headers[TENANT_HEADER] == told
    return told


def bearer(key: str) -> dict[str, str]:
    """The header that OpenAI's clients send."""
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("name", "form"),
    [("authorization", "Bearer {}"), ("authorization", "bearer  {}"), ("api-key", "{}"), ("x-api-key", "{}")],
)
async def test_a_known_key_names_the_tenant_in_each_header(
    with_keys: Running, keys: Keys, name: str, form: str
) -> None:
    """OpenAI's, Azure's and Anthropic's clients are understood, and nobody behind the gateway sees the key."""
    answer = await with_keys.ask(headers={name: form.format(keys.acme)})
    assert tenant(with_keys, answer) == "acme"
    assert keys.acme not in answer.body.decode()
    assert keys.acme not in str(with_keys.desk.calls[-1])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wp-nobody"),
        bearer(""),
        {"authorization": "Basic YTpi"},
        {"api-key": ""},
        {"x-api-key": "\xe9"},
        {TENANT_HEADER: "acme"},
        {TENANT_HEADER: "acme", "authorization": "Bearer wp-nobody"},
    ],
    ids=[
        "no key",
        "an unknown key",
        "an empty key",
        "another scheme",
        "nothing",
        "no ascii",
        "a forged tenant",
        "both",
    ],
)
async def test_whoever_shows_no_known_key_is_answered_401(with_keys: Running, headers: dict[str, str]) -> None:
    """The answer is one that OpenAI's clients can read; no sidecar decides, and no engine is asked."""
    decided = len(with_keys.desk.calls)
    answer = await with_keys.ask(headers=headers)
    assert answer.is_refusal(401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert len(with_keys.desk.calls) == decided


async def test_the_tenant_is_the_keys_and_not_the_clients_word(with_keys: Running, keys: Keys) -> None:
    """A client that names another tenant gets its own."""
    answer = await with_keys.ask(headers={**bearer(keys.other), TENANT_HEADER: "acme"})
    assert tenant(with_keys, answer) == "other"


async def test_of_several_keys_one_that_is_known_is_enough(with_keys: Running, keys: Keys) -> None:
    """Clients that were made for several providers send several headers."""
    answer = await with_keys.ask(
        headers=[("authorization", "Bearer sk-else"), ("x-api-key", "x"), ("x-api-key", keys.acme)]
    )
    assert tenant(with_keys, answer) == "acme"


async def test_nobody_sends_a_body_for_nothing(with_keys: Running) -> None:
    """The answer comes on the headers: half a gigabyte is not received first."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 500000000\r\n\r\n"
    assert b"HTTP/1.1 401 " in await with_keys.raw(head, limit_s=2)


async def test_a_changed_file_counts_at_once(with_keys: Running, keys: Keys) -> None:
    """A key that was taken out lets nobody in any more, and a new one does."""
    fresh = api_keys.new(secrets.token_urlsafe)
    keys.write(acme=keys.acme, fresh=fresh)
    await with_keys.keys.look()
    assert tenant(with_keys, await with_keys.ask(headers=bearer(fresh))) == "fresh"
    assert (await with_keys.ask(headers=bearer(keys.other))).status == 401
    keys.write(acme=keys.acme, other=keys.other)
    await with_keys.keys.look()


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nowhere"])
async def test_no_path_is_left_out(with_keys: Running, path: str) -> None:
    """A path that needed no key would be a way around it."""
    assert (await with_keys.ask("GET", path)).is_refusal(401, "unauthorized")


@pytest.mark.parametrize(("fail_open", "status"), [(False, 503), (True, 200)])
async def test_without_a_sidecar_auth_has_its_own_way_to_fail(keys: Keys, fail_open: bool, status: int) -> None:
    """Requests that go on without a pick (`gateway.fail_open`) do not go on without a key; nor does a key go along."""
    auth = Auth(keys=str(keys.file), fail_open=fail_open)
    async with running_gateway(Gateway(auth=auth, fail_open=True)) as running:
        await running.sidecar.stop()
        answer = await running.ask(headers=bearer(keys.acme))
        assert answer.status == status
        if fail_open:
            assert not {"Authorization", TENANT_HEADER} & set(answer.json["headers"])
        else:
            assert answer.is_refusal(503, "sidecar_unavailable")


async def test_the_key_goes_on_where_that_is_wanted(keys: Keys) -> None:
    """`forward_key` is for engines that ask for keys of their own; the sidecar's decision is still made without it."""
    async with running_gateway(Gateway(auth=Auth(keys=str(keys.file), forward_key=True))) as running:
        answer = await running.ask(headers=bearer(keys.acme))
        assert tenant(running, answer) == "acme"
        assert answer.json["headers"]["Authorization"] == f"Bearer {keys.acme}"
        assert "authorization" not in running.desk.calls[-1].headers


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    """Who signs tokens."""
    return Issuer()


@pytest.fixture(scope="module")
def jwks(tmp_path_factory: pytest.TempPathFactory, issuer: Issuer) -> Path:
    """The issuer's public keys."""
    file = tmp_path_factory.mktemp("jwks") / "jwks.json"
    file.write_text(issuer.jwks)
    return file


def jwt(source: Path | str, claim: str = "sub") -> Jwt:
    """Tokens of the issuer."""
    return Jwt(jwks=str(source), issuer=ISSUER, audiences=[AUDIENCE], tenant_claim=claim)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_tokens(jwks: Path) -> AsyncIterator[Running]:
    """A gateway that asks for tokens, and for nothing else."""
    async with running_gateway(Gateway(auth=Auth(jwt=jwt(jwks)))) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_both(jwks: Path, keys: Keys) -> AsyncIterator[Running]:
    """A gateway that takes keys and tokens; the tenant is in a claim of a claim."""
    auth = Auth(keys=str(keys.file), jwt=jwt(jwks, "org.team"))
    async with running_gateway(Gateway(auth=auth)) as running:
        yield running


async def test_a_good_token_names_the_tenant(with_tokens: Running, issuer: Issuer) -> None:
    """The claim becomes the tenant, and the token goes no further."""
    answer = await with_tokens.ask(headers={**bearer(issuer.token()), TENANT_HEADER: "other"})
    assert tenant(with_tokens, answer) == "acme"
    assert "Authorization" not in answer.json["headers"]


async def test_tokens_need_no_sidecar(jwks: Path, issuer: Issuer) -> None:
    """Envoy checks them itself, so they are checked while every worker is gone."""
    async with running_gateway(Gateway(auth=Auth(jwt=jwt(jwks)))) as running:
        await running.sidecar.stop()
        assert (await running.ask(headers=bearer(issuer.token()))).json["headers"][TENANT_HEADER] == "acme"
        assert (await running.ask()).is_refusal(401, "unauthorized")


BAD = {
    "expired": {"exp": int(time.time()) - 3600},
    "for ever": {"exp": None},
    "of another issuer": {"iss": "https://else.example"},
    "for another audience": {"aud": "else"},
    "not yet valid": {"nbf": int(time.time()) + 3600},
}


@pytest.mark.parametrize("claims", BAD.values(), ids=BAD.keys())
async def test_a_bad_token_is_answered_401(
    with_tokens: Running, with_both: Running, issuer: Issuer, claims: dict[str, object]
) -> None:
    """With or without keys beside them."""
    token = issuer.token(**claims, org={"team": "acme"})
    for running in (with_tokens, with_both):
        assert (await running.ask(headers=bearer(token))).is_refusal(401, "unauthorized")


async def test_a_token_that_nobody_signed_is_answered_401(
    with_tokens: Running, with_both: Running, issuer: Issuer
) -> None:
    """Neither `alg: none`, nor another key, nor a changed payload, nor no token at all."""
    head, payload, signature = issuer.token().split(".")
    changed = f"{head}.{payload[:-4]}AAAA.{signature}"
    for token in (unsigned(org={"team": "acme"}), Issuer().token(org={"team": "acme"}), changed, "a.b.c", ""):
        for running in (with_tokens, with_both):
            assert (await running.ask(headers=bearer(token))).is_refusal(401, "unauthorized"), token
    assert (await with_tokens.ask(path="/v1/chat/completions?access_token=" + issuer.token())).status == 401


async def test_a_token_without_tenant_is_not_enough(with_tokens: Running, with_both: Running, issuer: Issuer) -> None:
    """Whoever has no name cannot be counted or limited."""
    assert (await with_tokens.ask(headers=bearer(issuer.token(sub=None)))).is_refusal(403, "no_tenant")
    assert (await with_both.ask(headers=bearer(issuer.token()))).is_refusal(401, "unauthorized")


async def test_keys_and_tokens_beside_each_other(with_both: Running, issuer: Issuer, keys: Keys) -> None:
    """Either lets in, and says who it is."""
    assert tenant(with_both, await with_both.ask(headers=bearer(issuer.token(org={"team": "red"})))) == "red"
    assert tenant(with_both, await with_both.ask(headers=bearer(keys.other))) == "other"
    assert (await with_both.ask()).is_refusal(401, "unauthorized")
    assert with_both.outcomes.seen[-3:] == ["token", "key", "refused"]


async def test_public_keys_come_from_a_url_too(issuer: Issuer, keys: Keys) -> None:
    """They are fetched when they are there; until then the gateway listens, and keys work."""
    served = asyncio.Event()

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text=issuer.jwks) if served.is_set() else web.Response(status=503)

    app = web.Application()
    app.router.add_get("/jwks", page)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        auth = Auth(keys=str(keys.file), jwt=jwt(f"http://127.0.0.1:{site.port}/jwks"))
        async with running_gateway(Gateway(auth=auth)) as running:
            assert tenant(running, await running.ask(headers=bearer(keys.acme))) == "acme"
            assert (await running.ask(headers=bearer(issuer.token()))).status == 401
            served.set()

            async def taken() -> bool:
                return (await running.ask(headers=bearer(issuer.token()))).status == 200

            await until_async(taken)
    finally:
        await runner.cleanup()
