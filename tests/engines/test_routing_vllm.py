"""Warmpath with the real Envoy in front of two real vLLM engines: is the prediction true, and what does a crash cost?

The word of vLLM itself decides: its `usage`, and its own counters at `/metrics`.
"""

import asyncio
import inspect
import time
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.engines.gateway import (
    CACHED,
    ENGINE_RUNNING,
    IN_FLIGHT,
    OUTPUT,
    PREDICTED,
    PROMPT,
    REQUESTS,
    SESSIONS,
    TTFT_COUNT,
    TTFT_SUM,
    Gateway,
    Messages,
    prose,
    turn,
)
from tests.engines.vllm_engine import BLOCK_SIZE, VllmEngine
from tests.waiting import until_async

pytestmark = pytest.mark.vllm

ANSWER_TOKENS = 4


class Conversation(msgspec.Struct):
    """An append-only conversation and the engine that has it.

    Attributes:
        name: what makes its text unlike any other's.
        session: its session id; empty when it names none.
        messages: what the next turn sends.
        engine: number of the engine that answered the first turn.
        prompt_tokens: length of the last turn's prompt, as vLLM counted it.
    """

    name: str
    session: str
    messages: Messages
    engine: int = -1
    prompt_tokens: int = 0

    async def take_turn(self, through: Gateway) -> tuple[int, int]:
        """Send the next turn; returns the engine that answered and the cached tokens it reported."""
        answer, engine = await through.ask_seeing_engine(self.messages, session=self.session)
        self.prompt_tokens = answer.prompt_tokens
        question = prose(f"{self.name} goes on after {len(self.messages)}", 150)
        self.messages = turn(self.messages, answer.text, question)
        return engine, answer.cached_tokens


def opening(name: str, text: str) -> Messages:
    """A conversation's first turn; its system prompt parts it from all others within the first block."""
    return [{"role": "system", "content": name}, {"role": "user", "content": text}]


async def opened(through: Gateway, name: str, *, with_session: bool) -> list[Conversation]:
    """Conversations after their first turn, two or more on each engine.

    An idle engine is picked by a hash of the prompt's beginning, so 24 conversations leave one of two engines with
    less than two once in 300,000 runs.
    """
    conversations: list[Conversation] = []
    for number in range(24):
        own = f"{name} {number}"
        fresh = Conversation(own, own if with_session else "", opening(own, prose(own, 900)))
        fresh.engine, cached = await fresh.take_turn(through)
        assert cached == 0
        conversations.append(fresh)
        if all(sum(each.engine == engine for each in conversations) >= 2 for engine in range(2)):
            return conversations
    pytest.fail("24 conversations did not reach both engines twice")


@pytest.mark.parametrize("with_session", [False, True])
async def test_later_turns_go_back_to_the_engine_that_has_the_conversation(
    through: Gateway, with_session: bool
) -> None:
    """Each later turn of a conversation meets the engine of its first, and vLLM reports the earlier turn as cached.

    By the pin of its session with a session header, and without one by the pin of the turn that it continues. "The
    earlier turn" is its prompt in whole blocks; one block less is allowed, because the first word of the answer may
    merge with the prompt's last token.
    """
    conversations = await opened(through, f"back {with_session}", with_session=with_session)
    before = await through.settled()
    for conversation in conversations:
        for _ in range(2):  # in a row: strict alternation between two engines must not pass for affinity
            whole_blocks = conversation.prompt_tokens // BLOCK_SIZE - 1
            engine, cached = await conversation.take_turn(through)
            assert engine == conversation.engine, conversation.name
            assert cached >= whole_blocks * BLOCK_SIZE > 0
    grown = await through.settled() - before
    turns = 2 * len(conversations)
    assert grown[f"{SESSIONS}{{pinned}}"] == turns
    assert grown[f"{SESSIONS}{{none}}"] == 0


async def test_prompts_that_begin_alike_go_where_the_beginning_is(through: Gateway) -> None:
    """Without any session, a question about a known text meets the engine that has the text, and finds it cached.

    A text differs from the next in its first block, and a question about it in its last: nothing but the prompt can
    tell where it was.
    """
    homes = []
    for number in range(6):
        text = opening(f"shared {number}", prose(f"shared {number}", 3000))
        _, home = await through.ask_seeing_engine(text)
        homes.append(home)
        for question in range(3):
            longer = [*text[:1], {"role": "user", "content": text[1]["content"] + prose(f"asks {question}", 100)}]
            await through.settled()
            answer, engine = await through.ask_seeing_engine(longer)
            assert engine == home
            assert answer.cached_tokens > answer.prompt_tokens * 3 // 4
    print(homes)


async def test_predicted_cached_tokens_are_those_vllm_reports(through: Gateway) -> None:
    """What a later turn is predicted to find cached is what vLLM reports, to one of its blocks.

    A turn's past was counted by the engine itself, so that neither the template nor the bytes of a token matter: prose
    at 3.3 bytes a token and source code at 2 are mixed.
    """
    for number, characters in enumerate((1200, 2400, 1200, 2400)):  # teaches the pool's ratio
        name = f"teaches {number}"
        await through.ask(opening(name, prose(name, characters)))
    source = inspect.getsource(asyncio.base_events)
    texts = [prose("prose", characters) for characters in (600, 2000, 5000)] + [source[:1500], source[3000:7000]]
    rows = ["prompt predicted reported"]
    misses = []
    for number, text in enumerate(texts):
        messages = opening(f"predicted {number}", text)
        for later in (False, True, True):
            before = await through.settled()
            answer = await through.ask(messages, max_tokens=ANSWER_TOKENS)
            grown = await through.settled() - before
            assert grown[CACHED] == answer.cached_tokens
            assert grown[PROMPT] == answer.prompt_tokens
            assert (grown[PREDICTED] > 0) == (answer.cached_tokens > 0) == later
            row = f"{answer.prompt_tokens:6} {grown[PREDICTED]:9.0f} {answer.cached_tokens:8}"
            rows.append(row)
            if abs(grown[PREDICTED] - answer.cached_tokens) > BLOCK_SIZE:
                misses.append(row)
            messages = turn(messages, answer.text, prose(f"asks {number} {len(messages)}", 150))
    print("\n".join(rows))
    assert not misses


