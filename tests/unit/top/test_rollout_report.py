"""`warmpath rollout report`: what it reads, from where, and what it prints and writes."""

import argparse
import asyncio
import json
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from extproc import rollout_report
from extproc.config import Config
from extproc.config_rollouts import Gates
from extproc.errors import ConfigError, StoreError
from extproc.rollout.state import GROUP, Event, Plan, Rollout, encode, encode_event
from extproc.shadow.folder import Folder
from extproc.shadow.result import Result
from extproc.shadow.result import encode as line_of
from extproc.shadow.results import GROUP as SHADOW
from extproc.state.document_store import Document
from extproc.state.redis import RedisStore
from tests.ports import free_port
from tests.unit.shadow.parts import result
from tests.valkey import Valkey

NOW = time.time()
VERSIONS = {"v1": {"pool": "old", "weight": 1}, "v2": {"pool": "new"}}


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    """A store of its own."""
    with Valkey() as server:
        yield server


def config(url: str | None = None, prefix: str = "warmpath", **shadow: Any) -> Config:
    """A configuration with model `m`, alias `alias`, whose version `v2` is its shadow."""
    settings = {"version": "v2", "mode": "compare", **shadow}
    return msgspec.convert(
        {
            "models": {"m": {"versions": VERSIONS, "aliases": ["alias"], "shadow": settings}},
            "pools": {name: {"endpoints": ["10.0.0.1:8000"]} for name in ("old", "new")},
            "redis": {"url": url, "key_prefix": prefix},
        },
        Config,
    )


def arguments(*given: str) -> argparse.Namespace:
    """Arguments of the command as they are parsed."""
    parser = argparse.ArgumentParser()
    rollout_report.add_arguments(parser)
    return parser.parse_args([*given])


def filled(folder: Path, number: int = 8) -> None:
    """Fill a folder with comparisons of one minute ago, and an old one."""
    written = Folder(folder, "w")
    written.add(result("old", at=NOW - 7200.0), 1000, 1e6)
    for n in range(number):
        written.add(result(f"r{n}", similarity=n / number, at=NOW - 60.0), 1000, 1e6)


def test_a_report_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An alias names the model; the old ones are left out; there is no store to ask about rollouts."""
    filled(tmp_path)
    assert rollout_report.run(config(folder=str(tmp_path)), arguments("alias", "--since", "1h")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("m: version v2 against v1, 8 results from ")
    assert "exactly the same" in shown
    assert "\nr0 " in shown
    assert "no redis.url: what rollouts did is not known here\n" in shown


def test_a_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object in one line; torn lines are counted."""
    filled(tmp_path)
    (tmp_path / "m@other.jsonl").write_bytes(b'{"id": "to')
    rollout_report.run(config(folder=str(tmp_path)), arguments("m", "--since", "1d", "--json"))
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["model"], told["unreadable"], told["rollout"], told["events"]) == ("m", 1, None, [])
    (found,) = told["shadows"]
    assert (found["number"], found["exact"], found["worst"][0]["id"]) == (
        9,
        {"number": 0, "of": 9, "low": 0.0, "high": pytest.approx(0.2991, abs=1e-4)},
        "r0",
    )


def test_a_report_that_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three forms and three pictures, for their owner alone, since excerpts of answers may stand in them."""
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    filled(tmp_path / "in")
    out = tmp_path / "out" / "here"
    rollout_report.run(config(folder=str(tmp_path / "in")), arguments("m", "--output", str(out)))
    assert sorted(file.name for file in out.iterdir()) == [
        "plot-1-latency.png",
        "plot-1-length.png",
        "plot-1-similarity.png",
        "report.html",
        "report.json",
        "report.md",
    ]
    assert stat.S_IMODE((out / "report.html").stat().st_mode) == 0o600
    assert "plot-1-length.png" in (out / "report.md").read_text()
    assert json.loads((out / "report.json").read_text())["model"] == "m"
    assert "results from" in capsys.readouterr().out


def test_without_matplotlib_there_are_tables_and_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is optional: a report is never refused for want of pictures."""
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    filled(tmp_path / "in")
    rollout_report.run(config(folder=str(tmp_path / "in")), arguments("m", "--output", str(tmp_path / "out")))
    assert "pip install 'warmpath[report]'" in capsys.readouterr().out
    assert "warmpath\\[report\\]" in (tmp_path / "out" / "report.md").read_text()
    assert sorted(file.suffix for file in (tmp_path / "out").iterdir()) == [".html", ".json", ".md"]


