"""Recorded traces become rows; a broken line is named with its place and the remedy."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import TraceError
from extproc.replay.lines import LONGEST_LINE
from extproc.replay.traces import azure, load, mooncake
from tests.unit.replay.sound import assert_sound

ROWS = [
    {"timestamp": 27000, "input_length": 1300, "output_length": 5, "hash_ids": [46, 47, 48]},
    {"timestamp": 27000, "input_length": 1024, "output_length": 0, "hash_ids": [46, 50]},
    {"timestamp": 30000, "input_length": 100, "output_length": 7, "hash_ids": [51]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,130,8
2023-11-16 18:17:04.0799600,0,0
"""


def written(folder: Path, *rows: object, name: str = "trace.jsonl") -> Path:
    """Write one row a line; a text stands as it is."""
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_mooncake_rows_keep_full_blocks_and_are_spread_inside_the_tick(tmp_path: Path) -> None:
    """Ids become 64-bit hashes, equal ids equal ones; the partial tail is dropped; the trace begins at 0."""
    trace = mooncake(written(tmp_path, *ROWS))
    assert_sound(trace)
    first, second, third = trace.rows
    assert [row.at_s for row in trace.rows] == [0.0, 1.5, 3.0]
    assert [len(row.blocks) for row in trace.rows] == [2, 2, 0]
    assert first.blocks[0] == second.blocks[0] > 2**32
    assert first.blocks[1] != second.blocks[1]
    assert [row.prompt_tokens for row in trace.rows] == [1300, 1024, 100]
    assert [row.output_tokens for row in trace.rows] == [5, 1, 7]
    assert third.max_tokens is None
    assert (trace.block_tokens, trace.name) == (512, "trace.jsonl")


def test_mooncake_arrivals_stay_on_their_tick_when_asked_to(tmp_path: Path) -> None:
    """Spreading is an option."""
    assert [row.at_s for row in mooncake(written(tmp_path, *ROWS), tick_s=0.0).rows] == [0.0, 0.0, 3.0]


def test_mooncake_rows_may_stand_in_any_order(tmp_path: Path) -> None:
    """Time decides, not the place in the file."""
    assert [row.prompt_tokens for row in mooncake(written(tmp_path, *ROWS[::-1])).rows] == [1024, 1300, 100]


