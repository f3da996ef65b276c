"""The table of blocks: a dictionary in flat arrays, whatever the blocks look like."""

import numpy as np
import numpy.typing as npt
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.state.blocktable import BlockTable, Words, leading

_LAST = 2**64 - 1
_ZERO = 0x9E3779B97F4A7C15
"""Under this block the table keeps block 0 too: the two are one."""


class _SmallParts(BlockTable):
    """Splits its parts early, and remembers of how many entries it was asked which to keep."""

    _most = 32
    _most_parts = 64

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def _living(self, blocks: Words, values: Words) -> npt.NDArray[np.bool_]:
        self.asked.append(len(blocks))
        return super()._living(blocks, values)


class TableMachine(RuleBasedStateMachine):
    """The table against a dictionary. Parts are small, so that they are split often; values below `least` are dead."""

    def __init__(self) -> None:
        super().__init__()
        self.table = _SmallParts()
        self.model: dict[int, int] = {}
        self.clock = 0

    # Even ones, sequences, and ones that end in the same 40 bits, as only a forger's would.
    start = st.sampled_from([0, _ZERO]) | st.integers(0, _LAST)
    step = st.sampled_from([1, 3, 64, 2**16 + 1, 2**40])

    @rule(start=start, step=step, count=st.integers(0, 90))
    def put(self, start: int, step: int, count: int) -> None:
        """Give blocks a value and get what they had, in their order."""
        self.clock += 1
        blocks = [(start + at * step) % 2**64 for at in range(count)]
        had: list[int] = []
        for block in blocks:
            had.append(self.model.get(block or _ZERO, 0))
            self.model[block or _ZERO] = self.clock
        runs = self.table.put(blocks, self.clock)
        seen = [value for value, entries in runs for _ in range(entries)]
        assert [value if value >= self.table.least else 0 for value in seen] == [
            v if v >= self.table.least else 0 for v in had
        ]

    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        """Change the value of a block that has one."""
        if self.model:
            block = data.draw(st.sampled_from(sorted(self.model)))
            self.table.change(block, 0)
            self.model[block] = 0

    @rule(block=start)
    def change_unknown(self, block: int) -> None:
        """Changing a block that has no value changes nothing."""
        if (block or _ZERO) not in self.model:
            self.table.change(block, 7)
            assert self.table.get(block) == 0

    @rule()
    def let_half_die(self) -> None:
        """Values below a limit count for nothing from here on."""
        self.table.least = max(self.table.least, self.clock // 2)

    @invariant()
    def the_living_are_found(self) -> None:
        """Every living value is there, and no other one."""
        for block, value in self.model.items():
            found = self.table.get(block)
            assert found == value if value >= self.table.least else found < self.table.least


TestTableAgainstDictionary = TableMachine.TestCase
TestTableAgainstDictionary.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@given(
    values=st.lists(st.integers(1, 9), max_size=60),
    start=st.integers(0, _LAST),
    least=st.integers(1, 10),
    guess=st.integers(0, 70),
)
def test_the_search_finds_where_values_fall_below_a_limit(
    values: list[int], start: int, least: int, guess: int
) -> None:
    """Of blocks with falling values the leading ones at a limit are counted, whatever the table before it held."""
    values.sort(reverse=True)
    blocks = [(start + 977 * at) % 2**64 for at in range(len(values) + 3)]
    tables = [BlockTable(), BlockTable(), BlockTable(least)]
    tables[0].put(blocks[:guess], 9)
    for block, value in zip(blocks, values, strict=False):
        tables[1].put([block], value)
        tables[2].put([block], value)
    held = sum(value >= least for value in values)
    assert leading(tables, blocks) == [min(guess, len(blocks)), len(values), held]
    assert leading(tables[1:], blocks, least) == [held, held]


def test_what_is_dead_makes_room() -> None:
    """Of a table that is written for ever and of which a thousand blocks live, the memory stays bounded."""
    table = BlockTable()
    sizes = []
    for turn in range(1, 200):
        table.least = max(1, turn - 9)
        table.put([turn * 1_000_003 + at * 2_654_435_761 for at in range(100)], turn)
        sizes.append(table.nbytes)
    assert max(sizes[100:]) <= 1000 * 100
    assert table.get(2 * 1_000_003) == 0


def test_an_entry_takes_at_most_fifty_bytes() -> None:
    """The slots of a table of 50,000 even blocks take between 16 and 50 bytes an entry."""
    rng = np.random.default_rng(7)
    table = BlockTable()
    for _ in range(500):
        table.put(rng.integers(0, 2**64, 100, np.uint64).tolist(), 1)
    assert 16 * 50_000 < table.nbytes < 50 * 50_000


def test_no_part_is_large() -> None:
    """A part is built again with few more than twice the entries it may have, however many the table has."""
    rng = np.random.default_rng(7)
    table = _SmallParts()
    for _ in range(20):
        table.put(rng.integers(0, 2**64, 50, np.uint64).tolist(), 1)
    assert len(table.asked) > 20
    assert max(table.asked) <= 3 * 32


def test_blocks_that_end_alike_are_held_all_the_same() -> None:
    """Blocks forged to end in the same 40 bits cost time, but neither an entry nor memory without end."""
    table = _SmallParts()
    blocks = [at << 40 | 9 for at in range(3000)]
    table.put(blocks, 3)
    assert all(table.get(block) == 3 for block in blocks)
    assert table.nbytes <= 8 * 64 + 64 * 16 * 73 + 48 * len(blocks)


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["put", "put", "cut", "age", "clear"]), st.integers(0, 7)), max_size=40
)


@settings(max_examples=300)
@example([(0, "put", 3), (1, "put", 3), (1, "cut", 1)])
@given(STEPS)
def test_what_several_tables_hold_is_searched_rightly_whatever_happened_before(
    steps: list[tuple[int, str, int]],
) -> None:
    """Whatever was remembered of earlier searches, depths are those of a look at every block."""
    prompts = [[10, 11, 12, 13, 14, 15, 16, 17], [10, 11, 12, 13, 24, 25, 26], [10, 11, 12, 13]]
    tables = [BlockTable() for _ in range(4)]
    for clock, (number, step, at) in enumerate(steps, 1):
        table, blocks = tables[number], prompts[clock % 2]
        if step == "put":
            table.put(blocks[:at], clock)
        elif step == "cut":
            for block in {*prompts[0][at:], *prompts[1][at:]}:
                table.change(block, 0)
        elif step == "age":
            table.least = max(table.least, clock - at)
        else:
            table.clear()
        for prompt in prompts:
            lengths = [sum(each.get(block) >= each.least for block in prompt) for each in tables]
            assert leading(tables, prompt) == lengths
