"""`warmpath check --engines`: engines that answer, or do not, on free ports."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from extproc import engine_check
from extproc.cli import main
from extproc.config import Config
from extproc.engine_check import Heard, ask, mistakes, warnings
from tests.ports import free_port
from tests.unit.fleet.parts import Engine
from tests.unit.top.parts import write

MODELS = "/v1/models"


def listed(*models: str, adapters: tuple[str, ...] = (), owner: str = "vllm") -> bytes:
    """A list of models as engines write it."""
    cards = [{"id": name, "owned_by": owner, "parent": None} for name in models]
    cards += [{"id": name, "owned_by": owner, "parent": models[0]} for name in adapters]
    return json.dumps({"object": "list", "data": cards}).encode()


@pytest.fixture
async def engines() -> AsyncIterator[Callable[..., Awaitable[Engine]]]:
    """Starts engines that have this list of models."""
    made: list[Engine] = []

    async def start(page: bytes | None) -> Engine:
        engine = Engine()
        if page is not None:
            engine.pages[MODELS] = page
        await engine.start()
        made.append(engine)
        return engine

    yield start
    for engine in made:
        await engine.stop()


def document(model: dict[str, Any], pools: dict[str, list[str]], engine: str = "auto") -> dict[str, Any]:
    """A configuration of model `chat`."""
    return {
        "models": {"chat": model},
        "pools": {name: {"endpoints": listing, "engine": engine} for name, listing in pools.items()},
    }


def versions(**second: Any) -> dict[str, Any]:
    """Version v1 in pool `old` with all weight, v2 in pool `new` with these settings."""
    return {"versions": {"v1": {"pool": "old", "weight": 1}, "v2": {"pool": "new", **second}}}


async def judged(content: dict[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Mistakes and warnings, each with its place."""
    config = msgspec.convert(content, Config)
    heard = await ask(config, 0.5)
    return list(mistakes(config, heard)), list(warnings(config, heard))


async def test_engines_that_serve_what_the_file_says_are_no_mistake(engines: Any) -> None:
    """By the model's name, another one, or an adapter; a shadow's version is one of them."""
    old, new = await engines(listed("chat")), await engines(listed("base", adapters=("tuned",)))
    pools = {"old": [old.address], "new": [new.address]}
    for second in ({"served_as": "base"}, {"adapter": {"name": "tuned"}}):
        model = {**versions(**second), "shadow": {"version": "v2"}}
        assert await judged(document(model, pools)) == ([], [])
    assert await judged(document({"pool": "old"}, pools)) == ([], [])


async def test_a_version_that_its_engines_do_not_list_is_a_mistake(engines: Any) -> None:
    """Whatever its weight: a rollout could go there. Place, engine, what it lists and the remedy are told."""
    old, new = await engines(listed("chat")), await engines(listed("base"))
    pools = {"old": [old.address], "new": [new.address]}
    [(place, text)], [] = await judged(document(versions(), pools))
    assert (place, text) == (
        "models.chat.versions.v2",
        f"version `v2`: model `chat` is not listed by {new.address} (it lists base): set `served_as` of the version",
    )
    [(place, text)], [] = await judged(document(versions(adapter={"name": "tuned"}), pools))
    assert (place, "LoRA adapter `tuned` is not listed" in text) == ("models.chat.versions.v2", True)
    [(place, text)], [] = await judged(document({"pool": "new"}, pools))
    assert (place, text) == (
        "models.chat",
        f"model `chat` is not listed by {new.address} (it lists base): set `served_as`",
    )


async def test_a_pool_without_any_engine_that_answers_is_a_mistake(engines: Any) -> None:
    """Of a version without weight as well; one of two is a doubt."""
    old, gone = await engines(listed("chat")), f"127.0.0.1:{free_port()}"
    [(place, text)], [] = await judged(document(versions(), {"old": [old.address], "new": [gone]}))
    assert place == "models.chat.versions.v2"
    assert text == (
        f"version `v2`: no endpoint of pool `new` can serve: {gone} cannot be reached: start an engine there, or "
        "correct `pools.new.endpoints`"
    )
    [], [(place, text)] = await judged(document({"pool": "old"}, {"old": [old.address, gone]}))
    assert (place, text) == ("models.chat", f"1 of 2 endpoints of pool `old` can serve: {gone} cannot be reached")


async def test_an_engine_that_never_answers_is_not_waited_for(engines: Any) -> None:
    """It counts as one that cannot be reached."""
    frozen = await engines(None)

    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    frozen.routes[MODELS] = hang
    [(_, text)], [] = await judged(document({"pool": "old"}, {"old": [frozen.address]}))
    assert f"{frozen.address} cannot be reached" in text


