"""Decisions by what engines told of their caches: precise where it can be, estimated where not."""

import json
from collections.abc import Sequence
from typing import Literal

import msgspec
import pytest

from extproc.choose.fleet import Endpoint
from extproc.config import Pool as PoolSettings
from extproc.envoy.contract import Call, Decision
from extproc.explainer import Explainer
from extproc.request.model import Request
from extproc.state.deltas import Cached, Exact, pack
from extproc.state.exact_blocks import TokenPrompt, chain_of
from extproc.state.feed import Answered, Held
from tests.unit.router.parts import Bench, text

BLOCK = 16


class Ids:
    """Tells token ids: one for each byte of the text, or none; notes who asked."""

    def __init__(self, adapter: str = "") -> None:
        self.asked: list[tuple[str, str]] = []
        self.known = True
        self._adapter = adapter

    def prompt(self, words: str) -> TokenPrompt:
        """The prompt of a chat request."""
        return TokenPrompt(list(words.encode()), self._adapter)

    async def of(self, pool: str, path: str, body: bytes, request: Request) -> TokenPrompt | None:
        """See `router.Tokens`."""
        self.asked.append((pool, path))
        assert request.model == "m"
        return self.prompt(json.loads(body)["messages"][0]["content"]) if self.known else None


class Precise:
    """A router whose pool has precise profiles."""

    def __init__(
        self,
        *members: Endpoint,
        profiles: Literal["estimated", "precise", "auto"] = "precise",
        cpu_weight: float = 0.8,
        policy: str = "predicted_ttft",
    ) -> None:
        self.bench = Bench(*members, policy=policy)
        self.ids = Ids()
        around = self.bench.around
        pool = PoolSettings(endpoints=["x:1"], profiles=profiles, cpu_weight=cpu_weight)
        around.config = msgspec.structs.replace(around.config, pools={"main": pool})
        around.tokens = self.ids
        self.known = around.knowledge["main"]

    def holds(self, endpoint: str, words: str, tier: int = 0) -> None:
        """The endpoint's engine told that it has this text's blocks."""
        if not self.known.caches.exact.index.is_on(endpoint):
            self.known.apply(Exact(endpoint, 0, BLOCK), origin="k")
        blocks = chain_of(self.ids.prompt(words), BLOCK)
        self.known.apply(Cached(endpoint, 0, tier, pack(blocks)), origin="k")

    async def chat(self, words: str) -> Decision:
        """A decision."""
        return await self.bench.chat(words)

    @property
    def rungs(self) -> Sequence[str]:
        """How prompts were matched with their picks."""
        return [each.rung for each in self.bench.notes.outcomes]


async def test_what_the_engine_has_decides() -> None:
    """The pick is who told that it has the prompt; predicted are whole blocks, the last token apart, to the token."""
    precise = Precise()
    words = text(400)
    precise.holds("b", words)
    decision = await precise.chat(words)
    assert decision.metadata["endpoint"] == "b"
    assert decision.metadata["prompt_tokens"] == len(words)
    cached = (len(words) - 1) // BLOCK * BLOCK
    assert decision.metadata["uncached_tokens"] == len(words) - cached
    outcome = precise.bench.notes.outcomes[0]
    assert (outcome.cached_tokens, outcome.best_cached_tokens, outcome.rung) == (cached, cached, "precise")
    assert precise.ids.asked == [("main", "/v1/chat/completions")]


