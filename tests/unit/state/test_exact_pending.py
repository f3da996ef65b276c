"""Prompts that are being prefilled count as held until the engine tells of them."""

from extproc.state.deltas import Cached, Evicted, Exact, Held, pack, unpack
from extproc.state.exact_blocks import TokenPrompt, chain_of
from extproc.state.pending import _MOST, Pending
from extproc.state.precise import Precise

PROMPT = TokenPrompt(range(1, 101))
BLOCKS = chain_of(PROMPT, 10)
LIKE = chain_of(TokenPrompt([*range(1, 61), *range(500, 540)]), 10)
"""Shares six blocks with `BLOCKS`."""


def precise_of(*endpoints: str) -> Precise:
    """Empty exact profiles of these."""
    precise = Precise()
    for name in endpoints:
        precise.told(Exact(name, 0, 10), "k")
    return precise


def sent(precise: Precise, endpoint: str = "a", charge_id: str = "c", blocks: list[int] = BLOCKS) -> Held:
    """A decision for an endpoint."""
    return precise.sent(Held(endpoint, b"", charge_id), {10: blocks})


def depths(precise: Precise, blocks: list[int] = BLOCKS, tokens: int = 101) -> dict[str, int]:
    """Leading blocks by endpoint."""
    return {name: each.blocks for name, each in precise.matches({10: blocks}, tokens, (0.8, 0.5)).items()}


def test_a_prompt_that_was_sent_is_found_there() -> None:
    """By itself and by those that begin like it, at the endpoint that prefills it and no other."""
    precise = precise_of("a", "b")
    sent(precise)
    assert depths(precise) == {"a": 10, "b": 0}
    assert depths(precise, LIKE) == {"a": 6, "b": 0}
    assert depths(precise, chain_of(TokenPrompt(range(2, 99)), 10)) == {"a": 0, "b": 0}


def test_what_is_pending_is_worth_what_the_gpu_is() -> None:
    """Blocks that the endpoint has in a lower tier are worth less; those that it computes are not."""
    precise = precise_of("a")
    precise.told(Cached("a", 0, 1, pack(BLOCKS[:4])), "k")
    sent(precise)
    match = precise.matches({10: BLOCKS}, 100, (0.5, 0.5))["a"]
    assert (match.blocks, match.worth) == (9, 4 * 5.0 + 5 * 10.0)


def test_only_what_the_endpoint_lacks_is_told() -> None:
    """The others know the rest from its events; one that lost that rest finds nothing."""
    precise, other = precise_of("a"), precise_of("a")
    precise.told(Cached("a", 0, 0, pack(BLOCKS[:4])), "k")
    told = sent(precise)
    assert (list(unpack(told.exact)), told.exact_from) == (BLOCKS[4:], 4)
    other.held(told)
    assert depths(other) == {"a": 0}
    other.told(Cached("a", 0, 0, pack(BLOCKS[:4])), "k")
    assert depths(other) == depths(precise) == {"a": 10}
    other.told(Evicted("a", 0, -1, pack(BLOCKS[2:3])), "k")
    assert depths(other) == {"a": 2}


def test_nothing_is_told_of_a_prompt_that_is_held() -> None:
    """Nor of an endpoint without an exact profile, nor of one whose block size the prompt was not cut in."""
    precise = precise_of("a")
    precise.told(Cached("a", 0, 0, pack(BLOCKS)), "k")
    precise.told(Exact("c", 0, 25), "k")
    for endpoint in "abc":
        assert sent(precise, endpoint) == Held(endpoint, b"", "c")
    assert len(precise.pending) == 0


def test_the_event_ends_it() -> None:
    """Once its last block is stored, a prompt is what the profile says it is."""
    precise = precise_of("a")
    sent(precise)
    precise.told(Cached("a", 0, 0, pack(BLOCKS[:5])), "k")
    assert depths(precise) == {"a": 10}
    precise.told(Cached("a", 0, 0, pack(BLOCKS[5:])), "k")
    assert len(precise.pending) == 0
    precise.told(Evicted("a", 0, 0, pack(BLOCKS[5:])), "k")
    assert depths(precise) == {"a": 5}


