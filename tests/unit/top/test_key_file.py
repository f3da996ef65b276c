"""The file of API keys while it is in use, and the command that writes it."""

import hashlib
import stat
from pathlib import Path

import pytest

from extproc import cli, key_command
from extproc.envoy import api_keys
from extproc.errors import ConfigError
from extproc.key_file import KeyFile


def digest(key: str) -> bytes:
    """As the file has it."""
    return hashlib.sha256(key.encode()).digest()


async def test_a_good_change_is_taken_and_told(tmp_path: Path) -> None:
    """Keys that are gone are gone; whoever counts is told each time that something changed."""
    file, told = tmp_path / "keys", list[int]()
    file.write_text(f"{api_keys.line('a', 'one')}\n")
    keys = KeyFile(file, told.append)
    assert keys.clients() == {}
    await keys.look()
    assert keys.clients() == {digest("one"): "a"}
    file.write_text(f"{api_keys.line('a', 'two')}\n{api_keys.line('b', 'three')}\n")
    await keys.look()
    await keys.look()
    assert keys.clients() == {digest("two"): "a", digest("three"): "b"}
    assert told == [1, 2]


async def test_a_bad_change_leaves_the_old_keys_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is being edited, or gone for a moment, locks nobody out."""
    file = tmp_path / "keys"
    file.write_text(f"{api_keys.line('a', 'one')}\n")
    keys = KeyFile(file)
    await keys.look()
    for broken in (lambda: file.write_text("a wp-secret"), file.unlink):
        caplog.clear()
        broken()
        await keys.look()
        await keys.look()
        assert keys.clients() == {digest("one"): "a"}
        assert len([one for one in caplog.records if one.levelname == "ERROR"]) == 1
        assert "wp-secret" not in str([vars(one) for one in caplog.records])
    file.write_text("")
    await keys.look()
    assert keys.clients() == {}


async def test_without_a_file_nobody_is_known() -> None:
    """The service denies everybody then; Envoy does not ask it."""
    keys = KeyFile(None)
    await keys.look()
    assert keys.clients() == {}


def test_the_command_shows_key_and_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file, whoever runs it puts the line where it belongs."""
    assert cli.main(["key", "acme"]) == 0
    key, line = (row.split(":", 1)[1].strip() for row in capsys.readouterr().out.splitlines())
    assert line == f"acme sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def test_the_command_adds_to_a_file(tmp_path: Path) -> None:
    """What was there stays; the file is not for everybody to read, and has no key in it."""
    file = tmp_path / "keys"
    shown = [key_command.make(name, file) for name in ("acme", "other", "acme")]
    keys = [text.splitlines()[0].removeprefix("key:").strip() for text in shown]
    assert api_keys.load(file) == dict(zip(map(digest, keys), ("acme", "other", "acme"), strict=True))
    assert stat.S_IMODE(file.stat().st_mode) & stat.S_IROTH == 0
    assert not any(key in file.read_text() for key in keys)


def test_the_command_begins_a_line_of_its_own(tmp_path: Path) -> None:
    """A file whose last line was left without an end keeps the key of that line, and gets the new one."""
    file = tmp_path / "keys"
    file.write_text(api_keys.line("acme", "one"))
    key = key_command.make("other", file).splitlines()[0].removeprefix("key:").strip()
    assert api_keys.load(file) == {digest("one"): "acme", digest(key): "other"}


def test_the_command_leaves_a_wrong_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what is wrong with it, and shows no key that would not work."""
    file = tmp_path / "notes"
    file.write_text("buy milk\n")
    with pytest.raises(ConfigError, match=r"notes:1: no name and hash"):
        key_command.make("acme", file)
    assert file.read_text() == "buy milk\n"
    assert cli.main(["key", "acme", "--file", str(tmp_path / "none" / "keys")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert cli.main(["key", "a b"]) == 2
