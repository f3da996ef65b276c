"""Prompts with images: predicted to the token where engines name images beforehand, and estimated where they do not."""

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.engines.stand import PRECISE, Asked, Crew, Stand, body_of, crewed, rendered_by, standing
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT
from tests.ports import free_ports
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_TOKENS = 16
IMAGE_TOKENS = 256
OLD, NEW, BARE, SGLANG = "vllm-0.23", "vllm-0.33", "sealed", "sglang"
"""Two versions that render prompts, one that was not told to, and an engine that cannot."""
REQUESTS = 40
ARGUMENTS = ("--kv-events", "--time-factor", "20")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """An engine of each kind. What SGLang's pool asks for token ids is a render server of vLLM."""
    port, replay = free_ports(2)
    events = {"endpoint": f"tcp://*:{port}", "replay": f"tcp://*:{replay}"}
    crews = [
        Crew(
            pool=OLD,
            profile=OLD,
            settings={**PRECISE, "events": events},
            arguments=(*ARGUMENTS, "--kv-port", str(port), "--kv-replay-port", str(replay)),
        ),
        Crew(pool=NEW, profile=NEW, settings=PRECISE, arguments=(*ARGUMENTS, "--scale-out")),
        Crew(pool=BARE, profile=NEW, settings=PRECISE, arguments=ARGUMENTS),
        Crew(pool=SGLANG, profile=SGLANG, arguments=ARGUMENTS),
    ]
    server = Crew(pool="server", profile=NEW, arguments=("--scale-out", "--model", SGLANG))
    async with contextlib.AsyncExitStack() as cleanup:
        engines = await cleanup.enter_async_context(crewed(journal, [*crews, server]))
        crews[-1] = msgspec.structs.replace(crews[-1], settings=rendered_by(engines["server"][0]))
        started = await cleanup.enter_async_context(standing(journal, folder, crews, engines))
        for pool in (OLD, NEW, BARE, SGLANG):

            async def used(pool: str = pool) -> bool:
                assert (await started.local.ask(CHAT, body_of(pool, "hello " * 40))).status == 200
                return (await started.keeper_page()).total("warmpath_kv_profile_used", pool=pool) == 1

            await until_async(used)
        yield started


def image(name: str, **more: Any) -> dict[str, Any]:
    """An image, by what is in it."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}, **more}


def says(*parts: str | dict[str, Any]) -> dict[str, Any]:
    """What a user says with texts and images."""
    return {
        "role": "user",
        "content": [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts],
    }


async def ask(here: Stand, pool: str, messages: str | Sequence[dict[str, Any]], **fields: Any) -> Asked:
    """Send a chat once the worker knows all that the pool's engine holds."""
    await here.in_step(pool)
    return await here.ask(pool, messages, **fields)


@pytest.mark.parametrize("pool", [OLD, NEW])
async def test_a_hit_ends_where_another_image_begins(here: Stand, pool: str) -> None:
    """The same text about the same image is found whole; about another image, only what stands before it.

    vLLM 0.23 writes its events as arrays and renders without a switch.
    """
    rng = random.Random(f"ends {pool}")
    before, after = text(rng, 100), text(rng, 100)
    asked = [await ask(here, pool, [says(before, image(name), after)]) for name in ("one", "one", "two", "two", "one")]
    assert {each.pick.matched_by for each in asked} == {"precise"}
    assert [each.predicted for each in asked] == [each.reported for each in asked]
    tokens = int(asked[0].usage["prompt_tokens"])
    whole = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    first, again, other, known, back = (each.reported for each in asked)
    assert (first, again, known, back) == (0, whole, whole, whole)
    # The rest of the prompt is the image and what is said behind it.
    assert other == (tokens - IMAGE_TOKENS - 100 - 6) // BLOCK_TOKENS * BLOCK_TOKENS > 0


@pytest.mark.parametrize("pool", [OLD, NEW])
async def test_conversations_with_images_are_predicted_to_the_token(here: Stand, pool: str) -> None:
    """Images in any turn, one after another, of a few that come back, some named by the client, under two salts."""
    rng = random.Random(f"talks {pool}")
    talks: list[tuple[dict[str, str], list[dict[str, Any]]]] = []
    asked: list[Asked] = []
    systems = [text(rng, 60) for _ in range(2)]
    for number in range(REQUESTS):
        if len(talks) < 3 or rng.random() < 0.25:
            salt = rng.choice([{}, {"cache_salt": "tenant"}])
            talks.append((salt, [{"role": "system", "content": rng.choice(systems)}]))
        salt, messages = rng.choice(talks[-4:])
        images = [image(rng.choice("abc"), **rng.choice([{}, {"uuid": "cat"}])) for _ in range(rng.randint(0, 3))]
        messages.append(says(*images, text(rng, rng.randint(5, 80))) if rng.random() < 0.5 else says("look:", *images))
        asked.append(await ask(here, pool, messages, **salt))
        messages.append({"role": "assistant", "content": asked[-1].text})
        assert asked[-1].pick.matched_by == "precise", number
    assert [each.predicted for each in asked] == [each.reported for each in asked]
    assert sum(each.reported > IMAGE_TOKENS for each in asked) > REQUESTS / 3


@pytest.mark.parametrize("pool", [BARE, SGLANG])
async def test_where_nothing_names_images_prompts_with_them_are_estimated(here: Stand, pool: str) -> None:
    """At vLLM without `--enable-scale-out`, and at SGLang: counted by that reason; prompts of texts stay precise."""
    rng = random.Random(f"nameless {pool}")
    before = (await here.page()).total("warmpath_token_prompts_total", pool=pool, outcome="images")
    messages = [says(text(rng, 100), image("one"), text(rng, 100))]
    shown = [await ask(here, pool, messages) for _ in range(2)]
    assert {each.pick.matched_by for each in shown} == {"estimated"}
    assert shown[-1].predicted > 0
    assert shown[-1].reported > 0
    after = (await here.page()).total("warmpath_token_prompts_total", pool=pool, outcome="images")
    assert after == before + len(shown)
    words = text(rng, 200)
    plain = [await ask(here, pool, words) for _ in range(2)]
    assert {each.pick.matched_by for each in plain} == {"precise"}
    assert plain[-1].predicted == plain[-1].reported > 0