async def test_usage_and_ttft_of_a_stream_come_from_the_access_log(through: Gateway) -> None:
    """With include_usage, tokens reach the metrics as vLLM told them, and TTFT is the body's first byte.

    vLLM sends its headers before the prefill. TTFT runs from the request's last byte at Envoy to the body's first,
    so it is never above what the client saw of the body; taken from the headers it could not be above what the client
    saw of these. Three cold prompts are summed, so that one stall of the client does not matter.
    """
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    before = await through.settled()
    prompts = [opening(name, prose(name, 6000)) for name in ("cold 1", "cold 2", "cold 3")]
    answers = [await through.ask(prompt, **options) for prompt in prompts]
    answers.append(await through.ask(prompts[0], **options))
    grown = await through.settled() - before
    assert [answer.cached_tokens > 0 for answer in answers] == [False, False, False, True]
    assert grown[PROMPT] == sum(answer.prompt_tokens for answer in answers)
    assert grown[CACHED] == sum(answer.cached_tokens for answer in answers)
    assert grown[OUTPUT] == len(answers) * ANSWER_TOKENS
    assert grown[TTFT_COUNT] == len(answers)
    print([(f"{answer.headers_s:.3f}", f"{answer.first_byte_s:.3f}") for answer in answers], grown[TTFT_SUM])
    headers_s, first_byte_s = (
        sum(each) for each in zip(*((a.headers_s, a.first_byte_s) for a in answers), strict=True)
    )
    assert headers_s < grown[TTFT_SUM] <= first_byte_s


async def test_a_stream_without_usage_is_routed_and_counted(through: Gateway) -> None:
    """Without include_usage nobody learns its tokens; it is counted, timed and settled, and its next turn comes back.

    Unknown tokens count as nothing, rather than as a miss.
    """
    messages = opening("no usage", prose("no usage", 1500))
    before = await through.settled()
    first, engine = await through.ask_seeing_engine(messages, stream=True)
    grown = await through.settled() - before
    assert first.usage is None
    assert grown[f"{REQUESTS}{{ok}}"] == grown[TTFT_COUNT] == 1
    assert grown[PROMPT] == grown[CACHED] == grown[OUTPUT] == 0
    next_turn = turn(messages, first.text, "And now?")
    second, again = await through.ask_seeing_engine(next_turn)
    assert again == engine
    assert second.cached_tokens > 0


class Sent(msgspec.Struct):
    """One request of the crash test.

    Attributes:
        name: what makes its text unlike any other's.
        streamed: whether it asks for a stream.
        tokens: how many tokens it has generated for it.
        begun: when it was sent, `time.monotonic`.
        error: why it failed; None when it did not.
    """

    name: str
    streamed: bool
    tokens: int
    begun: float = 0.0
    error: Exception | None = None

    async def run(self, through: Gateway) -> None:
        """Send it and note how it went."""
        self.begun = time.monotonic()
        try:
            await through.ask(opening(self.name, "Go on."), stream=self.streamed, max_tokens=self.tokens)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.error = error


async def test_a_killed_engine_loses_no_new_request(through: Gateway, engines: list[VllmEngine]) -> None:
    """SIGKILL of one engine under load breaks at most the streams that are open on it.

    Everything begun after the kill succeeds, and so does every request that is not streamed, also those the engine
    was working on: Envoy sends them again to the other. No charge stays behind.
    """
    long = [Sent(f"long {number}", streamed=number < 4, tokens=600) for number in range(12)]
    steady = [Sent(f"steady {number}", streamed=number % 2 == 0, tokens=8) for number in range(40)]
    running: tuple[float, ...] = ()
    killed_at = 0.0
    async with asyncio.TaskGroup() as tasks:
        for sent in long:
            tasks.create_task(sent.run(through))

        async def busy_enough() -> bool:
            nonlocal running
            running = await through.of_engines(ENGINE_RUNNING)
            return max(running) > sum(sent.streamed for sent in long)

        # More requests on one engine than there are streams: some that it works on are not streamed.
        await until_async(busy_enough)
        victim = engines[running.index(max(running))]
        killing = None
        for number, sent in enumerate(steady):
            tasks.create_task(sent.run(through))
            if number == 2:
                killing = tasks.create_task(asyncio.to_thread(victim.kill))
            if killing and killing.done() and not killed_at:
                killed_at = time.monotonic()
            await asyncio.sleep(0.25)
    assert any(sent.begun > killed_at > 0 for sent in steady)
    broken = [sent for sent in long + steady if sent.error]
    print(f"{running} running at the kill; {len(broken)} broken: {[(sent.name, repr(sent.error)) for sent in broken]}")
    assert [sent.name for sent in broken if not sent.streamed or sent.begun > killed_at] == []
    assert (await through.settled())[IN_FLIGHT] == 0
