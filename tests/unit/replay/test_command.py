"""`warmpath replay`: what it prints and writes, and one line with the remedy for everything that can be wrong."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from extproc.cli import main
from extproc.replay.arguments import POLICIES
from extproc.replay.generate import WORKLOADS
from extproc.replay.summary import Replayed
from extproc.sim.report import Summary
from tests.unit.top.parts import document, write

SMALL = ("shared_prefixes", "--limit", "40", "--engines", "2")
DEMO = set(Summary.__struct_fields__)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command writes to its standard output."""
    assert main(["replay", *arguments]) == 0
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON object that the command prints, which is all it prints."""
    assert main(["replay", *arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    value: dict[str, Any] = json.loads(out)
    return value


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command writes when it refuses its arguments."""
    try:
        code: Any = main(["replay", *arguments])
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert code != 0
    assert out == ""
    return err.splitlines()[-1]


def test_the_json_has_the_keys_of_the_demo_and_what_only_a_replay_knows(capsys: pytest.CaptureFixture[str]) -> None:
    """One object: the trace's facts, and under each policy all figures, rounded to four decimals."""
    value = told(capsys, *SMALL)
    assert list(value["policies"]) == list(POLICIES)
    for figures in value["policies"].values():
        assert DEMO | {"regret_ms", "moved_sessions"} <= set(figures)
        assert (figures["requests"], figures["errors"], figures["failures"]) == (40, 0, {})
        assert figures["ttft_ms"]["p90"] == round(figures["ttft_ms"]["p90"], 4)
    trace = value["trace"]
    assert (trace["name"], trace["requests"], trace["speed"]) == ("shared_prefixes", 40, 1.0)
    assert 0.0 < trace["ideal_cached_share"] < 1.0


def test_equal_commands_print_equal_objects(capsys: pytest.CaptureFixture[str]) -> None:
    """The object is a function of the arguments: no wall time is in it. Another seed is another workload."""
    once, again = (told(capsys, *SMALL, "--seed", "4") for _ in range(2))
    assert json.dumps(once) == json.dumps(again)
    assert told(capsys, *SMALL, "--seed", "5") != once


def test_the_table_shows_the_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """A heading, a rule, and a line for each policy, in columns; what a policy has not is a dash."""
    heading, rule, *lines = printed(capsys, *SMALL, "--policies", "oracle,weighted").splitlines()
    for word in ("policy", "cached", "TTFT mean", "p90", "busiest/mean", "moved", "regret ms", "errors"):
        assert word in heading
    assert set(rule) == {"-", " "}
    assert [line.split()[0] for line in lines] == ["oracle", "weighted"]
    assert {len(line) for line in lines} == {len(heading)} == {len(rule)}
    assert " - " in lines[0]
    assert " - " not in lines[1]


def test_people_are_told_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the table, on standard error: the trace, what could be reached, and each policy as it starts."""
    assert main(["replay", *SMALL, "--policies", "weighted,round_robin,weighted"]) == 0
    introduction, *running = capsys.readouterr().err.splitlines()
    assert introduction.startswith("shared_prefixes: 40 requests, ")
    assert running == ["replaying weighted ...", "replaying round_robin ..."]


def test_the_object_goes_to_a_file_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`--output` writes what `--json` prints, whether or not it is printed."""
    path = tmp_path / "out.json"
    value = told(capsys, *SMALL, "--policies", "weighted", "--output", str(path))
    assert json.loads(path.read_text("utf-8")) == value
    printed(capsys, *SMALL, "--policies", "round_robin", "--output", str(path))
    assert list(json.loads(path.read_text("utf-8"))["policies"]) == ["round_robin"]