async def test_what_was_sent_counts_until_the_engine_should_have_told() -> None:
    """A prompt whose answer is over, and that the engine never told of, is not there after all."""
    precise = Precise(Endpoint("a", "10.0.0.0:80", 10_000.0))
    words = text(400)
    precise.holds("a", "nothing like it")
    precise.known.age(0.0)
    first = await precise.chat(words)
    await precise.chat(words)
    precise.known.apply(Answered(first.charge_id, "a", -1, -1, -1, float(len(words))))
    precise.known.apply(Answered("c1", "a", -1, -1, -1, float(len(words))))
    precise.known.age(10.0)
    await precise.chat(words)
    outcomes = precise.bench.notes.outcomes
    assert [each.cached_tokens for each in outcomes] == [0.0, (len(words) - 1) // BLOCK * BLOCK, 0.0]


async def test_endpoints_without_exact_profiles_are_matched_by_estimate() -> None:
    """Both in one pool: each by its own rung, and one falls back as soon as its exact profile ends."""
    precise = Precise()
    words = text(400)
    first = await precise.chat(words)
    pick = str(first.metadata["endpoint"])
    others = [name for name in "abc" if name != pick]
    precise.holds(others[0], "nothing like it")
    assert (await precise.chat(words)).metadata["endpoint"] == pick
    precise.holds(pick, words[:160])
    precise.holds(others[1], words)
    assert (await precise.chat(words)).metadata["endpoint"] == others[1]
    precise.known.apply(Exact(others[1], 0, 0), origin="k")
    precise.known.apply(Exact(pick, 0, 0), origin="k")
    await precise.chat(words)
    assert precise.rungs == ["estimated", "estimated", "precise", "estimated"]


async def test_nobody_waits_for_tokens_that_are_of_no_use() -> None:
    """They are asked for where an endpoint has an exact profile, the pool wants it, and its policy looks at prompts."""
    for profiles, policy, on, asks in (
        ("precise", "predicted_ttft", True, 1),
        ("auto", "predicted_ttft", True, 1),
        ("precise", "predicted_ttft", False, 0),
        ("estimated", "predicted_ttft", True, 0),
        ("precise", "round_robin", True, 0),
    ):
        precise = Precise(profiles=profiles, policy=policy)  # type: ignore[arg-type]
        if on:
            precise.holds("a", "hello")
        await precise.chat("hello")
        assert len(precise.ids.asked) == asks


async def test_nobody_waits_for_tokens_while_all_exact_profiles_are_behind() -> None:
    """What is behind is not matched with: ids are asked for while one profile counts, and again when one is kept up."""
    precise = Precise()
    for name in "ab":
        precise.holds(name, "hello")
    asked = []
    for behind in ({"a"}, {"a", "b"}, {"a", "b", "c"}, {"b"}):
        precise.known.caches.exact.kept(behind=behind)
        await precise.chat("hello")
        asked.append(len(precise.ids.asked))
    assert asked == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", "/v1/models", b""), ("POST", "/tokenize", b'{"prompt": "hello"}'), ("POST", "/v1/audio/speech", b"\0")],
)
async def test_calls_without_a_prompt_ask_for_no_tokens(method: str, path: str, body: bytes) -> None:
    """They would be counted as prompts that cannot be read."""
    precise = Precise()
    precise.holds("a", "hello")
    decision = await precise.bench.router.decide(Call(method, path, {}, body, None))
    assert decision.destinations
    assert precise.ids.asked == []


async def test_a_worker_that_stood_still_decides_by_the_estimate() -> None:
    """What engines told it may be gone: its first decisions come before it looks again."""
    precise = Precise()
    words = text(400)
    precise.holds("b", words)
    precise.bench.around.believed_until = precise.bench.clock.monotonic() + 5.0
    await precise.chat(words)
    precise.bench.clock.advance(5.1)
    await precise.chat(words)
    precise.bench.around.believed_until = precise.bench.clock.monotonic() + 5.0
    await precise.chat(words)
    assert precise.rungs == ["precise", "estimated", "precise"]
    assert len(precise.ids.asked) == 2


async def test_nobody_waits_for_tokens_for_the_sake_of_an_endpoint_that_left() -> None:
    """Its exact profile may outlive it for a moment."""
    precise = Precise(Endpoint("a", "10.0.0.0:80", 10_000.0))
    precise.holds("gone", "hello")
    await precise.chat("hello")
    assert precise.ids.asked == []


async def test_without_token_ids_the_estimate_counts() -> None:
    """Not in time, or not to be had: nothing fails, and nothing precise is claimed."""
    precise = Precise()
    words = text(400)
    precise.holds("b", words)
    precise.ids.known = False
    decision = await precise.chat(words)
    assert precise.rungs == ["estimated"]
    assert decision.metadata["uncached_tokens"] == decision.metadata["prompt_tokens"]
    assert not any(each.exact for each in precise.bench.notes.deltas if isinstance(each, Held))


async def test_an_id_that_no_engine_has_is_no_token_id() -> None:
    """A client may send any number: the request is decided by the estimate."""
    precise = Precise()
    precise.holds("b", "hello")
    for bad in (-1, 2**32):
        precise.ids.prompt = lambda _, bad=bad: TokenPrompt([bad])  # type: ignore[method-assign, misc]
        await precise.chat("hello")
    assert precise.rungs == ["load", "load"]


async def test_blocks_in_host_memory_are_worth_less_and_predicted_whole() -> None:
    """Who has all of it in host memory is chosen before one that has nothing, and after one that has it in its GPU.

    It is predicted to report all of it as cached, and to need the time of a part.
    """
    two = [Endpoint(name, f"10.0.0.{name}:80", 10_000.0) for name in "ab"]
    precise = Precise(*two, cpu_weight=0.5)
    words = text(3200)
    precise.holds("a", words, tier=1)
    precise.holds("b", "other")
    decision = await precise.chat(words)
    outcome = precise.bench.notes.outcomes[0]
    cached = (len(words) - 1) // BLOCK * BLOCK
    assert decision.metadata["endpoint"] == "a"
    assert outcome.cached_tokens == outcome.best_cached_tokens == cached
    assert decision.metadata["uncached_tokens"] == len(words) - cached
    whole = 1000 * (len(words) - cached) / 10_000
    assert outcome.predicted_ttft_ms > 1000 * 0.4 * len(words) / 10_000 > whole
    precise.holds("b", words)
    precise.bench.clock.advance(60.0)
    assert (await precise.chat(words)).metadata["endpoint"] == "b"


