"""Token ids of requests: in time or not at all, and never a reason for a request to fail."""

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from extproc.clock import ManualClock
from extproc.telemetry.metrics import Metrics
from extproc.tokens import template
from extproc.tokens.encoder import Encoder
from extproc.tokens.local import MAX_CHARS
from extproc.tokens.patience import STRIKES
from extproc.tokens.tokenizing import MAX_RUNNING, THREADS, Engines
from tests.unit.tokens import folders
from tests.unit.tokens.parts import Server, ask, config_of, ids_of, pool_of, rendered, serving, tokenized, tokenizing
from tests.waiting import until

USER = [{"role": "user", "content": "hi"}]
RENDER = "/v1/chat/completions/render"


def engine_only(budget_ms: float = 10_000.0, **fields: Any) -> Any:
    """A configuration whose pool asks its engines."""
    return config_of({"p": pool_of({"source": "engine", "budget_ms": budget_ms}, **fields)})


def local(folder: Path, budget_ms: float = 10_000.0) -> Any:
    """A configuration whose pool has a tokenizer's folder."""
    return config_of({"p": pool_of({"tokenizer": str(folder), "budget_ms": budget_ms})})


def at(server: Server) -> Engines:
    """Engines that are one server."""
    return Engines(lambda _: [server.at])


