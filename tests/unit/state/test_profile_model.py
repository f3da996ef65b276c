"""The prefix index against a model that keeps every entry in the order of its last use."""

from array import array
from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.request.blocks import chain
from extproc.state.profile import PrefixIndex


def _blocks(prompt: str) -> list[int]:
    """One block for each letter: equal up to the letter where two prompts part."""
    return chain([prompt.encode()], b"", 1)


class IndexMachine(RuleBasedStateMachine):
    """The index against a plain model: of each endpoint the held prefixes, in the order of their last use, with stamps.

    A prefix stands for the block at its end. Capacities are below 32, where eviction leaves no slack.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[str, dict[str, int]] = {}
        self.clocks: dict[str, int] = {}
        self.latest = 0

    names = st.sampled_from(["a", "b", "c", "d"])
    prompts = st.text("xyz", max_size=9)

    def _depth(self, name: str, prompt: str) -> int:
        held = self.model.get(name, {})
        return sum(1 for _ in takewhile(held.__contains__, _prefixes(prompt)))

    @rule(name=names, prompt=prompts, capacity=st.integers(1, 31), packed=st.booleans())
    def add(self, name: str, prompt: str, capacity: int, packed: bool) -> None:
        """Hold a prompt."""
        blocks: Sequence[int] = array("Q", _blocks(prompt)) if packed else _blocks(prompt)
        evicted = self.index.add(name, blocks, capacity)
        held = self.model.setdefault(name, {})
        self.clocks[name] = self.clocks.get(name, self.latest) + 1
        for prefix in reversed(_prefixes(prompt)[:capacity]):
            held.pop(prefix, None)
            held[prefix] = self.clocks[name]
        surplus = list(held)[: max(0, len(held) - capacity)]
        for prefix in surplus:
            del held[prefix]
        assert evicted == len(surplus)

    @rule(name=names, prompt=prompts)
    def remove(self, name: str, prompt: str) -> None:
        """Drop a block and all that follow it, in any prompt."""
        held = self.model.get(name, {})
        tails = [prefix for prefix in held if prompt and prefix.startswith(prompt)]
        self.index.remove(name, [_blocks(prefix)[-1] for prefix in tails])
        for prefix in tails:
            del held[prefix]

    @rule(name=names, back=st.integers(-1, 6))
    def drop_older(self, name: str, back: int) -> None:
        """Drop what was not used lately."""
        stamp = self.index.clock(name) - back
        held = self.model.get(name, {})
        old = [prefix for prefix, used in held.items() if used < stamp]
        assert self.index.drop_older(name, stamp) == len(old)
        for prefix in old:
            del held[prefix]

    @rule(name=names)
    def forget(self, name: str) -> None:
        """Empty one profile."""
        self.index.forget(name)
        self.model.pop(name, None)
        self.latest = max(self.latest, self.clocks.pop(name, 0))

    @rule(kept=st.sets(names, min_size=2))
    def retain(self, kept: set[str]) -> None:
        """Empty the profiles of all others."""
        self.index.retain(kept)
        for name in set(self.model) - kept:
            del self.model[name]
            self.latest = max(self.latest, self.clocks.pop(name))

    @rule(prompt=prompts)
    def match(self, prompt: str) -> None:
        """Depths and stamps equal those of the model."""
        blocks = _blocks(prompt)
        depths = {name: self._depth(name, prompt) for name in self.model}
        assert self.index.match(blocks) == {name: depth for name, depth in depths.items() if depth}
        for name, depth in depths.items():
            assert self.index.depth(name, blocks) == depth
            stamps = [self.model[name][prefix] for prefix in _prefixes(prompt)[:depth]]
            assert list(self.index.stamps(name, blocks)) == stamps

    @rule(name=names, back=st.integers(-1, 6))
    def newer(self, name: str, back: int) -> None:
        """As many entries are newer than a stamp as in the model."""
        stamp = self.index.clock(name) - back
        assert self.index.newer(name, stamp) == sum(used >= stamp for used in self.model.get(name, {}).values())

    @invariant()
    def sizes_and_clocks_agree(self) -> None:
        """Both count the same entries and the same uses."""
        assert len(self.index) == sum(map(len, self.model.values()))
        for name, held in self.model.items():
            assert self.index.held(name) == len(held)
            assert self.index.clock(name) == self.clocks[name]


def _prefixes(prompt: str) -> list[str]:
    return [prompt[:end] for end in range(1, len(prompt) + 1)]


TestIndexAgainstModel = IndexMachine.TestCase
TestIndexAgainstModel.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 150)), min_size=5, max_size=60),
    st.integers(32, 300),
)
def test_with_slack_the_held_are_the_newest_and_closed_towards_the_head(
    prompts: list[tuple[int, int, int]], capacity: int
) -> None:
    """Never above capacity; no evicted block was used after one that is held; who holds a block holds all before it."""
    index = PrefixIndex()
    last: dict[int, int] = {}
    chains = []
    for turn, (group, branch, length) in enumerate(prompts, 1):
        blocks = _blocks(f"{group}" * 20 + f"{branch}" * length)
        chains.append(blocks)
        index.add("a", blocks, capacity)
        last |= dict.fromkeys(blocks[:capacity], turn)
        assert index.held("a") <= capacity
        held = {block for block in last if index.depth("a", [block])}
        assert index.held("a") == len(held)
        oldest = min(last[block] for block in held)
        assert all(last[block] <= oldest for block in last.keys() - held)
    for blocks in chains:
        alone = [index.depth("a", [block]) for block in blocks]
        assert alone == sorted(alone, reverse=True)
        assert index.depth("a", blocks) == sum(alone)
        assert index.match(blocks).get("a", 0) == sum(alone)