async def test_a_burst_of_one_prefix_stays_together() -> None:
    """Before the engine's first event: what one request is about to put there counts for the next ones, everywhere."""
    precise, other = Precise(), Precise()
    for each in (precise, other):
        for name in "abc":
            each.holds(name, "nothing like it")
    shared = text(4000)
    first = await precise.chat(shared + "one")
    told = [each for each in precise.bench.notes.deltas if isinstance(each, Held)]
    assert len(told) == 1
    assert len(told[0].exact) == (len(shared) + 3) // BLOCK * 8
    other.known.apply(told[0], 0.0, origin="r1")
    for each in (precise, other):
        await each.chat(shared + "two" * 20)
        # The endpoint holds as many blocks as the two share.
        assert each.bench.notes.outcomes[-1].best_cached_tokens == len(shared) // BLOCK * BLOCK
    second = [each for each in precise.bench.notes.deltas if isinstance(each, Held)][1]
    assert second.endpoint == told[0].endpoint
    # What the first one brings there is told once.
    assert (second.exact_from, len(second.exact)) == (len(shared) // BLOCK, 8 * (60 // BLOCK))
    assert first.metadata["endpoint"] == precise.bench.around.recent.find("c1").reservation.endpoint  # type: ignore[union-attr]


async def test_an_answer_is_not_counted_twice() -> None:
    """The estimate adds the tokens of the answer that a prompt continues; an engine that tells blocks told those."""
    precise = Precise()
    words = text(400)
    for name in "abc":
        precise.holds(name, words[: 20 * BLOCK])
    estimated = Precise(profiles="estimated")
    for each in (precise, estimated):
        decision = await each.chat(words)
        pick = str(decision.metadata["endpoint"])
        each.known.apply(
            Answered(decision.charge_id, pick, -1, -1, len(words), len(words), 0.0, 0.0, 64.0), origin="r2"
        )
        for now in (100.0, 110.0):
            each.known.age(now)
        body = {
            "model": "m",
            "messages": [
                {"role": "user", "content": words},
                {"role": "assistant", "content": "x" * 64},
                {"role": "user", "content": "go on"},
            ],
        }
        await each.bench.router.decide(Call("POST", "/v1/chat/completions", {}, json.dumps(body).encode(), None))
    assert precise.bench.notes.outcomes[1].best_cached_tokens == 20 * BLOCK
    assert estimated.bench.notes.outcomes[1].best_cached_tokens > len(words)


async def test_reports_do_not_touch_the_exact_profile_nor_mislead_the_estimate() -> None:
    """The engine reports what its own word predicted; an estimate that claimed more is corrected all the same."""
    precise = Precise(Endpoint("a", "10.0.0.0:80", 10_000.0))
    words = text(4000)
    for number in range(3):
        decision = await precise.chat(words)
        precise.holds("a", words[: 10 * BLOCK])
        size = float(len(words))
        precise.known.apply(Answered(decision.charge_id, "a", -1, -1, size, size, 0.0, 160.0 if number else 0.0))
        await precise.chat(text(4000, seed=f"{number}"))
        precise.bench.clock.advance(10.0)
        precise.known.age(precise.bench.clock.monotonic())
    assert [each.cached_tokens for each in precise.bench.notes.outcomes[::2]] == [0.0, 160.0, 160.0]
    assert precise.known.caches.exact.index.held("a") == 10
    assert precise.known.caches.of("a").share.share < 1.0


async def test_explain_tells_how_each_endpoint_was_matched() -> None:
    """One that tells its blocks, one that does not; a request without a readable prompt goes by load alone."""
    precise = Precise()
    words = text(400)
    precise.holds("b", words)
    explainer = Explainer(precise.bench.around, precise.bench.router, precise.bench.clock)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": words}]}).encode()
    told = await explainer.explain(Call("POST", "/v1/chat/completions", {}, body, None))
    assert {each.endpoint: each.matched_by for each in told.candidates} == {
        "a": "estimated",
        "b": "precise",
        "c": "estimated",
    }
    assert told.pick == "b"
    assert next(each for each in told.candidates if each.endpoint == "b").matched_tokens == (len(words) - 1) // 16 * 16
    unread = await explainer.explain(Call("POST", "/v1/chat/completions", {}, b'{"model": "m", "messages": 5}', None))
    assert {each.endpoint: each.matched_by for each in unread.candidates} == dict.fromkeys("abc", "load")
    await precise.chat(words)
    past = explainer.recall(precise.bench.around.recent.find("c0").charge_id)  # type: ignore[union-attr]
    assert {each.endpoint: each.matched_by for each in past.candidates}["b"] == "precise"
