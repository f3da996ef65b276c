"""The virtual world: what happens when, to whom, and that nothing but the trace and the settings decides it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.replay.compare import Compared, replay
from extproc.replay.generate import generated
from extproc.replay.rows import Row, Trace
from extproc.replay.world import Ended, Picked, Result, Settings, World
from extproc.sim.sequence import Sequence as Job
from extproc.sim.settings import EngineSettings
from extproc.sim.virtual import VirtualEngine

STEP = 2.0**-7
ENGINE = EngineSettings(block_size=16, blocks=65, step_s=STEP, per_seq_s=0.0, prefill_tokens_per_s=2.0**14)
"""Every time that comes of it is a sum of powers of two, and exact; its cache holds 1,024 tokens."""
TOO_LONG = 1025


class Diary:
    """Sends row after row to the next engine, and writes down what it is told and when."""

    def __init__(self, engines: int) -> None:
        self.entries: list[tuple[float, str, float]] = []
        self.usages: list[tuple[float, list[float]]] = []
        self.ended: list[Ended] = []
        self._engines = engines
        self._rows = 0

    def choose(self, row: Row, now: float) -> Picked:
        """See `world.Chooser.choose`."""
        self.entries.append((now, "arrives", row.at_s))
        self._rows += 1
        return Picked((self._rows - 1) % self._engines, token=row.at_s)

    def settled(self, picked: Picked, now: float) -> None:
        """See `world.Chooser.settled`."""
        assert isinstance(picked.token, float)
        self.entries.append((now, "settled", picked.token))

    def learn(self, ended: Ended, now: float) -> None:
        """See `world.Chooser.learn`."""
        self.entries.append((now, "learnt", ended.row.at_s))
        self.ended.append(ended)

    def scrape(self, engines: Sequence[VirtualEngine], now: float) -> None:
        """See `world.Chooser.scrape`."""
        self.entries.append((now, "scraped", 0.0))
        self.usages.append((now, [engine.cache_usage for engine in engines]))

    def times(self, what: str) -> list[float]:
        """When something was told."""
        return [at for at, kind, _ in self.entries if kind == what]


def row(at_s: float, output: int = 1, prompt: int = 16, *, after: int = -1, n: int = 1) -> Row:
    """A row that shares nothing; with a prompt of up to 128 tokens, it ends `output` steps after it came."""
    return Row(at_s, after, prompt, output, [hash((at_s, after, block)) % 2**64 for block in range(prompt // 16)], n=n)


def run(
    rows: list[Row], *, scrape_s: float = 0.25, log_s: float = 0.125, engines: int = 4
) -> tuple[Result, Diary, list[VirtualEngine]]:
    """Replay rows and return what came of it, and what the chooser was told."""
    diary, fleet = Diary(engines), [VirtualEngine(ENGINE) for _ in range(engines)]
    settings = Settings(scrape_s=scrape_s, log_s=log_s)
    return World(Trace("hand made", 16, rows), settings, fleet, diary).run(), diary, fleet


def test_what_happens_at_one_moment_happens_in_a_fixed_order() -> None:
    """Engines first, then the access log, then the scrape, then who arrives: so each sees what was before it."""
    logged, ending, arriving = row(0.0, output=16), row(0.125 - STEP, output=17), row(0.25)
    _, diary, _ = run([logged, ending, arriving])
    told = [(what, of) for at, what, of in diary.entries if at == 0.25]
    assert told == [("settled", ending.at_s), ("learnt", logged.at_s), ("scraped", 0.0), ("arrives", arriving.at_s)]


def test_the_first_scrape_comes_before_the_first_arrival_and_the_next_ones_at_even_times() -> None:
    """Nobody decides before the engines were read once; time begins with the first arrival, wherever that is."""
    _, diary, _ = run([row(5.0, output=100)], scrape_s=0.25)
    assert diary.entries[:2] == [(5.0, "scraped", 0.0), (5.0, "arrives", 5.0)]
    assert diary.times("scraped") == [5.0, 5.25, 5.5, 5.75]


@pytest.mark.parametrize("gap_s", [1_000_000.0, 3e8])
def test_time_in_which_nothing_happens_is_passed_over(gap_s: float) -> None:
    """After ten idle minutes scrapes become rare, but for the last before an arrival, where it would have stood."""
    _, diary, _ = run([row(0.0), row(gap_s + 0.125)], scrape_s=0.25)
    assert diary.times("arrives") == [0.0, gap_s + 0.125]
    scraped = diary.times("scraped")
    assert scraped[:2400] == [0.25 * number for number in range(2400)]
    assert scraped[-1] == gap_s
    assert len(scraped) < 2450
    assert diary.times("learnt") == [STEP + 0.125]


def test_gauges_are_those_of_the_moment_at_which_they_are_read() -> None:
    """Long answers fill blocks between two events of an engine: a scrape sees as many as the engine has by then."""
    _, diary, _ = run([row(0.0, output=1000)], scrape_s=0.375, engines=1)
    alone = VirtualEngine(ENGINE)
    alone.submit([Job(16, 1000, row(0.0).blocks)], 0.0)
    for at, usages in diary.usages[1:]:
        alone.advance(at)
        assert usages == [alone.cache_usage]
    assert len({usage for _, usages in diary.usages for usage in usages}) > 10


def test_log_entries_come_so_much_later_than_the_end() -> None:
    """A chooser learns of an answer `log_s` after its last token, and of the end itself at once."""
    result, diary, _ = run([row(0.0, output=3), row(0.5, output=7)], log_s=0.0625)
    assert diary.times("settled") == [3 * STEP, 0.5 + 7 * STEP]
    # The replay is over with the last token: what would be learnt then is learnt too late.
    assert diary.times("learnt") == [3 * STEP + 0.0625]
    assert [one.finished_s for one in result.ended] == diary.times("settled")


def test_a_closed_loop_waits_for_the_answer_and_then_thinks() -> None:
    """The next turn comes its think time after the last token of the one before, however long that took."""
    rows = [row(0.25, output=40), row(1.5, output=5, after=0), row(0.5, after=1), row(0.75, after=1)]
    result, diary, _ = run(rows)
    first = 0.25 + 40 * STEP
    second = first + 1.5 + 5 * STEP
    assert diary.times("arrives") == [0.25, first + 1.5, second + 0.5, second + 0.75]
    assert result.seconds == second + 0.75 + STEP - 0.25


def test_a_row_that_no_engine_can_take_is_refused_and_frees_its_followers() -> None:
    """It is not sent, counts as refused, and who waits for its answer thinks from the moment it came."""
    rows = [row(0.5, prompt=TOO_LONG - 1), row(0.25, after=0), row(0.25, prompt=1000, output=25, after=1)]
    result, diary, _ = run(rows)
    assert (result.refused, diary.times("arrives")) == (2, [0.75])
    assert [one.row for one in result.ended] == [rows[1]]


@pytest.mark.parametrize("rows", [[], [row(1.0, prompt=TOO_LONG), row(2.0, prompt=TOO_LONG)]])
def test_a_replay_in_which_nothing_is_answered_ends(rows: list[Row]) -> None:
    """No rows, or none that fits."""
    result, _, _ = run(rows)
    assert (result.ended, result.refused, result.seconds) == ([], len(rows), 0.0)


def test_a_row_with_several_answers_ends_with_the_last_one() -> None:
    """It is settled and learnt of once; its first token is the first of any."""
    result, diary, fleet = run([row(0.0, output=4, n=3), row(1.0)])
    assert [one.row.n for one in result.ended] == [3, 1]
    assert len(diary.times("settled")) == 2
    assert len(diary.times("learnt")) == 1
    three = result.ended[0]
    assert len(three.jobs) == 3
    assert three.ttft_s == STEP
    assert three.finished_s == max(job.finished_at for job in three.jobs) == 4 * STEP
    assert sum(engine.prefilled_tokens for engine in fleet) == 16 * 4


def test_the_answers_of_a_trace_that_tells_them_are_cached_too() -> None:
    """A turn finds prompt and answer of the one before, as far as full blocks go."""
    turn = Row(0.0, -1, 32, 33, [1, 2], [3, 4])
    after = Row(0.5, 0, 96, 1, [1, 2, 3, 4, 5, 6])
    result, _, _ = run([turn, after], engines=1)
    assert [one.cached_tokens for one in result.ended] == [0, 64]


ROWS: st.SearchStrategy[list[dict[str, float]]] = st.lists(
    st.builds(
        dict,
        gap=st.sampled_from([0.0, 0.0, STEP, 0.25, 1.3]),
        back=st.integers(0, 4),
        prompt=st.integers(1, 1200),
        output=st.integers(1, 60),
        n=st.integers(1, 3),
    ),
    min_size=1,
    max_size=25,
)


@given(drawn=ROWS)
def test_every_row_comes_when_it_should_and_ends_once(drawn: list[dict[str, float]]) -> None:
    """Whatever the trace: each row is answered or refused, at its time, settled once, after its first token."""
    rows: list[Row] = []
    clock = 0.0
    for one in drawn:
        after = len(rows) - int(one["back"]) if 0 < one["back"] <= len(rows) else -1
        clock += one["gap"] if after < 0 else 0.0
        at = one["gap"] if after >= 0 else clock
        rows.append(row(at, int(one["output"]), int(one["prompt"]), after=after, n=int(one["n"])))
    result, diary, _ = run(rows, engines=2)
    assert len(result.ended) + result.refused == len(rows)
    assert result.refused == sum(asked.prompt_tokens + asked.output_tokens > 1024 for asked in rows)
    ends = {id(done.row): done.finished_s for done in result.ended}
    assert len(ends) == len(result.ended) == len(diary.times("settled"))
    assert {id(done.row) for done in diary.ended} <= set(ends)
    for done in result.ended:
        before = rows[done.row.after] if done.row.after >= 0 else None
        if before is None:
            assert done.at_s == done.row.at_s
        elif id(before) in ends:
            assert done.at_s == ends[id(before)] + done.row.at_s
        assert done.at_s < done.at_s + done.ttft_s <= done.finished_s
    times = [at for at, _, _ in diary.entries]
    assert times == sorted(times)


@pytest.mark.parametrize("policy", ["predicted_ttft", "round_robin", "oracle"])
def test_a_replay_is_a_function_of_its_trace_and_settings(policy: str) -> None:
    """Two replays of equal traces agree to the last digit."""
    first, second = (
        replay(generated("multi_turn", 3, seconds=6.0), policy, Compared(policies=(), engines=3)) for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("policy", ["predicted_ttft", "least_tokens", "oracle"])
def test_holding_decisions_against_the_truth_changes_none(policy: str) -> None:
    """With and without regret, the same rows go to the same engines: only the regret itself is known or not."""
    trace = generated("shared_prefixes", 2, seconds=4.0, rate=60.0)
    watched = replay(trace, policy, Compared(policies=(), engines=3, regret=True))
    alone = replay(trace, policy, Compared(policies=(), engines=3, regret=False))
    assert watched.regret_ms is not None
    assert alone.regret_ms is None
    for name in set(watched.__struct_fields__) - {"regret_ms"}:
        assert getattr(watched, name) == getattr(alone, name), name