def test_two_prompts_may_end_alike() -> None:
    """The same prompt twice, and one that continues it: what ends is what was stored to its end."""
    precise = precise_of("a")
    sent(precise, charge_id="one", blocks=BLOCKS[:6])
    sent(precise, charge_id="two", blocks=BLOCKS[:6])
    sent(precise, charge_id="three")
    precise.told(Cached("a", 0, 0, pack(BLOCKS[:6])), "k")
    assert len(precise.pending) == 1
    assert depths(precise) == {"a": 10}


def test_an_answer_ends_it_ten_seconds_later() -> None:
    """Its event may be on the way yet, and late; who only heard that it runs knows no more than before."""
    precise = precise_of("a")
    precise.age(1000.0)
    sent(precise)
    precise.pending.answered("c", "a", running=True)
    precise.age(1040.0)
    assert depths(precise) == {"a": 10}
    precise.pending.answered("c", "a", running=False)
    precise.age(1049.9)
    assert depths(precise) == {"a": 10}
    precise.age(1050.0)
    assert depths(precise) == {"a": 0}


def test_a_request_that_went_elsewhere_is_not_pending() -> None:
    """Another endpoint has it, or none: the pick never prefills it."""
    for endpoint, running in (("b", True), ("b", False), ("", False)):
        precise = precise_of("a")
        sent(precise)
        precise.pending.answered("c", endpoint, running=running)
        assert depths(precise) == {"a": 0}


def test_nothing_is_pending_for_more_than_a_minute() -> None:
    """An answer that nobody hears of is over, whether it was sent before the first look at the clock or after."""
    pending = Pending()
    pending.began("one", "a", 0, [1])
    pending.age(5000.0)
    pending.began("two", "a", 0, [1])
    pending.age(5059.0)
    assert len(pending) == 2
    pending.age(5060.0)
    assert len(pending) == 0


def test_a_cleared_cache_ends_what_was_answered() -> None:
    """The keeper tells what is left: blocks that were stored and cleared in between are told by nobody."""
    precise = precise_of("a")
    sent(precise, charge_id="answered")
    sent(precise, charge_id="running", blocks=LIKE)
    precise.pending.answered("answered", "a", running=False)
    precise.pending.answered("running", "a", running=True)
    precise.told(Exact("a", 0, 10), "k")
    assert depths(precise) == {"a": 6}
    assert depths(precise, LIKE) == {"a": 10}
    precise.pending.answered("running", "a", running=False)
    assert depths(precise, LIKE) == {"a": 0}


def test_blocks_that_went_before_they_were_told_end_it() -> None:
    """A prompt whose last block was stored and evicted between two batches is told to be gone, and is not held."""
    precise = precise_of("a")
    sent(precise)
    precise.told(Cached("a", 0, 0, pack(BLOCKS[:6])), "k")
    precise.told(Evicted("a", 0, 0, pack(BLOCKS[6:])), "k")
    assert depths(precise) == {"a": 6}


def test_a_restart_ends_all_that_was_sent() -> None:
    """What was sent to an engine that is gone is computed nowhere."""
    precise = precise_of("a", "b")
    sent(precise, "a", "one")
    sent(precise, "b", "two")
    precise.empty("a")
    assert depths(precise) == {"a": 0, "b": 10}


def test_blocks_that_an_endpoint_is_about_to_have_are_counted() -> None:
    """Of all prompts sent to it, what it lacked; until their ends are told, or they are forgotten."""
    pending = Pending()
    pending.began("one", "a", 0, [1, 2, 3])
    pending.began("two", "a", 2, [4, 5])
    pending.began("three", "b", 0, [1])
    assert [pending.blocks(name) for name in "abc"] == [5, 1, 0]
    pending.began("one", "a", 0, [1, 2])
    pending.told("a", [5])
    assert [pending.blocks(name) for name in "abc"] == [2, 1, 0]
    pending.forget("a")
    pending.drop("three")
    assert [pending.blocks(name) for name in "abc"] == [0, 0, 0]


def test_prompts_are_bounded() -> None:
    """The oldest go first; a charge that is told twice counts once; an empty one not at all."""
    pending = Pending()
    for number in range(_MOST + 5):
        pending.began(f"c{number}", "a", 0, [number + 1])
    pending.began(f"c{_MOST}", "a", 0, [7])
    pending.began("empty", "a", 3, [])
    assert len(pending) == _MOST
    assert pending.extended("a", 0, [5]) == 0
    assert pending.extended("a", 0, [6]) == 1