async def test_a_folder_answers_without_any_engine(tmp_path: Path) -> None:
    """The ids are those of the whole text; a next turn makes only what is new."""
    folder = folders.write(tmp_path, folders.byte_level())
    system = {"role": "system", "content": "word " * 400}
    async with tokenizing(local(folder)) as (room, counted):
        first = await ask(room, messages=[system, *USER])
        made = counted.made
        second = await ask(room, messages=[system, *USER, {"role": "assistant", "content": "yes"}, *USER])
    text = f"<|im_start|>system\n{system['content']}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert ids_of(first) == folders.byte_level().encode(text + "<|im_start|>assistant\n").ids
    assert (counted.found > 400, counted.made - made < 100) == (True, True)
    assert counted.found + counted.made - made == len(ids_of(second))
    assert counted.outcomes == {"ok": 2}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": USER, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": USER, "chat_template": "x"}),
        ("/v1/chat/completions", {"messages": USER, "truncate_prompt_tokens": 5}),
        ("/v1/completions", {"prompt": [1, 2], "truncate_prompt_tokens": 1}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
async def test_what_a_folder_cannot_tell_exactly_it_does_not_tell(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    """Better an estimated profile than a wrong precise one."""
    async with tokenizing(local(folders.write(tmp_path, folders.byte_level()))) as (room, counted):
        assert await ask(room, path, **fields) is None
    assert counted.outcomes == {"unsupported": 1}


async def test_a_template_that_loops_does_not_hold_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads are given back: prompts without the template have their ids after it."""
    monkeypatch.setattr(template, "RENDER_S", 0.05)
    looping = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    folder = folders.write(tmp_path, folders.byte_level(), looping)
    async with tokenizing(local(folder)) as (room, counted):
        await asyncio.gather(*(ask(room, messages=USER * (number + 1)) for number in range(2 * THREADS)))
        assert await ask(room, "/v1/completions", prompt="a plain text") is not None
    assert counted.outcomes == {"too_long": 2 * THREADS, "ok": 1}


async def test_a_template_of_the_clients_is_never_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that is well: only the operator's are run here."""
    folder = folders.write(tmp_path, folders.byte_level())
    async with tokenizing(local(folder)) as (room, counted):
        assert await ask(room, messages=USER) is not None
        monkeypatch.setattr(template, "Template", None)
        for fields in ({"chat_template": "{{ messages }}"}, {"chat_template_kwargs": {"chat_template": "x"}}):
            assert await ask(room, messages=USER, **fields) is None
    assert counted.outcomes == {"ok": 1, "unsupported": 2}


async def test_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    """`tool_use` is taken when the request has tools."""
    folder = folders.write(tmp_path, folders.byte_level(), "plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    async with tokenizing(local(folder)) as (room, _):
        plain = await ask(room, messages=USER)
        tools = await ask(room, messages=USER, tools=[{"type": "function", "function": {"name": "f"}}])
    encode = folders.byte_level().encode
    assert (ids_of(plain), ids_of(tools)) == (encode("plain").ids, encode("tools").ids)


async def test_ids_that_the_client_gives_need_no_source() -> None:
    """Not even one that rests, and they say nothing of how well it is."""
    async with serving({}) as dead, tokenizing(engine_only(), at(dead)) as (room, counted):
        for number in range(STRIKES + 1):
            await ask(room, messages=USER * (number + 1))
            prompt = await ask(room, "/v1/completions", prompt=[3, 1, 2], cache_salt="s")
    assert ids_of(prompt) == [3, 1, 2]
    assert prompt is not None
    assert (prompt.adapter, prompt.salt) == ("", "s")
    assert counted.outcomes == {"failed": STRIKES, "resting": 1, "ok": STRIKES + 1}


async def test_a_slow_source_costs_the_budget_a_few_times_and_then_nothing() -> None:
    """A tokenizer that sleeps: requests go on late, then are not held up at all, and each is counted."""
    async with serving({RENDER: rendered(1)}) as slow:
        slow.delay_s = 60.0
        async with tokenizing(engine_only(budget_ms=5.0), at(slow)) as (room, counted):
            prompts = [await ask(room, messages=USER * (number + 1)) for number in range(STRIKES + 4)]
    assert prompts == [None] * (STRIKES + 4)
    assert counted.outcomes == {"late": STRIKES, "resting": 4}


async def test_a_tokenizer_that_is_late_with_new_prompts_only_is_asked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes soon after the budget makes the next turn an early one: the source need not rest."""
    gate, encode = threading.Event(), Encoder.encode

    def held(self: Encoder, text: str, *, special_tokens: bool) -> Any:
        gate.wait(60.0)
        return encode(self, text, special_tokens=special_tokens)

    monkeypatch.setattr(Encoder, "encode", held)
    config = local(folders.write(tmp_path, folders.byte_level()), budget_ms=1.0)
    async with tokenizing(config, clock=ManualClock()) as (room, counted):
        for number in range(2 * STRIKES):
            gate.clear()
            assert await ask(room, "/v1/completions", prompt=f"prompt {number}") is None
            made = counted.made
            gate.set()
            await until(lambda before=made: counted.made > before)  # type: ignore[misc]
    assert counted.outcomes == {"late": 2 * STRIKES}


async def test_a_failing_source_is_left_alone_and_tried_again() -> None:
    """A tokenizer that raises: after some failures only one request in a while meets it."""
    clock = ManualClock()
    async with serving({RENDER: (500, {})}) as engine, tokenizing(engine_only(), at(engine), clock) as (room, counted):
        for number in range(STRIKES + 2):
            await ask(room, messages=USER * (number + 1))
        assert counted.outcomes == {"failed": STRIKES, "resting": 2}
        clock.advance(1.0)
        engine.answers[RENDER] = rendered(7)
        assert await ask(room, messages=USER) is not None
        assert await ask(room, messages=USER * 9) is not None
    assert counted.outcomes == {"failed": STRIKES, "resting": 2, "ok": 2}


async def test_nobody_there_is_a_failure() -> None:
    """No endpoint that can be asked, or one that refuses connections."""
    async with serving({}) as gone:
        pass
    for engines in (Engines(lambda _: []), at(gone)):
        async with tokenizing(engine_only(), engines) as (room, counted):
            assert await ask(room, messages=USER) is None
        assert counted.outcomes == {"failed": 1}


async def test_late_work_goes_on_and_serves_the_next_request() -> None:
    """What came too late for one request is found by the next one with the same prompt."""
    async with serving({RENDER: rendered(1, 2)}) as engine, tokenizing(engine_only(5.0), at(engine)) as (room, counted):
        engine.delay_s = 60.0
        assert await ask(room, messages=USER) is None
        engine.let_go.set()
        await until(lambda: counted.made == 2)
        await room.apply(engine_only(5.0))
        for _ in range(100):  # the budget is small: a busy machine may need more than one try
            if (prompt := await ask(room, messages=USER)) is not None:
                break
    assert ids_of(prompt) == [1, 2]
    assert len(engine.asked) == 1


async def test_a_stuck_tokenizer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that never return: requests go on without ids, the loop runs on, and no work piles up."""
    release, stuck = threading.Event(), threading.Event()

    def encode(*_: object, **__: object) -> Any:
        stuck.set()
        release.wait(60.0)
        raise RuntimeError

    monkeypatch.setattr(Encoder, "encode", encode)
    config = local(folders.write(tmp_path, folders.byte_level()), budget_ms=5.0)
    try:
        async with tokenizing(config) as (room, counted):
            for number in range(STRIKES + 2):
                assert await ask(room, messages=USER * (number + 1)) is None
            assert counted.outcomes == {"late": STRIKES, "resting": 2}
            await asyncio.get_running_loop().run_in_executor(None, stuck.wait, 60.0)
            release.set()
    finally:
        release.set()


async def test_only_so_many_prompts_are_worked_on() -> None:
    """Whoever comes when all places are taken goes on at once."""
    async with serving({RENDER: rendered(1)}) as slow:
        slow.delay_s = 60.0
        async with tokenizing(engine_only(budget_ms=1.0), at(slow)) as (room, counted):
            asking = (ask(room, messages=USER * (number + 1)) for number in range(MAX_RUNNING + 3))
            assert await asyncio.gather(*asking) == [None] * (MAX_RUNNING + 3)
    assert counted.outcomes == {"late": MAX_RUNNING, "busy": 3}


async def test_a_request_that_goes_away_takes_nothing_with_it() -> None:
    """Cancelling one who waits leaves the work to fill the cache, and no error behind."""
    async with serving({RENDER: rendered(1, 2)}) as engine, tokenizing(engine_only(), at(engine)) as (room, counted):
        engine.delay_s = 60.0
        waiting = asyncio.create_task(ask(room, messages=USER))
        await until(lambda: len(engine.asked) == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engine.let_go.set()
        await until(lambda: counted.made == 2)
        assert await ask(room, messages=USER) is not None
    assert len(engine.asked) == 1


async def test_an_error_that_nobody_waits_for_any_more_is_not_shouted(caplog: pytest.LogCaptureFixture) -> None:
    """Its request is gone."""
    async with serving({RENDER: (500, {})}) as engine, tokenizing(engine_only(), at(engine)) as (room, counted):
        engine.delay_s = 60.0
        waiting = asyncio.create_task(ask(room, messages=USER))
        await until(lambda: len(engine.asked) == 1)
        waiting.cancel()
        engine.let_go.set()
        await until(lambda: room.running == 0)
        assert waiting.cancelled()
        del waiting  # its traceback holds what was waited for
        gc.collect()
    assert counted.outcomes == {}
    assert caplog.records == []


async def test_an_error_of_any_kind_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a source raises, the request goes on; the log names the kind of error, and no prompt."""

    def encode(_: Encoder, text: str, **__: object) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr(Encoder, "encode", encode)
    async with tokenizing(local(folders.write(tmp_path, folders.byte_level()))) as (room, counted):
        assert await ask(room, messages=[{"role": "user", "content": "very secret words"}]) is None
    assert counted.outcomes == {"failed": 1}
    assert "secret" not in caplog.text
    assert [record.error for record in caplog.records if hasattr(record, "error")] == ["RuntimeError"]


async def test_pools_of_estimated_profiles_have_no_source() -> None:
    """They are not asked, and asking them anyway is answered at once."""
    async with (
        serving({RENDER: rendered(1)}) as engine,
        tokenizing(engine_only(profiles="estimated"), at(engine)) as (room, counted),
    ):
        assert await ask(room, messages=USER) is None
        assert await ask(room, pool="another", messages=USER) is None
    assert counted.outcomes == {"no_source": 2}
    assert engine.asked == []


async def test_a_text_beyond_any_prompt_is_not_tokenized_here(tmp_path: Path) -> None:
    """Other requests would wait while its ids are handed over."""
    async with tokenizing(local(folders.write(tmp_path, folders.byte_level()))) as (room, counted):
        assert await ask(room, "/v1/completions", prompt="a" * (MAX_CHARS + 1)) is None
        assert counted.outcomes == {"too_long": 1}


async def test_a_folder_that_broke_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was checked before the start; after that it is a source that fails."""
    folder = folders.write(tmp_path, folders.byte_level())
    (folder / "tokenizer.json").write_text("{}")
    async with tokenizing(local(folder)) as (room, counted):
        for number in range(2):
            assert await ask(room, messages=USER * (number + 1)) is None
    assert counted.outcomes == {"failed": 2}
    assert [record.message for record in caplog.records] == ["a pool's tokenizer cannot be used"]


async def test_a_changed_configuration_keeps_what_did_not_change() -> None:
    """Other settings make a new source; the same keep their cache."""
    async with serving({"/tokenize": tokenized(5)}) as engine:
        engines = Engines(lambda _: [engine.at], kinds=lambda _: ("sglang",))
        async with tokenizing(engine_only(), engines) as (room, _):
            await ask(room, messages=USER)
            await room.apply(engine_only())
            await ask(room, messages=USER)
            assert len(engine.asked) == 1
            await room.apply(engine_only(9_000.0))
            await ask(room, messages=USER)
            assert len(engine.asked) == 2


async def test_large_bodies_are_answered_as_well(tmp_path: Path) -> None:
    """They are read in a thread."""
    async with tokenizing(local(folders.write(tmp_path, folders.byte_level()))) as (room, _):
        prompt = await ask(room, "/v1/completions", prompt="word " * 20_000)
    assert ids_of(prompt) == folders.byte_level().encode("word " * 20_000).ids


def test_metrics_tell_outcomes_waits_and_what_caches_spared() -> None:
    """Every outcome is a label; no prompt is."""
    metrics = Metrics()
    metrics.tokens.asked("p", "ok", 0.003)
    metrics.tokens.asked("p", "late", 0.05)
    metrics.tokens.reused("p", 90, 10)
    page = metrics.page().decode()
    for line in (
        'warmpath_token_prompts_total{outcome="ok",pool="p"} 1.0',
        'warmpath_token_prompts_total{outcome="late",pool="p"} 1.0',
        'warmpath_token_wait_seconds_bucket{le="0.004",pool="p"} 1.0',
        'warmpath_token_ids_total{made="found",pool="p"} 90.0',
        'warmpath_token_ids_total{made="made",pool="p"} 10.0',
    ):
        assert line in page
