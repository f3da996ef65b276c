"""The log of a cache: what is told of stores, evictions and resets, and in which order."""

from extproc.sim.block_keys import keys_of
from extproc.sim.block_log import BlockLog, Cleared, Event, Removed, Stored
from extproc.sim.engine import Engine
from extproc.sim.profiles import DEFAULT, PROFILES
from extproc.sim.sequence import Content, Sequence
from extproc.sim.settings import EngineSettings
from extproc.sim.tokens import block_hashes, from_ids

SIZE = 4


def make(profile: str = DEFAULT, blocks: int = 17) -> tuple[Engine, list[list[Event]]]:
    """An engine with blocks of 4 tokens, and the list that its steps' events come to."""
    engine = Engine(EngineSettings(blocks=blocks, block_size=SIZE))
    told: list[list[Event]] = []
    about = PROFILES[profile]
    engine.watch_blocks(BlockLog(about.engine, keys_of(about, b"r" * 32), SIZE, told.append))
    return engine, told


def sequence(prompt: range, answer: range = range(0), salt: str = "") -> Sequence:
    """A sequence of these token ids."""
    data = from_ids([*prompt, *answer])
    one = Sequence(len(prompt), len(answer), block_hashes(data, SIZE, salt=salt))
    one.content = Content(data, salt=salt)
    return one


def run(engine: Engine, *sequences: Sequence) -> None:
    """Serve sequences that arrive together, to their end."""
    now = engine.next_event or engine.stats.busy_s
    engine.advance(now)
    engine.submit(sequences, now)
    while engine.next_event is not None:
        engine.advance(engine.next_event)


def kinds(told: list[list[Event]]) -> list[list[str]]:
    """The names of the events of each step."""
    return [[type(event).__name__ for event in batch] for batch in told]


def test_a_prompt_is_told_of_at_once_and_an_answer_as_it_fills_blocks() -> None:
    """One event for the full blocks of the prompt, then one for each block that generated tokens fill."""
    engine, told = make()
    run(engine, sequence(range(1, 11), range(11, 20)))
    assert kinds(told) == [["Stored"], ["Stored"], ["Stored"]]
    prompt, first, second = (batch[0] for batch in told)
    assert isinstance(prompt, Stored)
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (prompt.data, prompt.parent) == (from_ids(range(1, 9)), None)
    assert (first.data, first.parent) == (from_ids(range(9, 13)), prompt.hashes[-1])
    # The last token of an answer is never computed, so the block it would fill is not stored.
    assert (second.data, second.parent) == (from_ids(range(13, 17)), first.hashes[-1])


def test_reused_blocks_are_not_told_of() -> None:
    """A second sequence that begins alike is told of from where it differs."""
    engine, told = make()
    run(engine, sequence(range(1, 9)))
    run(engine, sequence(range(1, 14)))
    assert kinds(told) == [["Stored"], ["Stored"]]
    first, second = told[0][0], told[1][0]
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (second.parent, second.data) == (first.hashes[-1], from_ids(range(9, 13)))
    run(engine, sequence(range(1, 10)))
    assert len(told) == 2


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Of a prompt of whole blocks the last is computed again, into another block: vLLM tells of that copy too."""
    for profile, told_again in ((DEFAULT, True), ("sglang", False), ("trtllm", False)):
        engine, told = make(profile)
        run(engine, sequence(range(1, 9)))
        run(engine, sequence(range(1, 9)))
        assert (len(told) == 2) == told_again
        if told_again:
            first, second = told[0][0], told[1][0]
            assert isinstance(first, Stored)
            assert isinstance(second, Stored)
            assert (second.hashes, second.parent) == (first.hashes[1:], first.hashes[0])


def test_evictions_are_told_of_before_what_takes_their_place() -> None:
    """Block by block, the end of a prompt first, under the names they were stored with."""
    engine, told = make(blocks=5)
    run(engine, sequence(range(1, 13)))
    run(engine, sequence(range(101, 113)))
    stored = told[0][0]
    assert isinstance(stored, Stored)
    assert kinds(told)[1] == ["Removed", "Removed", "Stored"]
    assert [event.hash for event in told[1] if isinstance(event, Removed)] == stored.hashes[:0:-1]


def test_a_cleared_cache_is_told_of_with_the_next_step() -> None:
    """An idle engine publishes nothing."""
    engine, told = make()
    run(engine, sequence(range(1, 9)))
    assert engine.reset_prefix_cache()
    assert len(told) == 1
    run(engine, sequence(range(1, 9)))
    assert kinds(told)[1] == ["Cleared", "Stored"]
    assert told[0][0] == told[1][1]


def test_tensorrt_llm_tells_of_a_cleared_cache_block_by_block() -> None:
    """It has no event of its own for that."""
    engine, told = make("trtllm")
    run(engine, sequence(range(1, 9)))
    engine.reset_prefix_cache()
    run(engine, sequence(range(101, 109)))
    assert kinds(told)[1] == ["Removed", "Removed", "Stored"]
    assert not any(isinstance(event, Cleared) for batch in told for event in batch)


def test_vllm_tells_of_each_copy_and_the_others_of_the_tokens() -> None:
    """Two sequences end in the same block, computed at once: vLLM's pool holds it twice, a tree of prefixes once."""
    for profile, stores, removals in ((DEFAULT, 2, 3), ("sglang", 1, 2), ("trtllm", 1, 2)):
        engine, told = make(profile, blocks=5)
        run(engine, sequence(range(1, 9)), sequence(range(1, 9)))
        assert len(told[0]) == stores
        run(engine, sequence(range(101, 117)))
        assert sum(isinstance(event, Removed) for event in told[1]) == removals


def test_a_block_held_twice_is_gone_when_the_last_copy_is() -> None:
    """A tree of prefixes keeps its block while one copy is left."""
    engine, told = make("sglang", blocks=6)
    run(engine, sequence(range(1, 5)), sequence(range(1, 5)))
    run(engine, sequence(range(101, 117)))
    assert kinds(told)[1] == ["Stored"]
    run(engine, sequence(range(201, 221)))
    assert sum(isinstance(event, Removed) for event in told[2]) == 5


def test_without_prefix_caching_nothing_is_told() -> None:
    """Nothing is cached, so there is nothing to tell of."""
    engine = Engine(EngineSettings(blocks=9, block_size=SIZE, prefix_caching=False))
    told: list[list[Event]] = []
    engine.watch_blocks(BlockLog("vllm", keys_of(PROFILES[DEFAULT], b""), SIZE, told.append))
    run(engine, sequence(range(1, 9)))
    assert not told