def test_a_trace_file_is_replayed_at_the_pace_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Mooncake rows, a tenth of the time between them; `--limit` takes the first ones."""
    path = tmp_path / "trace.jsonl"
    rows = ({"timestamp": 1000 * n, "input_length": 600, "output_length": 5, "hash_ids": [n, n]} for n in range(20))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    value = told(capsys, str(path), "--policies", "round_robin", "--speed", "10", "--limit", "11", "--engines", "2")
    assert (value["trace"]["name"], value["trace"]["requests"]) == ("trace.jsonl", 11)
    assert value["policies"]["round_robin"]["seconds"] == pytest.approx(1.0, abs=0.1)


def test_busy_finds_the_pace_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Round robin's engines are busy for the share that was asked for."""
    value = told(capsys, "mixed_lengths", "--limit", "300", "--policies", "round_robin", "--busy", "0.5")
    assert value["policies"]["round_robin"]["busy_share"] == pytest.approx(0.5, abs=0.011)
    assert value["trace"]["speed"] != 1.0


def test_the_section_routing_of_a_configuration_is_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Weights come from the file and what is laid over it; the policies from `--policies` all the same."""
    path = write(tmp_path / "warmpath.yaml", document(routing={"policy": "round_robin", "hit_weight": 0.0}))
    arguments = ("shared_prefixes", "--limit", "300", "--engines", "3", "--policies", "weighted", "--config", str(path))
    blind = told(capsys, *arguments)["policies"]["weighted"]["cached_share"]
    led = told(capsys, *arguments, "--set", "routing.hit_weight=5")["policies"]["weighted"]["cached_share"]
    assert led > 1.5 * blind


def test_profiles_are_compared_at_the_delay_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each kind, named by it; how late events are matters to precise profiles alone."""
    arguments = ("agents", "--limit", "400", "--engines", "2", "--kv-tokens", "6400", "--policies", "predicted_ttft")
    at_once = told(capsys, *arguments, "--profiles", "precise,estimated")["policies"]
    late = told(capsys, *arguments, "--profiles", "estimated,precise", "--event-delay-ms", "2000")["policies"]
    assert list(at_once) == list(late) == ["predicted_ttft estimated", "predicted_ttft precise"]
    assert at_once["predicted_ttft estimated"] == late["predicted_ttft estimated"]
    assert at_once["predicted_ttft precise"] != late["predicted_ttft precise"]
    shares = {name: one["precise_share"] for name, one in late.items()}
    assert shares == {"predicted_ttft estimated": 0.0, "predicted_ttft precise": 1.0}
    alone = told(capsys, *arguments, "--profiles", "precise")["policies"]
    assert alone == {"predicted_ttft": at_once["predicted_ttft precise"]}


