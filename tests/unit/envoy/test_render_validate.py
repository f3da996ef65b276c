"""`check`: the file, what is rendered from it, and the real Envoy's opinion."""

from pathlib import Path

import msgspec
import pytest

from extproc.config_file import loads
from extproc.envoy.render import render, to_yaml
from extproc.envoy.validate import check, envoy_binary, validate, version
from extproc.errors import ConfigError

ROOT = Path(__file__).parents[3]
BROKEN = ROOT / "tests" / "unit" / "config" / "broken"


@pytest.mark.parametrize(
    "path", [ROOT / "warmpath.yaml", ROOT / "docker" / "warmpath.yaml"], ids=lambda p: str(p.parent.name)
)
def test_shipped_files_pass_to_the_end(path: Path) -> None:
    """What is handed out is accepted by the Envoy it is for."""
    report = check(path)
    assert report.ok, report.error
    assert report.envoy_version.startswith("1.")
    assert "accepts" in report.to_text()


@pytest.mark.parametrize(
    "more",
    [
        "gateway: {fail_open: false}",
        "gateway: {body_mode: duplex, fail_open: false}",
        "gateway: {sidecar: {socket_dir: /run/wp, workers: 8}}",
        "gateway: {listen: '[::]:8080', sidecar: {hosts: ['[::1]', sidecar.local]}}",
        "gateway: {max_body_bytes: 1073741824}",
        "retries: {max: 0}",
        "timeouts: {request_s: 0, stream_idle_s: 0}",
        "telemetry: {access_log_flush_ms: 10}",
    ],
)
def test_envoy_accepts_every_kind_of_setting(more: str) -> None:
    """Each branch of the renderer gives a configuration that Envoy takes."""
    config = loads(f'models: {{m: {{pool: p}}}}\npools: {{p: {{endpoints: ["10.0.0.1:8000"]}}}}\n{more}\n')
    validate(to_yaml(render(config)), envoy_binary())


def test_a_mistake_in_the_file_ends_in_the_report() -> None:
    """The report says the same as the loader, as text and as JSON."""
    report = check(BROKEN / "unknown_key.yaml")
    assert not report.ok
    assert "did you mean `max_body_bytes`?" in report.to_text()
    assert msgspec.json.decode(report.to_json())["error"] == report.error


def test_command_line_settings_are_checked_too() -> None:
    """An override is laid over the file before anything is rendered."""
    assert not check(ROOT / "warmpath.yaml", ["gateway.max_body_bytes=1"]).ok


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nodes: {}", "no such field: 'nodes'"),
        ("static_resources: {listeners: [{name: a}]}", "error adding listener named 'a': address is necessary"),
        ("a: [", "Envoy refuses the rendered configuration: "),
    ],
)
def test_envoys_complaint_becomes_one_line(text: str, part: str) -> None:
    """Time, thread and source file of Envoy's log are dropped; the reason is kept."""
    with pytest.raises(ConfigError) as caught:
        validate(text, envoy_binary())
    told = str(caught.value)
    assert part in told
    assert "[critical]" not in told
    assert "\n" not in told


def test_a_binary_that_is_not_envoy_is_told() -> None:
    """A wrong path fails with what to do, not with a traceback."""
    with pytest.raises(ConfigError, match="give the path of an Envoy"):
        envoy_binary("/nowhere/envoy")
    with pytest.raises(ConfigError, match="is it Envoy"):
        version(Path("/bin/true"))


def test_warnings_have_the_line_of_what_they_are_about(tmp_path: Path) -> None:
    """As refusals do: the file, its line, the place and the text; the nearest line where the place is not written."""
    file = tmp_path / "warmpath.yaml"
    text = 'models: {m: {pool: p}}\npools: {p: {endpoints: ["10.0.0.1:8000"]}}\ntimeouts:\n  stall_s: 1\n'
    file.write_text(text)
    told = check(file, advise=lambda _: ["timeouts.stall_s: hasty: raise it", "timeouts.request_s: short"])
    assert told.warnings == (f"{file}:4: timeouts.stall_s: hasty: raise it", f"{file}:3: timeouts.request_s: short")
    assert f"\nwarning: {file}:4: timeouts.stall_s: hasty: raise it\n" in told.to_text()