def test_without_results_it_says_how_to_get_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report of nothing is no failure."""
    assert rollout_report.run(config(folder=str(tmp_path)), arguments("m")) == 0
    assert "models.m.shadow with mode: compare makes them" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("model",), "no model `model`"),
        (("m", "--output", "/dev/null/x"), "--output /dev/null/x: cannot be written"),
    ],
)
def test_wrong_use_is_told(tmp_path: Path, given: tuple[str, ...], text: str) -> None:
    """The place and the remedy."""
    with pytest.raises(ConfigError, match=text):
        rollout_report.run(config(folder=str(tmp_path)), arguments(*given))


@pytest.mark.parametrize("since", ["", "h", "0h", "-1h", "1w", "1h30m", "1e9", "nan"])
def test_a_length_of_time_is_a_number_and_a_unit(since: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Others are refused before anything is read."""
    with pytest.raises(SystemExit):
        arguments("m", f"--since={since}")
    assert "no length of time" in capsys.readouterr().err


def test_lengths_of_time() -> None:
    """Seconds without a unit; a day by default."""
    assert [arguments("m", f"--since={text}").since for text in ("90", "1.5m", "2h", "1d")] == [
        90.0,
        90.0,
        7200.0,
        86400.0,
    ]
    assert arguments("m").since == 86_400.0


def test_without_a_store_and_a_folder_there_is_nothing_to_read() -> None:
    """The remedy names the key."""
    with pytest.raises(ConfigError, match=r"redis\.url is missing"):
        rollout_report.run(config(), arguments("m"))


def plan() -> Plan:
    """How the rollout goes."""
    return Plan(
        steps=(0.05, 1.0),
        hold_s=1.0,
        settle_s=0.0,
        min_samples=1,
        on_failure="rollback",
        false_alarms=0.01,
        require_verdict=False,
        retire_after_s=0.0,
        gates=Gates(),
    )


async def _fill(url: str, prefix: str, results: list[Result]) -> None:
    store = RedisStore(url, 10_000.0, prefix)
    rollout = Rollout(
        id="x",
        model="m",
        canary="v2",
        base={"v1": 1.0},
        plan=plan(),
        phase="rolled_back",
        gate="ttft_p90",
        reason="slower",
        started=NOW,
    )
    await store.put_document(GROUP, "m", Document(1, encode(rollout)))
    for at, what in ((NOW - 90_000.0, "aborted"), (NOW - 100.0, "started"), (NOW - 50.0, "rolled_back")):
        event = Event(at=at, model="m", rollout="x", what=what, by="controller", gate="ttft_p90", told={"excess": 0.31})
        await store.record(GROUP, "m", encode_event(event), 1000, 10_000_000)
    await store.record(GROUP, "m", b"oops", 1000, 10_000_000)
    for one in results:
        await store.record(SHADOW, "m", line_of(one), 1000, 10_000_000)
    await store.close()


def test_a_report_of_the_store(valkey: Valkey, capsys: pytest.CaptureFixture[str]) -> None:
    """Comparisons, and the history of the model's rollout with the numbers that it was decided by."""
    asyncio.run(_fill(valkey.url, "stored", [result(f"r{n}", at=NOW - 60.0) for n in range(30)]))
    rollout_report.run(config(valkey.url, "stored"), arguments("m"))
    shown = capsys.readouterr().out
    assert "m: version v2 against v1, 30 results" in shown
    assert "m: rollout of v2 is rolled back at 0.0%, step 1 of 2, gate ttft_p90, slower" in shown
    assert "aborted" not in shown
    assert shown.index("started") < shown.index("excess=0.31")
    assert "1 records could not be read" in shown


def test_results_in_a_folder_and_rollouts_in_the_store(
    valkey: Valkey, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are read."""
    asyncio.run(_fill(valkey.url, "both", []))
    filled(tmp_path)
    rollout_report.run(config(valkey.url, "both", folder=str(tmp_path)), arguments("m", "--json"))
    told = json.loads(capsys.readouterr().out)
    assert (told["shadows"][0]["number"], told["rollout"]["gate"], len(told["events"])) == (9, "ttft_p90", 2)


def test_a_store_that_is_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its results cannot be had; those of a folder can."""
    url = f"redis://127.0.0.1:{free_port()}"
    with pytest.raises(StoreError):
        rollout_report.run(config(url), arguments("m"))
    filled(tmp_path)
    rollout_report.run(config(url, folder=str(tmp_path)), arguments("m"))
    shown = capsys.readouterr().out
    assert "9 results" in shown
    assert "what rollouts did cannot be read" in shown