@pytest.mark.parametrize(
    ("page", "why"),
    [(None, "HTTP status 404"), (listed(), "the list is empty"), (b"{", "no JSON"), (b'{"object": "list"}', "`data`")],
)
async def test_a_list_that_does_not_tell_is_a_warning(engines: Any, page: bytes | None, why: str) -> None:
    """An engine that wants a key, or a proxy before it, may serve all the same."""
    engine = await engines(page)
    [], [(place, text)] = await judged(document({"pool": "old"}, {"old": [engine.address]}))
    assert place == "pools.old.endpoints"
    assert f"{engine.address} (" in text
    assert why in text


async def test_tensorrt_lists_no_adapters_so_nobody_can_tell(engines: Any) -> None:
    """Whether the file says what it is or the engine does; the model's name is only doubted."""
    engine = await engines(listed("base", owner="tensorrt_llm"))
    model = {"pool": "old", "adapter": {"name": "tuned", "id": 1, "path": "/a"}}
    for kind in ("auto", "tensorrt_llm"):
        [], [(place, text)] = await judged(document(model, {"old": [engine.address]}, kind))
        assert (place, "lists no adapters" in text) == ("models.chat.adapter", True)
    [], [(place, text)] = await judged(document({"pool": "old"}, {"old": [engine.address]}))
    assert (place, "model `chat` is not listed" in text) == ("models.chat", True)


async def test_names_that_cannot_be_resolved_are_told(engines: Any) -> None:
    """One of several is a warning; where no other address is left, its version cannot serve."""
    old = await engines(listed("chat"))
    lost = "no-such-host.invalid:80"
    [], [(place, text)] = await judged(document({"pool": "old"}, {"old": [old.address, lost]}))
    assert (place, "no-such-host.invalid" in text) == ("pools.old.endpoints", True)
    [(place, text)], _ = await judged(document({"pool": "old"}, {"old": [lost]}))
    assert (place, "has no endpoints" in text, "correct `pools.old.endpoints`" in text) == ("models.chat", True, True)


async def test_many_engines_are_asked_at_once(engines: Any) -> None:
    """All of them have the question before the first has answered; each once, however many models there are."""
    made = [await engines(None) for _ in range(20)]
    asked, all_asked = 0, asyncio.Event()

    async def answer(_: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == len(made):
            all_asked.set()
        await all_asked.wait()
        return web.Response(body=listed("chat"))

    for engine in made:
        engine.routes[MODELS] = answer
    content = document({"pool": "old"}, {"old": [engine.address for engine in made]})
    content["models"]["other"] = {"pool": "old", "served_as": "chat"}
    config = msgspec.convert(content, Config)
    heard: Heard = await ask(config)
    assert (asked, list(mistakes(config, heard)), list(warnings(config, heard))) == (20, [], [])


async def test_the_command_tells_it_with_file_and_line(
    engines: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and all mistakes, or 0 and how many were asked; without the option nobody is."""
    old, new = await engines(listed("chat")), await engines(listed("base"))
    pools = {"old": [old.address], "new": [new.address]}

    async def told(model: dict[str, Any], *options: str) -> tuple[int, str]:
        file = write(tmp_path / "w.yaml", document(model, pools))
        code = await asyncio.to_thread(main, ["check", "--config", str(file), *options])
        return code, capsys.readouterr().out

    code, out = await told(versions(), "--engines")
    assert code == 2
    assert out.startswith(f"{tmp_path / 'w.yaml'}:7: models.chat.versions.v2: version `v2`: model `chat` is not listed")
    both = {"versions": {"v1": {"pool": "old", "served_as": "x", "weight": 1}, "v2": {"pool": "new"}}}
    code, out = await told(both, "--engines", "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["engines"], len(report["further"])) == (2, False, 2, 1)
    code, out = await told(versions(served_as="base"), "--engines")
    assert (code, "; engines asked: 2\n" in out) == (0, True)
    code, out = await told(versions())
    assert (code, "engines asked" in out) == (0, False)


def test_findings_of_a_file_whose_engines_are_away() -> None:
    """From outside an event loop, as the command calls it."""
    gone = f"127.0.0.1:{free_port()}"
    told = engine_check.findings(msgspec.convert(document({"pool": "old"}, {"old": [gone]}), Config))
    assert (told.asked, len(told.errors), list(told.warnings)) == (1, 1, [])
    assert told.errors[0].startswith("models.chat: no endpoint of pool `old` can serve")