@pytest.mark.parametrize("profiles", ["estimated", "precise", "estimated,precise"])
def test_the_table_tells_how_much_was_matched_precisely(capsys: pytest.CaptureFixture[str], profiles: str) -> None:
    """A column of its own, unless all profiles are estimated: figures that agree are no sign that none was used."""
    arguments = ("agents", "--limit", "60", "--engines", "2", "--policies", "predicted_ttft,round_robin")
    assert main(["replay", *arguments, "--profiles", profiles]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert ("precise" in head) == (profiles != "estimated")
    if "precise" in head:
        cells = [row.split()[-2] for row in rows]
        assert cells == ["0.0%"] * (len(cells) - 2) + ["100.0%", "0.0%"]


def test_the_trade_off_is_drawn_and_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`--curve` writes a PNG, and its points stand in the object."""
    path = tmp_path / "curve.png"
    value = told(capsys, *SMALL, "--policies", "weighted", "--curve", str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert value["curve"][0]["hit_weight"] == 0.0
    assert set(value["curve"][0]) == {"hit_weight", "cached_share", "busy_imbalance", "ttft_p90_ms"}
    assert "curve" not in told(capsys, *SMALL, "--policies", "weighted")


@pytest.mark.parametrize("name", ["hot_prefx", "nothing/there.jsonl"])
def test_an_unknown_trace_names_the_workloads(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Neither file nor workload: the line says so, lists the workloads, and names the nearest one if one is near."""
    line = refused(capsys, name)
    assert line.startswith(f"warmpath: {name}: there is no such file or folder, and no such workload; ")
    assert line.endswith(f"name a trace file, or one of {', '.join(WORKLOADS)}")
    assert ("did you mean `hot_prefix`?" in line) == (name == "hot_prefx")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--policies", "weigted"],
            "there is no `weigted`; did you mean `weighted`? Else write some of predicted_ttft, ",
        ),
        (["--policies", "zzz"], "there is no `zzz`; write some of predicted_ttft, "),
        (["--policies", " , "], "--policies is empty; write some of predicted_ttft, "),
        (["--busy", "80"], "argument --busy: 80: write a share between 0 and 1, as 0.8"),
        (["--busy", "nan"], "argument --busy: nan: write a share between 0 and 1, as 0.8"),
        (["--busy", "much"], "argument --busy: much: write a share between 0 and 1, as 0.8"),
        (["--speed", "0"], "argument --speed: 0: write a number above 0"),
        (["--speed", "inf"], "argument --speed: inf: write a number above 0"),
        (["--speed", "2", "--busy", "0.5"], "argument --busy: not allowed with argument --speed"),
        (["--profiles", "exact"], "argument --profiles: exact: write one or both of estimated, precise"),
        (["--profiles", ""], "argument --profiles: : write one or both of estimated, precise"),
        (["--event-delay-ms", "-1"], "argument --event-delay-ms: -1: write milliseconds from 0 to 600,000"),
        (["--event-delay-ms", "nan"], "argument --event-delay-ms: nan: write milliseconds from 0 to 600,000"),
        (["--limit", "0"], "argument --limit: 0: write a whole number, 1 or more"),
        (["--limit", "ten"], "argument --limit: ten: write a whole number, 1 or more"),
        (["--engines", "-3"], "argument --engines: -3: write a whole number from 1 to 1,024"),
        (["--kv-tokens", "10", "--limit", "9"], "--kv-tokens 10: such a cache holds no block of shared_prefixes"),
        (["--set", "routing.tie_ms=1"], "--set lays a setting over a file: name it with --config"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["--output", "absent/out.json"], "--output absent/out.json: cannot be written: there is no such folder"),
        (["--curve", "absent/c.png"], "--curve absent/c.png: cannot be written: there is no such folder"),
    ],
)
def test_a_bad_argument_is_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """In one line that names the argument, before anything is replayed."""
    assert said in refused(capsys, "shared_prefixes", *arguments)


def test_a_broken_trace_names_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The error is the reader's own."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": []}\n{"timestamp": -1}\n')
    assert f"{path}, line 2: " in refused(capsys, str(path))


def test_figures_are_not_lost_between_object_and_struct(capsys: pytest.CaptureFixture[str]) -> None:
    """Every attribute of the summary is in the object, and nothing else."""
    figures = told(capsys, *SMALL, "--policies", "weighted")["policies"]["weighted"]
    assert set(figures) == set(Replayed.__struct_fields__)
    assert msgspec.convert(figures, Replayed).requests == 40


@pytest.mark.parametrize(
    ("option", "value", "most"), [("--engines", "1025", "1,024"), ("--kv-tokens", "1000000001", "1,000,000,000")]
)
def test_fleets_beyond_any_machine_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str, most: str
) -> None:
    """The option, what was written and the most there may be; memory is not tried."""
    message = refused(capsys, "shared_prefixes", option, value)
    assert f"{option}: {value}: write a whole number from 1 to {most}" in message


def test_a_cache_of_more_blocks_than_memory_holds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Engines times blocks count: each may be in bounds and all together not."""
    message = refused(capsys, "shared_prefixes", "--engines", "1024", "--kv-tokens", "1000000000")
    assert "--kv-tokens 1000000000" in message
    assert "--engines" in message
    assert "write" in message


@pytest.mark.parametrize("speed", ["1e-12", "1e-308"])
def test_a_speed_at_which_arrivals_never_come_is_refused(capsys: pytest.CaptureFixture[str], speed: str) -> None:
    """Slowed down to more than ten years, or past all numbers: the error says how slow it may be."""
    message = refused(capsys, *SMALL, "--speed", speed)
    assert message.startswith(f"warmpath: --speed {speed}: ")
    assert "more than 10 years" in message
    assert "or more" in message
