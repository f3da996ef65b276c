"""What waits before a prompt pushes out what an exact profile still has; the estimated one has foreseen it."""

import pytest

from extproc.state.exact import Match
from extproc.state.exact_blocks import TokenPrompt, chain_of
from extproc.state.feed import Answered, Cached, Evicted, Exact, pack
from extproc.state.foreseen import Foreseen
from extproc.state.knowledge import PoolKnowledge, Priors

SIZE = 16
PROMPT = chain_of(TokenPrompt(range(640)), SIZE)
"""40 blocks of the engine; ten of the estimated profile, 64 tokens each."""
OTHER = chain_of(TokenPrompt(range(2000, 3280)), SIZE)
"""80 blocks, or 20."""
OURS, THEIRS = list(range(1, 11)), list(range(101, 121))


def knowledge(kv_tokens: int = 1600, *, known: bool = True) -> PoolKnowledge:
    """An engine `a` that told of `PROMPT`, which came through here, or past this fleet."""
    made = PoolKnowledge(Priors(kv_tokens=kv_tokens))
    for delta in (Exact("a", 0, SIZE), Cached("a", 0, 0, pack(PROMPT))):
        made.apply(delta, origin="k")
    if known:
        made.decided("first", "a", OURS)
        made.apply(Answered("first", "a", 0.1, 0.2, 2560.0, 640.0, 20.0, 0.0))
    return made


def send(known: PoolKnowledge) -> None:
    """`OTHER` is sent to the engine."""
    known.sent(known.decided("second", "a", THEIRS), {SIZE: OTHER})


def promised(known: PoolKnowledge) -> int:
    """Tokens of `PROMPT`, and one more, that the engine is expected to find cached."""
    foreseen = Foreseen(known.matched_tokens(OURS), 1.0, 64.0)
    return known.caches.exact_matches({SIZE: PROMPT}, 641, (1.0, 1.0), foreseen)["a"].blocks * SIZE


def test_what_a_waiting_prompt_will_push_out_is_not_promised() -> None:
    """A cache of 100 blocks has 40 and is sent 80: the last 20 of the 40 go, which the engine tells later."""
    known = knowledge()
    assert promised(known) == 640
    send(known)
    assert promised(known) == 320
    for delta in (Evicted("a", 0, 0, pack(PROMPT[20:])), Cached("a", 0, 0, pack(OTHER))):
        known.apply(delta, origin="k")
    assert promised(known) == 320


def test_the_engines_own_word_counts_where_nothing_waits() -> None:
    """The engine computed the beginning again, for a request that came past this fleet: the estimate knows nothing."""
    known = knowledge()
    send(known)
    assert promised(known) == 320
    known.apply(Cached("a", 0, 0, pack(OTHER)), origin="k")
    assert promised(known) == 640


def test_what_came_past_this_fleet_is_not_held_to_be_pushed_out() -> None:
    """Of 120 blocks 20 have no room; where the estimate does not know 40 or more of 100, it cannot tell which."""
    known = knowledge(known=False)
    send(known)
    assert promised(known) == 640


def test_a_cache_is_crowded_when_more_has_no_room_than_the_estimate_lacks() -> None:
    """40 blocks and 80 that are sent: in a full cache of 110 ten have no room. Nothing sent, nothing pushed out."""
    known = knowledge()
    exact = known.caches.exact
    assert not exact.crowded("a", 10.0, 10.0)
    send(known)
    assert not exact.crowded("a", 120.0, 120.0)
    assert exact.crowded("a", 119.0, 130.0)
    assert exact.crowded("a", 110.0, 101.0)
    assert not exact.crowded("a", 110.0, 100.0)


def test_the_engines_own_capacity_counts_before_the_configured_one() -> None:
    """Both fit the cache that the configuration says, and do not fit the one that the engine tells."""
    known = knowledge(1920)
    send(known)
    assert promised(known) == 640
    known.engine_seen("a", 1600, 0.0, SIZE)
    assert promised(known) == 320


@pytest.mark.parametrize("tier", [1, 2])
def test_what_leaves_the_gpu_is_not_lost_where_there_are_other_tiers(tier: int) -> None:
    """An engine that tells of blocks elsewhere keeps what its GPU has no room for; after a restart it has to tell."""
    known = knowledge()
    known.apply(Cached("a", 0, tier, pack(PROMPT[:1])), origin="k")
    send(known)
    assert promised(known) == 640
    exact = known.caches.exact
    exact.empty("a")
    for _ in range(10):
        exact.index.tidy()
    exact.empty("a")  # the number of a life that is over goes to another
    known.apply(Cached("a", 0, 0, pack(PROMPT)), origin="k")
    send(known)
    assert promised(known) == 320


def test_what_the_engine_told_stands_where_the_estimate_agrees() -> None:
    """Within a block of each and 5 %, an estimate that is made of bytes says nothing against it, nor adds to it."""
    match = Match(40, SIZE, 640.0)
    for tokens in (640.0, 600.0, 640.0 - 16.0 - 64.0 - 32.0, 5000.0):
        assert Foreseen({"a": tokens}, 1.0, 64.0).left_of("a", match) == match
    assert Foreseen({"a": 527.0}, 1.0, 64.0).left_of("a", match) == Match(32, SIZE, 512.0)
    assert Foreseen({"b": 640.0}, 1.0, 64.0).left_of("a", match) == Match(0, SIZE, 0.0)


def test_estimates_are_in_tokens_of_the_engine() -> None:
    """A prompt that has half as many tokens as its bytes suggest: so has the beginning that is left."""
    assert Foreseen({"a": 400.0}, 0.5, 32.0).left_of("a", Match(40, SIZE, 640.0)) == Match(12, SIZE, 192.0)


def test_what_is_left_is_worth_its_part() -> None:
    """Blocks that are worth less than one in the GPU keep their worth."""
    assert Foreseen({"a": 160.0}, 1.0, 64.0).left_of("a", Match(40, SIZE, 480.0)) == Match(10, SIZE, 120.0)