@given(ids=st.lists(st.integers(0, 2**70), min_size=1, max_size=30))
def test_ids_of_any_size_are_mixed_alike(ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Equal ids give equal hashes and others differ, however large they are."""
    rows = [{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [one]} for one in ids]
    blocks = [row.blocks[0] for row in mooncake(written(tmp_path_factory.mktemp("ids"), *rows)).rows]
    assert [blocks.index(block) for block in blocks] == [ids.index(one) for one in ids]


def test_azure_rows_share_nothing(tmp_path: Path) -> None:
    """Arrivals in order from 0, lengths of at least 1, blocks that occur once."""
    trace = azure(written(tmp_path, AZURE))
    assert_sound(trace)
    assert [row.at_s for row in trace.rows] == pytest.approx([0.0, 0.1, 0.5])
    assert [row.prompt_tokens for row in trace.rows] == [4808, 1, 130]
    assert [row.output_tokens for row in trace.rows] == [10, 1, 8]
    blocks = [block for row in trace.rows for block in row.blocks]
    assert len(set(blocks)) == len(blocks) == 4808 // 64 + 130 // 64


def test_the_format_is_told_from_the_first_line(tmp_path: Path) -> None:
    """The name of a file says nothing; blank lines and a byte order mark do not matter."""
    assert load(written(tmp_path, "\ufeff", *ROWS, name="a.csv")) == mooncake(tmp_path / "a.csv")
    assert load(written(tmp_path, "", AZURE, name="b.jsonl")) == azure(tmp_path / "b.jsonl")
    assert load(written(tmp_path, {"messages": [{"role": "user", "content": "hi"}]}, name="c")).requests == 1
    assert load(written(tmp_path, {"body": {"prompt": "hi"}}, name="d")).requests == 1


def test_gzip_is_told_from_the_content(tmp_path: Path) -> None:
    """A packed trace reads as the plain one does, whatever it is called."""
    plain = written(tmp_path, *ROWS)
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load(packed).rows == load(plain).rows


def test_a_limit_takes_the_beginning(tmp_path: Path) -> None:
    """The first rows stay what they are in the whole trace."""
    path = written(tmp_path, *ROWS)
    assert load(path, limit=2).rows == load(path).rows[:2]
    assert load(path, limit=9).rows == load(path).rows
    with pytest.raises(TraceError, match="limit of 0"):
        load(path, limit=0)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"timestamp": 1, "input_le', "line 2: this is not JSON; .* cut off"),
        ({**ROWS[0], "input_length": "9"}, r"line 2: .*\$.input_length"),
        ({**ROWS[0], "input_length": 0}, r"line 2: .*\$.input_length"),
        ({**ROWS[0], "hash_ids": [1, -2, 3]}, r"line 2: .*\$.hash_ids"),
        ({"timestamp": 1, "hash_ids": []}, "line 2: .*input_length"),
        ({**ROWS[0], "hash_ids": [1]}, "line 2: 1 hash_ids do not fit 1300 tokens in blocks of 512; one id"),
        ({**ROWS[0], "hash_ids": [1, 2, 3, 4]}, "line 2: 4 hash_ids do not fit"),
        ('{"timestamp": 1, "hash_ids": ' + "[" * 5000, "line 2: this is not JSON|line 2: a field"),
        ("[1]", "line 2: a field is not what"),
    ],
)
def test_a_broken_mooncake_line_is_named(tmp_path: Path, line: object, found: str) -> None:
    """The error names file, line, what was found and what to write."""
    path = written(tmp_path, ROWS[0], line)
    with pytest.raises(TraceError, match=found) as error:
        load(path)
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert ";" in str(error.value)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("2023-11-16 18:17:03,5", "other than a time and two lengths"),
        ("yesterday,5,5", "other than a time and two lengths"),
        ("2023-11-16 18:17:03,5,x", "other than a time and two lengths"),
        ("2023-11-16 18:17:03,-5,1", "negative"),
        ("2023-11-16 18:17:03,99999999999,1", "over"),
        ("2023-11-16T18:17:03Z,5,1", "zone"),
    ],
)
def test_a_broken_azure_line_is_named(tmp_path: Path, line: str, found: str) -> None:
    """The error names file, line, what was found and what to write."""
    with pytest.raises(TraceError, match=f"line 5: .*{found}.*; .*write"):
        load(written(tmp_path, AZURE.rstrip("\n"), line))


@pytest.mark.parametrize(
    "text", ["", "\n \n", "hello\n", "[1, 2]\n", '{"a": 1}\n', "TIMESTAMP,Tokens\n", '"hash_ids"\n']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    """An empty file or an unknown format says what a trace looks like."""
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(TraceError, match=str(path)):
        load(path)


def test_a_header_without_rows_is_refused(tmp_path: Path) -> None:
    """A trace holds at least one request."""
    with pytest.raises(TraceError, match="no request"):
        load(written(tmp_path, AZURE.splitlines()[0]))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """Missing files, empty folders and damaged archives each say what to do."""
    with pytest.raises(TraceError, match="cannot be read"):
        load(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match=r"no file that ends in .jsonl"):
        load(tmp_path)
    packed = gzip.compress(json.dumps(ROWS[0]).encode() * 50)
    for damaged in (packed[:-12], packed[:20] + b"\xff" * 9 + packed[29:]):
        (tmp_path / "cut.gz").write_bytes(damaged)
        with pytest.raises(TraceError, match="damaged"):
            load(tmp_path / "cut.gz")


def event(received_ms: float) -> dict[str, object]:
    """A request as Dynamo writes it."""
    replay = {"trace_block_size": 64, "input_length": 70, "input_sequence_hashes": [1]}
    served = {"request_received_ms": received_ms, "total_time_ms": 5.0, "output_tokens": 3, "replay": replay}
    return {"event": {"event_type": "request_end", "request": served}}


@pytest.mark.parametrize(
    "rows",
    [
        (ROWS[0], {**ROWS[0], "timestamp": 4e11}, ROWS[0]),
        (ROWS[0], {**ROWS[0], "timestamp": 1e308}, ROWS[0]),
        (AZURE.splitlines()[0], "2033-11-19 00:00:00,5,5", "2023-11-16 18:17:03,5,5"),
        (event(0.0), event(1e308), event(1.0)),
        ({"at_s": 0, "prompt": "hi"}, {"at_s": 1e308, "prompt": "hi"}),
        ({"at_s": -1e308, "prompt": "hi"}, {"at_s": 1e308, "prompt": "hi"}),
    ],
)
def test_a_time_beyond_ten_years_is_named(tmp_path: Path, rows: tuple[object, ...]) -> None:
    """Times are counted from the earliest row, wherever it stands; nobody recorded for so long."""
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: .*10 years after the earliest.*; check its unit"):
        load(written(tmp_path, *rows))


def test_times_may_begin_anywhere(tmp_path: Path) -> None:
    """Only what lies between rows counts: Unix times are as good as times from 0."""
    rows = [{**ROWS[0], "timestamp": 1.7e12 + ms} for ms in (0.0, 5000.0)]
    assert [row.at_s for row in load(written(tmp_path, *rows)).rows] == pytest.approx([0.0, 5.0])


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    """A small archive may unpack to anything: no line is read further than the stated length."""
    path = tmp_path / "endless"
    path.write_bytes(pack(json.dumps(ROWS[0]).encode() + b"\n" + b" " * (LONGEST_LINE + 1)))
    with pytest.raises(TraceError, match=r"endless, line 2: .*longer than 64 MiB; .*one request a line"):
        load(path)
    path.write_bytes(pack(json.dumps(ROWS[0]).encode().ljust(LONGEST_LINE) + b"\n"))
    assert len(load(path).rows) == 1


@pytest.mark.parametrize("field", ["output_length", "input_length"])
def test_lengths_beyond_any_model_are_refused(tmp_path: Path, field: str) -> None:
    """Whole numbers have no end in JSON; lengths have."""
    with pytest.raises(TraceError, match=rf"line 2: .*{field}"):
        load(written(tmp_path, ROWS[0], {**ROWS[0], field: 10**400}))


def test_a_folder_holds_agent_sessions_only(tmp_path: Path) -> None:
    """Several traces of another kind are not silently read as one."""
    written(tmp_path, *ROWS)
    with pytest.raises(TraceError, match="agent sessions only"):
        load(tmp_path)


def test_errors_never_quote_a_prompt(tmp_path: Path) -> None:
    """Broken lines may hold what users wrote, so their text stays out of the error."""
    secret = "my-secret-question"  # noqa: S105
    good = {"messages": [{"role": "user", "content": "hi"}]}
    for line in (
        {"messages": secret},
        {"messages": [secret]},
        {"body": secret},
        {"input": secret, "headers": 1},
        secret,
    ):
        with pytest.raises(TraceError) as error:
            load(written(tmp_path, good, line))
        assert secret not in str(error.value)
