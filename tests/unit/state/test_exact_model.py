"""The exact index against a model of dictionaries and sets."""

from collections import deque
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.state import holder_sets
from extproc.state.blocktable import BlockTable
from extproc.state.exact import ALL_TIERS, ExactIndex
from extproc.state.exact_blocks import chain, root
from extproc.state.exact_table import HolderTable
from tests.unit.state.exact_parts import contents, image_of, taken_over

SIZES = (2, 3)
FAR = (0.75, 0.5)

names = st.sampled_from(["a", "b", "c"])
ranks = st.sampled_from([0, 1])
tiers = st.sampled_from([0, 1, 2])
prompts = st.lists(st.sampled_from([1, 2]), max_size=9)
"""Few tokens, so that prompts share beginnings."""


def blocks_of(prompt: Sequence[int], size: int) -> list[int]:
    """Token blocks of a prompt."""
    return chain(prompt, size, root(""))


class ExactMachine(RuleBasedStateMachine):
    """Of each rank the tiers of every block, as plain sets; None for a rank whose profile ended."""

    def __init__(self) -> None:
        super().__init__()
        # What is gone is cleaned up one set at a time, so that much happens between two steps.
        self._step, holder_sets._STEP = holder_sets._STEP, 1
        self.index = ExactIndex()
        self.model: dict[str, dict[int, dict[int, set[int]] | None]] = {}
        self.sizes: dict[tuple[str, int], int] = {}
        self.owners: dict[str, str] = {}
        self.blocks: set[int] = set()

    def teardown(self) -> None:
        """Clean up as fast as ever."""
        holder_sets._STEP = self._step

    def _suspended(self, name: str) -> None:
        self.model[name] = dict.fromkeys(self.model.get(name, {}))

    def _told(self, name: str, rank: int, owner: str) -> dict[int, set[int]] | None:
        if self.owners.get(name, owner) != owner:
            self._suspended(name)
        return self.model.get(name, {}).get(rank)

    def _on(self, name: str) -> bool:
        held = self.model.get(name, {})
        return bool(held) and None not in held.values()

    @rule(name=names, rank=ranks, size=st.sampled_from(SIZES), owner=st.sampled_from("kkkl"))
    def begin(self, name: str, rank: int, size: int, owner: str) -> None:
        """A rank's profile begins anew."""
        self.index.begin(name, rank, size, owner)
        if self.owners.get(name, owner) != owner:
            self._suspended(name)
        self.owners[name] = owner
        self.model.setdefault(name, {})[rank] = {}
        self.sizes[name, rank] = size

    @rule(name=names, rank=ranks)
    def end(self, name: str, rank: int) -> None:
        """A rank's profile ends."""
        self.index.end(name, rank)
        self.model.setdefault(name, {})[rank] = None

    @rule(name=names, rank=ranks, tier=tiers, prompt=prompts, first=st.integers(0, 4), owner=st.sampled_from("kkkkkl"))
    def stored(self, name: str, rank: int, tier: int, prompt: list[int], first: int, owner: str) -> None:
        """A rank stores the end of a prompt, some blocks perhaps twice."""
        blocks = blocks_of(prompt, self.sizes.get((name, rank), 2))[first:]
        self.index.stored(name, rank, tier, [*blocks, *blocks[:1]], owner)
        held = self._told(name, rank, owner)
        for block in blocks if held is not None else ():
            assert held is not None
            held.setdefault(block, set()).add(tier)

    @rule(name=names, rank=ranks, tier=tiers | st.just(ALL_TIERS), prompt=prompts, first=st.integers(0, 4))
    def evicted(self, name: str, rank: int, tier: int, prompt: list[int], first: int) -> None:
        """A rank loses blocks, its own and others'."""
        owner = self.owners.get(name, "k")
        for size in SIZES:
            blocks = blocks_of(prompt, size)[first:]
            self.index.evicted(name, rank, tier, [*blocks, *blocks[:1]], owner)
            held = self._told(name, rank, owner)
            for block in blocks if held is not None else ():
                assert held is not None
                left = held.get(block, set()) - ({0, 1, 2} if tier == ALL_TIERS else {tier})
                held[block] = left
                if not left:
                    del held[block]

    @rule(name=names)
    def clear(self, name: str) -> None:
        """It restarted."""
        self.index.clear(name)
        held = self.model.get(name, {})
        self.model[name] = {rank: {} for rank, each in held.items() if each is not None}

    @rule(name=names)
    def drop(self, name: str) -> None:
        """It left."""
        self.index.drop(name)
        self.model.pop(name, None)
        self.owners.pop(name, None)

    @rule(owner=st.sampled_from("kl"))
    def missed(self, owner: str) -> None:
        """Something was missed."""
        self.index.missed(owner)
        for name in [name for name, each in self.owners.items() if each == owner]:
            self._suspended(name)

    @rule(times=st.integers(1, 3))
    def tidy(self, times: int) -> None:
        """Clean up."""
        for _ in range(times):
            self.index.tidy()

    @rule(name=names)
    def copied(self, name: str) -> None:
        """Another index takes the profile over, in place of what it had: it holds the same, and so does this one."""
        image = image_of(self.index, name)
        if image is not None:
            other = ExactIndex()
            other.begin(name, 5, 7, "other")
            other.stored(name, 5, 0, [1, 2, 3], "other")
            taken_over(other, name, image)
            assert contents(other, name) == contents(self.index, name)
            assert (other.owner(name), len(other)) == (self.owners.get(name, ""), self.index.held(name))
            taken_over(self.index, name, image)

    @rule(prompt=prompts, more=st.integers(0, 3))
    def match(self, prompt: list[int], more: int) -> None:
        """Depth and worth of each endpoint that is on, by its best rank."""
        chains = {size: blocks_of(prompt, size) for size in SIZES}
        found = self.index.match(chains, len(prompt) + more, FAR)
        expected = {}
        for name in self.model:
            if self._on(name):
                per_rank = (self._of_rank(name, rank, chains, len(prompt) + more) for rank in self.model[name])
                expected[name] = max(per_rank, key=lambda each: (each[2], each[0]))
        assert {name: (each.blocks, each.block_tokens, each.worth) for name, each in found.items()} == expected

    def _of_rank(
        self, name: str, rank: int, chains: Mapping[int, Sequence[int]], tokens: int
    ) -> tuple[int, int, float]:
        held, size = self.model[name][rank], self.sizes[name, rank]
        assert held is not None
        depth, worth = 0, 0.0
        for block in chains[size][: max(0, tokens - 1) // size]:
            if block not in held:
                break
            depth += 1
            worth += (1.0, *FAR)[min(held[block])] * size
        return depth, size, worth

    @invariant()
    def as_the_model(self) -> None:
        """Every block of every rank, in its tiers; their number; and who is on."""
        for name in ("a", "b", "c"):
            expected = self.model.get(name, {}) if self._on(name) else None
            assert self.index.is_on(name) == self._on(name)
            assert contents(self.index, name) == expected
        held = [each for ranks in self.model.values() for each in ranks.values() if each is not None]
        assert len(self.index) == sum(map(len, held))


TestExact = ExactMachine.TestCase
TestExact.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_growing_and_shrinking_tables_lose_nothing(data: st.DataObject) -> None:
    """Parts that are built again and split keep what is held, leave out what is not, and count it right."""
    index, model = ExactIndex(), dict[str, dict[int, set[int]]]()
    for name in ("a", "b"):
        index.begin(name, 0, 16)
        model[name] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        name, low = data.draw(st.sampled_from(["a", "b"])), data.draw(st.integers(1, 40)) * 100
        # Odd multipliers spread the blocks as hashes are.
        blocks = [(low + at) * 0x9E3779B97F4A7C15 % 2**64 for at in range(data.draw(st.integers(1, 3000)))]
        match data.draw(st.sampled_from(["stored", "stored", "evicted", "clear"])):
            case "stored":
                tier = data.draw(tiers)
                index.stored(name, 0, tier, blocks)
                for block in blocks:
                    model[name].setdefault(block, set()).add(tier)
            case "evicted":
                index.evicted(name, 0, ALL_TIERS, blocks)
                for block in blocks:
                    model[name].pop(block, None)
            case "clear":
                index.clear(name)
                model[name] = {}
        index.tidy()
    for name, held in model.items():
        assert contents(index, name) == {0: held}
        assert index.held(name) == len(held)


def test_what_nobody_holds_takes_no_room() -> None:
    """Endpoints that restart again and again, and blocks that come and go, fill neither table nor sets nor numbers."""
    index = ExactIndex()
    most = 0
    for life in range(300):
        for name in ("a", "b"):
            index.begin(name, 0, 16)
            blocks = [(life * 1000 + at) * 0x9E3779B97F4A7C15 % 2**64 for at in range(1000)]
            index.stored(name, 0, life % 3, blocks)
            index.evicted(name, 0, ALL_TIERS, blocks[:500])
        index.tidy()
        most = max(most, *(each.holder for name in ("a", "b") for each in index.lives(name)))
    assert len(index) == 1000
    assert most < 10
    assert index.table.sets < 20
    assert index.table.nbytes < 100 * 4000


def test_a_copy_is_right_whatever_happens_meanwhile() -> None:
    """Blocks that others took and lost, in parts that were built again, are in the copy as the endpoint had them."""
    index = ExactIndex()
    for name in "abcd":
        index.begin(name, 0, 16)
    blocks = [at * 0x9E3779B97F4A7C15 % 2**64 for at in range(1, 3 * BlockTable._most)]
    index.stored("a", 0, 1, blocks)
    copying = index.copy(index.lives("a"))
    steps = [next(copying)]
    for number, name in enumerate("bcdbcdbcd"):
        index.stored(name, 0, number % 3, blocks[number::3])
        index.stored(name, 0, 0, [(number * 10_000 + at) * 0x9E3779B97F4A7C15 % 2**64 for at in range(5000)])
        index.evicted(name, 0, ALL_TIERS, blocks[::2])
        index.clear(name)
        index.tidy()
    steps += list(copying)
    found = {block: code for each, codes in steps for block, code in zip(each.tolist(), codes[0].tolist(), strict=True)}
    assert found == dict.fromkeys(blocks, 0b010)
    assert sum(len(each) for each, _ in steps) == len(blocks)


def test_a_profile_that_is_taken_over_counts_from_its_last_step_on() -> None:
    """Until then the endpoint holds what it held; given up half-way, it does for good, and nothing is left behind."""
    source, index = ExactIndex(), ExactIndex()
    source.begin("a", 0, 16, "k")
    source.stored("a", 0, 0, list(range(1, 2001)), "k")
    image = image_of(source, "a")
    assert image is not None
    index.begin("a", 0, 16, "k")
    index.stored("a", 0, 0, [7], "k")
    steps = index.replace("a", image)
    for _ in range(3):
        next(steps)
        assert contents(index, "a") == {0: {7: {0}}}
    steps.close()  # type: ignore[attr-defined]
    assert contents(index, "a") == {0: {7: {0}}}
    assert len(index) == 1
    deque(index.replace("a", image), 0)
    assert contents(index, "a") == contents(source, "a")


def test_a_number_that_is_given_again_brings_nothing_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of a holder that is gone gets another one while sets are cleaned, and a set that was cleaned already."""
    monkeypatch.setattr(holder_sets, "_STEP", 1)
    table = HolderTable()
    gone, *others = (table.enter() for _ in range(3))
    for holder in (gone, others[0]):
        table.add(holder, 0, [5])
    table.leave(gone)
    for _ in range(2):  # past the two sets that no block has any more; the third is that of the block
        table.tidy()
    table.add(others[1], 0, [5])
    while (new := table.enter()) != gone:
        table.tidy()
        table.leave(new)
    assert table.held(new) == 0
    assert list(table.walk([5], 1 << new, (1.0, 1.0))) == [(new, 0, 0.0)]
    assert [depth for _, depth, _ in table.walk([5], sum(1 << each for each in others), (1.0, 1.0))] == [1, 1]
