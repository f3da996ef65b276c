"""Prompts with images: named by a render route, and by nothing else."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.clock import ManualClock
from extproc.request.model import RouteKind
from extproc.state.exact_blocks import Medium, TokenPrompt, chain_of
from extproc.tokens.exchanged import of_render
from extproc.tokens.http import Answer
from extproc.tokens.tokenizing import MAX_SHOWING, Engines
from extproc.tokens.values import Asked, NoTokensError, Whole
from tests.unit.tokens import folders
from tests.unit.tokens.parts import (
    DISABLED,
    Server,
    ask,
    config_of,
    ids_of,
    pool_of,
    rendered,
    serving,
    tokenized,
    tokenizing,
)

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
RENDER = CHAT + "/render"
PATIENT = {"budget_ms": 10_000.0}
OF_ENGINES = config_of({"p": pool_of({"source": "engine", **PATIENT})})
ONE = {"mm_hashes": {"image": ["f00d"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}}


def shown(url: str = "data:image/png;base64,aGk=", text: str = "what is it?") -> list[dict[str, Any]]:
    """A conversation about one image."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def engines(*servers: Server, kinds: tuple[str, ...] = ()) -> Engines:
    """Engines of every pool."""
    return Engines(lambda _: [server.at for server in servers], kinds=lambda _: kinds)


