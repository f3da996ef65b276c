"""The command: exit codes, and one line that helps for everything that can be wrong."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from extproc import __version__
from extproc.cli import main
from tests.acceptance import processes
from tests.ports import free_port
from tests.unit.top.parts import document, free_sidecar, write

READERS = ["serve", "envoy", "up", "worker", "keeper"]
COMMANDS = ["serve", "check", "envoy", "up", "demo", "sim", "explain", "rollout", "replay", "bench"]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command sets its process's logging up: here that process is pytest."""
    root, ours = logging.getLogger(), logging.getLogger("extproc")
    before = [*root.handlers], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before


def run(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "extproc", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` is exit code 0 and shows what there is, without the commands that `serve` runs for itself."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"\n    {name} " in text for name in COMMANDS)
    assert "keeper" not in text.replace("workers and keeper", "")
    assert "==SUPPRESS==" not in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`warmpath COMMAND --help` works, also where the help text holds defaults."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: warmpath {name}" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` is the package's."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"warmpath {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["serv"], "invalid choice: 'serv' (choose from "),
        (["serve", "--sett", "x"], "unrecognized arguments: --sett"),
        (["up", "--sim", "many"], "invalid int value: 'many'"),
        (["check", "--config"], "expected one argument"),
    ],
)
def test_wrong_use_is_exit_code_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser says what it expected."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", READERS)
def test_a_missing_file_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads the file ends with 2 and one line."""
    path = tmp_path / "none.yaml"
    assert main([name, "--config", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        f"warmpath: {path}: cannot be read (No such file or directory): name an existing file with --config\n"
    )


@pytest.mark.parametrize("name", READERS)
def test_a_broken_file_is_told_with_its_place(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File, line, path, what was found, what is right."""
    path = write(tmp_path / "w.yaml", document(redis={"timeout_m": 5}))
    assert main([name, "--config", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"warmpath: {path}:")
    assert "did you mean `timeout_ms`" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("name", READERS)
def test_a_bad_override_is_told_without_its_value(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--set` has the same checks as the file, and keeps passwords to itself."""
    path = write(tmp_path / "w.yaml", document())
    settings = ["--set", "redis.url=redis://:hunter2@h", "--set", "redis.timeout_ms=soon"]
    assert main([name, "--config", str(path), *settings]) == 2
    told = capsys.readouterr().err
    assert told.startswith("warmpath: --set redis.timeout_ms: ")
    assert "hunter2" not in told


@pytest.mark.parametrize("name", ["serve", "worker", "keeper"])
def test_the_sidecar_needs_a_store(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without `redis.url` it does not start, and says what to do instead."""
    path = write(tmp_path / "w.yaml", document())
    assert main([name, "--config", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "warmpath: redis.url is missing: give a Redis URL, or use `warmpath up`, which brings a store along" in lines


@pytest.mark.parametrize("content", ["models: {", "", "- a\n", "models: {m: {pool: p}}\npools: {p: {endpoints: []}}\n"])
def test_check_reports_a_broken_file(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the mistake, as text and as one JSON object."""
    path = tmp_path / "w.yaml"
    path.write_text(content)
    assert main(["check", "--config", str(path)]) == 2
    text = capsys.readouterr().out
    assert text.startswith(f"{path}:")
    assert main(["check", "--config", str(path), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["error"]) == (False, text.strip())


def test_check_accepts_a_good_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 after Envoy itself took what is rendered."""
    path = write(tmp_path / "w.yaml", document())
    assert main(["check", "--config", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["models"], told["pools"], told["endpoints"]) == (True, 1, 1, 1)


def test_envoy_prints_yaml_or_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same text both ways."""
    path, written = write(tmp_path / "w.yaml", document()), tmp_path / "envoy.yaml"
    assert main(["envoy", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    assert "static_resources" in yaml.safe_load(text)
    assert main(["envoy", "--config", str(path), "--output", str(written)]) == 0
    assert capsys.readouterr().out == ""
    assert written.read_text() == text


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback for a folder that is not there."""
    path, written = write(tmp_path / "w.yaml", document()), tmp_path / "none" / "envoy.yaml"
    assert main(["envoy", "--config", str(path), "--output", str(written)]) == 2
    assert capsys.readouterr().err == f"warmpath: --output {written}: cannot be written: No such file or directory\n"


@pytest.mark.parametrize("arguments", [["envoy"], ["check"], ["check", "--json"]])
def test_a_reader_that_goes_away_is_no_drama(arguments: list[str], tmp_path: Path) -> None:
    """`warmpath envoy | head -1`: exit code 1, nothing on stderr, whether the output is long or short."""
    path = write(tmp_path / "w.yaml", document())
    command = [sys.executable, "-m", "extproc", *arguments, "--config", str(path)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        complaint = process.stderr.read()
        assert (process.wait(timeout=60), complaint) == (1, b"")


def test_without_the_demo_extra_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pip install warmpath` alone has no simulator and no tables."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "extproc.demo", raising=False)
    assert main(["demo"]) == 1
    assert "pip install 'warmpath[demo]'" in capsys.readouterr().err


def test_the_package_is_the_command() -> None:
    """`python -m extproc` does the same."""
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"warmpath {__version__}\n")


def test_up_names_an_address_that_is_taken(tmp_path: Path) -> None:
    """Envoy's port is taken: one line with setting, address and remedy."""
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        listen = f"127.0.0.1:{occupant.getsockname()[1]}"
        gateway = {**free_sidecar(), "listen": listen, "admin": f"127.0.0.1:{free_port()}"}
        path = write(tmp_path / "w.yaml", document(gateway=gateway))
        done = run("up", "--config", str(path), "--sim", "1")
    assert done.returncode in {1, 2}
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("warmpath: ")]
    assert f"gateway.listen: cannot listen on {listen}: Address already in use" in told
    assert "Traceback" not in done.stderr


def test_up_works_for_pools_named_after_versions(tmp_path: Path) -> None:
    """`up --sim` lays the engines over the first pool, whatever its name."""
    gateway = {**free_sidecar(), "listen": f"127.0.0.1:{free_port()}", "admin": f"127.0.0.1:{free_port()}"}
    content = document(
        models={"org/model-3.1": {"pool": "model-3.1"}},
        pools={"model-3.1": {"endpoints": ["127.0.0.1:1"]}},
        gateway=gateway,
    )
    path = write(tmp_path / "w.yaml", content)
    command = [sys.executable, "-m", "extproc", "up", "--config", str(path), "--sim", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = [line for line in iter(process.stdout.readline, "") if _ready_or_over(process, line)]
        assert process.wait(timeout=60) == 0
    assert any("ready: http://" in line for line in said), said


def test_up_ends_when_nobody_reads_it(tmp_path: Path) -> None:
    """`warmpath up | head -1`: everything stops; nothing runs on with a pipe that nobody empties."""
    gateway = {**free_sidecar(), "listen": f"127.0.0.1:{free_port()}", "admin": f"127.0.0.1:{free_port()}"}
    path = write(tmp_path / "w.yaml", document(gateway=gateway))
    command = [sys.executable, "-m", "extproc", "up", "--config", str(path), "--sim", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        family = processes.tree(process.pid)
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(timeout=60) == 1
    assert "Traceback" not in complaint
    assert processes.left_of(family) == []


def _ready_or_over(process: subprocess.Popen[str], line: str) -> bool:
    if "ready: http://" in line:
        process.send_signal(signal.SIGINT)
    return True
