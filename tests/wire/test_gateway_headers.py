"""Headers and pages that stay inside: what Envoy takes out of requests and answers, and what it does not serve."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from extproc.config import Gateway
from extproc.envoy.contract import DESTINATION, POOL, REASON, SERVED, SUBSET
from extproc.errors import OverloadedError
from extproc.request.shapes import TENANT_HEADER
from tests.waiting import until_async
from tests.wire.gateway import CHAT, Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

INTERNAL = [DESTINATION, SUBSET, SERVED, POOL, TENANT_HEADER]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Running]:
    """A gateway as it comes."""
    async with running_gateway() as running:
        yield running


async def test_what_a_client_forges_reaches_nobody(gateway: Running) -> None:
    """Neither once nor twice, neither in lower nor in upper case."""
    forged = [(name, "forged") for name in INTERNAL] + [(name.upper(), "forged again") for name in INTERNAL]
    answer = await gateway.ask(headers=forged)
    assert answer.status == 200
    assert "forged" not in str(answer.json["headers"])
    assert "forged" not in str(gateway.desk.calls[-1].headers)


async def test_what_an_engine_says_of_the_inside_reaches_no_client(gateway: Running) -> None:
    """Its other headers do."""
    said = [*INTERNAL, REASON, "x-warmpath-else", "x-envoy-upstream-service-time", "x-envoy-overloaded"]
    query = "&".join(f"say={name}:1" for name in [*said, "x-fine"])
    answer = await gateway.ask(path=f"{CHAT}?{query}")
    assert answer.status == 200
    assert answer.headers["x-fine"] == "1"
    assert [name for name in answer.headers if name.startswith(("x-warmpath-", "x-envoy-", DESTINATION))] == []


async def test_our_own_reasons_stay(gateway: Running) -> None:
    """A refusal of the sidecar and one of Envoy both say why."""
    gateway.desk.outcome = OverloadedError("busy", 7)
    answer = await gateway.ask()
    gateway.desk.outcome = None
    assert answer.is_refusal(429, "overloaded")
    assert answer.headers["retry-after"] == "7"
    assert (await gateway.ask(path="/v1/models/none", method="GET")).is_refusal(404, "unknown_model")


ADMIN = [
    "/stats",
    "/clusters",
    "/config_dump",
    "/server_info",
    "/ready",
    "/memory",
    "/logging",
    "/quitquitquit",
    "/help",
]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_envoys_own_pages_are_not_on_the_public_listener(gateway: Running, method: str) -> None:
    """A path like that of an admin page is one of the engine's; Envoy runs on."""
    addresses = {engine.address for engine in gateway.engines}
    for path in [*ADMIN, "/healthz", "/readyz", "/explain", "/decisions/x"]:
        answer = await gateway.ask(method, path)
        assert answer.json["endpoint"] in addresses, path
    assert (await gateway.ask()).status == 200


async def test_a_closed_list_of_paths_closes_the_engines_pages_too() -> None:
    """With `only_known_paths`, nothing but APIs is served, and no sidecar is asked about the rest."""
    async with running_gateway(Gateway(only_known_paths=True)) as running:
        for method, path in [("GET", "/metrics"), ("POST", "/sleep"), ("POST", "/v1/load_lora_adapter"), ("GET", "/")]:
            assert (await running.ask(method, path)).is_refusal(404, "unknown_path"), path
        for path in ("/v1/chat/completionsx", "/x/v1/embeddings", "/v1", "/v1/modelsx"):
            assert (await running.ask(path=path)).is_refusal(404, "unknown_path"), path
        assert running.desk.calls == []
        for path in (CHAT, "/v1/embeddings/", "/v1/responses/resp_1/cancel", "/v1/messages/count_tokens?beta=true"):
            assert (await running.ask(path=path)).status == 200, path
        assert (await running.ask("GET", "/v1/models")).status == 200
        assert len(running.desk.calls) == 4


async def test_the_models_are_listed_by_the_sidecar(gateway: Running) -> None:
    """In OpenAI's form, without an engine; only reading the list is answered there."""
    # On a busy machine Envoy may have given the worker up for a moment, and passes requests on then.
    await until_async(gateway.reaches_sidecar)
    listed = await gateway.ask("GET", "/v1/models?x=1")
    assert listed.json == {
        "object": "list",
        "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "warmpath"}],
    }
    assert (await gateway.ask("GET", "/v1/models/m")).json == listed.json["data"][0]
    head = await gateway.ask("HEAD", "/v1/models/")
    assert (head.status, head.body) == (200, b"")
    decided = len(gateway.desk.calls)
    assert "endpoint" in (await gateway.ask("OPTIONS", "/v1/models")).json
    assert len(gateway.desk.calls) == decided + 1