async def test_an_image_is_named_as_the_engine_names_it() -> None:
    """By the hash and the place in the render route's answer; the whole body is sent, whatever engine it is."""
    async with (
        serving({RENDER: rendered(1, 9, 9, 2, features=ONE)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, counted),
    ):
        prompt = await ask(room, messages=shown(), cache_salt="s")
    assert prompt == TokenPrompt(prompt.ids if prompt else (), "", "s", (Medium("f00d", 1, 2),))
    assert ids_of(prompt) == [1, 9, 9, 2]
    assert engine.asked[0][1]["messages"] == shown()
    assert engine.asked[0][1]["mm_payload"] == "none"
    assert counted.outcomes == {"ok": 1}


async def test_media_of_several_kinds_are_in_the_order_of_their_places() -> None:
    """Those that begin at one place keep the order of the answer's kinds, as vLLM keeps it."""
    features = {
        "mm_hashes": {"audio": ["late", "same"], "image": ["early", "twin"]},
        "mm_placeholders": {
            "audio": [{"offset": 3, "length": 1}, {"offset": 2, "length": 1}],
            "image": [{"offset": 0, "length": 2}, {"offset": 2, "length": 1}],
        },
        "kwargs_data": None,
        "mm_metadata": None,
    }
    async with (
        serving({RENDER: rendered(1, 2, 3, 4, features=features)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, _),
    ):
        prompt = await ask(room, messages=shown())
    assert prompt is not None
    assert prompt.media == (Medium("early", 0, 2), Medium("same", 2, 1), Medium("twin", 2, 1), Medium("late", 3, 1))


@pytest.mark.parametrize(
    ("features", "why"),
    [
        (None, "images"),
        ({"mm_hashes": {"image": ["x"]}, "mm_placeholders": {}}, "failed"),
        ({"mm_hashes": {"image": []}, "mm_placeholders": ONE["mm_placeholders"]}, "failed"),
        ({"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 3, "length": 2}]}}, "failed"),
        ({"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": -1, "length": 2}]}}, "failed"),
        ({"mm_hashes": {"image": [5]}, "mm_placeholders": ONE["mm_placeholders"]}, "failed"),
        ({}, "failed"),
    ],
)
async def test_what_does_not_name_every_image_is_no_answer(features: Any, why: str) -> None:
    """Blocks with images differ by more than their ids, so ids alone would be taken for those of other images."""
    async with (
        serving({RENDER: rendered(1, 9, 9, 2, features=features)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, counted),
    ):
        assert await ask(room, messages=shown()) is None
    assert counted.outcomes == {why: 1}


_NUMBERS = st.one_of(st.integers(-3, 9), st.integers(2**63 - 1, 2**65), st.none(), st.floats())
_RANGES: st.SearchStrategy[Any] = st.one_of(
    st.fixed_dictionaries({"offset": _NUMBERS, "length": _NUMBERS}), st.just({}), st.text(max_size=2)
)
_BY_KIND = st.dictionaries(st.sampled_from(["image", "audio"]), st.lists(_RANGES, max_size=3), max_size=2)
_NAMES = st.dictionaries(
    st.sampled_from(["image", "audio"]), st.lists(st.one_of(st.text(max_size=3), st.integers()), max_size=3), max_size=2
)


@given(names=_NAMES, ranges=_BY_KIND, ids=st.lists(st.integers(0, 9), max_size=8))
def test_whatever_a_server_tells_of_images_is_read_or_refused(names: Any, ranges: Any, ids: list[int]) -> None:
    """Never anything else; what is read lies inside the ids, in order, and every block size takes it."""
    body = json.dumps({"token_ids": ids, "features": {"mm_hashes": names, "mm_placeholders": ranges}}).encode()
    asked = Asked(RouteKind.CHAT, b"{}", Whole(), media=True)
    try:
        made = of_render(asked, Answer(200, body))
    except NoTokensError:
        return
    offsets = [each.offset for each in made.media]
    assert offsets == sorted(offsets)
    assert all(0 <= each.offset <= each.offset + each.tokens <= len(ids) for each in made.media)
    assert len(made.media) == sum(map(len, names.values()))
    for size in (1, 3):
        assert len(chain_of(TokenPrompt(made.ids, media=made.media), size)) == len(ids) // size


async def test_images_in_other_apis_are_named_too() -> None:
    """What their engine makes of such a body is known from its answer alone."""
    async with (
        serving({"/v1/messages/render": rendered(1, 9, 9, 2, features=ONE)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, _),
    ):
        prompt = await ask(room, "/v1/messages", messages=USER, max_tokens=5)
    assert prompt is not None
    assert prompt.media == (Medium("f00d", 1, 2),)


@pytest.mark.parametrize("kind", ["sglang", "tensorrt_llm"])
async def test_engines_that_name_images_otherwise_have_no_ids_for_them(kind: str) -> None:
    """What a render server calls an image is in no event of theirs: a hit would end where the image begins."""
    answer = rendered(1, 9, 9, 2, features=ONE)
    async with serving({RENDER: answer, "/v1/messages/render": answer}) as server:
        config = config_of({"p": pool_of({"source": "render", "url": f"http://{server.at}", **PATIENT})})
        async with tokenizing(config, engines(kinds=(kind,))) as (room, counted):
            assert await ask(room, messages=shown()) is None
            assert await ask(room, "/v1/messages", messages=USER, max_tokens=5) is None
        # That a body in another API's form shows an image may be known from the answer only.
        assert server.paths == ["/v1/messages/render"]
    assert counted.outcomes == {"images": 2}


@pytest.mark.parametrize("kind", ["vllm", "sglang", "tensorrt_llm"])
async def test_no_other_route_is_asked_about_images(kind: str) -> None:
    """Routes that tokenize give ids without names; the reason is told, and no engine is blamed."""
    async with (
        serving({RENDER: DISABLED, "/tokenize": tokenized(5)}) as engine,
        tokenizing(OF_ENGINES, engines(engine, kinds=(kind,))) as (room, counted),
    ):
        assert await ask(room, messages=shown()) is None
        assert await ask(room, messages=USER) is not None or kind == "tensorrt_llm"
    assert counted.outcomes["images"] == 1
    assert engine.paths.count("/tokenize") == (kind != "tensorrt_llm")


async def test_tensors_of_a_version_that_cannot_leave_them_out_are_not_read() -> None:
    """Megabytes for a small image: such prompts go without ids, and the source is not blamed."""
    features = {**ONE, "kwargs_data": {"image": ["x" * (3 << 20)]}}
    async with (
        serving({RENDER: rendered(1, 9, 9, 2, features=features)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, counted),
    ):
        for _ in range(4):
            assert await ask(room, messages=shown()) is None
    assert counted.outcomes == {"images": 4}


async def test_prompts_with_images_are_told_apart_by_their_images() -> None:
    """The same text about the same image is known; about another image it is asked for."""
    async with (
        serving({RENDER: rendered(1, 9, 9, 2, features=ONE)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, _),
    ):
        first = await ask(room, messages=shown())
        assert await ask(room, messages=shown()) == first
        assert len(engine.asked) == 1
        await ask(room, messages=shown("data:image/png;base64,aGo="))
    assert len(engine.asked) == 2


async def test_what_a_url_names_is_asked_for_each_time() -> None:
    """The image behind it may change, and its hash with it."""
    async with (
        serving({RENDER: rendered(1, 9, 9, 2, features=ONE)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, _),
    ):
        for _ in range(2):
            await ask(room, messages=shown("https://example.org/now.jpg"))
    assert len(engine.asked) == 2


async def test_with_auto_a_tokenizers_folder_leaves_images_to_the_engines(tmp_path: Path) -> None:
    """It turns no images into tokens; with `local` nobody is asked, since nobody was named."""
    folders.write(tmp_path, folders.byte_level())
    folder = str(tmp_path)
    config = config_of(
        {
            "auto": pool_of({"source": "auto", "tokenizer": folder, **PATIENT}),
            "local": pool_of({"source": "local", "tokenizer": folder, **PATIENT}),
        }
    )
    async with (
        serving({RENDER: rendered(1, 9, 9, 2, features=ONE)}) as engine,
        tokenizing(config, engines(engine)) as (room, counted),
    ):
        shows = await ask(room, pool="auto", messages=shown())
        assert shows is not None
        assert shows.media == (Medium("f00d", 1, 2),)
        assert await ask(room, pool="auto", path="/v1/completions", prompt="hello") is not None
        assert await ask(room, pool="local", messages=shown()) is None
    assert engine.paths == [RENDER]
    assert counted.outcomes == {"ok": 2, "images": 1}


async def test_trouble_with_images_costs_texts_nothing() -> None:
    """A server that fails to load images, or loads them slowly, is left alone with them only."""
    async with (
        serving({RENDER: (500, {"error": {"message": "cannot be loaded", "code": 500}})}) as engine,
        tokenizing(OF_ENGINES, engines(engine), ManualClock()) as (room, counted),
    ):
        for number in range(4):
            assert await ask(room, messages=shown(text=str(number))) is None
        engine.answers[RENDER] = rendered(7)
        assert ids_of(await ask(room, messages=USER)) == [7]
    assert counted.outcomes == {"failed": 3, "resting": 1, "ok": 1}


async def test_images_that_come_late_are_counted_apart_from_texts() -> None:
    """Nobody waits for them beyond the budget, and texts go on being asked for."""
    config = config_of({"p": pool_of({"source": "engine", "budget_ms": 50.0})})
    async with (
        serving({RENDER: rendered(1, 9, 9, 2, features=ONE)}) as engine,
        tokenizing(config, engines(engine), ManualClock()) as (room, counted),
    ):
        engine.delay_s = 30.0
        for number in range(4):
            assert await ask(room, messages=shown(text=str(number))) is None
        assert counted.outcomes == {"late": 3, "resting": 1}
        await ask(room, messages=USER)
    assert counted.outcomes == {"late": 4, "resting": 1}


async def test_few_prompts_with_images_are_worked_on_at_a_time() -> None:
    """They take servers' time; what comes beyond goes without ids at once."""
    async with (
        serving({RENDER: rendered(1, 9, 9, 2, features=ONE)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, counted),
    ):
        engine.delay_s = 30.0
        asking = [asyncio.create_task(ask(room, messages=shown(text=str(n)))) for n in range(MAX_SHOWING + 1)]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        assert [one.result() for one in done] == [None]
        assert counted.outcomes == {"busy": 1}
        engine.let_go.set()
        await asyncio.gather(*asking)
    assert counted.outcomes == {"busy": 1, "ok": MAX_SHOWING}
