"""Results in files: the newest ones, private, whole lines only, whatever happened to who wrote them."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ConfigError, StoreError
from extproc.shadow.folder import Folder, read
from extproc.shadow.result import encode
from tests.unit.shadow.parts import result

DAY = 86_400.0


def names(path: Path, most: int = 1000, since: float = 0.0, model: str = "m") -> list[str]:
    """Ids of the results in a folder, the newest first."""
    return [one.id for one in read(path, model, since, most).results]


def test_what_is_added_is_read(tmp_path: Path) -> None:
    """Of all writers, the newest first, of one model only."""
    one, other = Folder(tmp_path, "host-0"), Folder(tmp_path, "host-1")
    one.add(result("a", at=1.0), 10, DAY)
    other.add(result("b", at=2.0), 10, DAY)
    one.add(result("c", at=3.0), 10, DAY)
    one.add(result("d", at=4.0, model="m/other"), 10, DAY)
    assert names(tmp_path) == ["c", "b", "a"]
    assert names(tmp_path, most=2) == ["c", "b"]
    assert names(tmp_path, since=2.0) == ["c", "b"]
    assert names(tmp_path, model="m/other") == ["d"]
    assert read(tmp_path, "m", 0.0, 10).results[2] == result("a", at=1.0)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """They may hold answers and prompts; the folder is made if it is not there."""
    path = tmp_path / "new" / "folder"
    Folder(path, "w").add(result("a"), 10, DAY)
    (file,) = path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_the_newest_stay(tmp_path: Path) -> None:
    """A file holds at most a quarter, or sixteen lines, more than it may, and readers go by what it may."""
    folder = Folder(tmp_path, "w")
    for at in range(500):
        folder.add(result(f"{at}", at=float(at)), 100, DAY)
        (file,) = tmp_path.iterdir()
        assert file.read_bytes().count(b"\n") <= 126
    assert names(tmp_path, most=100) == [f"{at}" for at in range(499, 399, -1)]


def test_the_old_go(tmp_path: Path) -> None:
    """A minute of results' time is the longest that an old line stays, however few there are."""
    folder = Folder(tmp_path, "w")
    folder.add(result("old", at=0.0), 100, 1000.0)
    folder.add(result("kept", at=500.0), 100, 1000.0)
    folder.add(result("new", at=1100.0), 100, 1000.0)
    (file,) = tmp_path.iterdir()
    assert b'"old"' not in file.read_bytes()
    assert names(tmp_path) == ["new", "kept"]


def test_what_nobody_writes_to_any_more_is_removed(tmp_path: Path) -> None:
    """A worker that is gone leaves files behind: another one removes them once all of it is old."""
    Folder(tmp_path, "gone").add(result("a", at=0.0), 100, 1000.0)
    (left,) = tmp_path.iterdir()
    os.utime(left, (0.0, 0.0))
    Folder(tmp_path, "here").add(result("b", at=1001.0), 100, 1000.0)
    assert names(tmp_path) == ["b"]
    assert not left.exists()


@given(cut=st.integers(0, 400), whole=st.integers(0, 3))
def test_a_torn_line_is_passed_over_and_the_next_one_is_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: int, whole: int
) -> None:
    """A crash leaves the beginning of a line: who goes on with the file begins a new one."""
    path = tmp_path_factory.mktemp("folder")
    line = encode(result("torn")) + b"\n"
    file = path / "m@w.jsonl"
    before = b"".join(encode(result(f"{n}", at=float(n))) + b"\n" for n in range(whole))
    file.write_bytes(before + line[: min(cut, len(line) - 2)])
    torn = 1 if cut else 0
    assert read(path, "m", 0.0, 100).unreadable == torn
    Folder(path, "w").add(result("next", at=50.0), 100, DAY)
    found = read(path, "m", 0.0, 100)
    assert [one.id for one in found.results] == ["next", *(f"{n}" for n in reversed(range(whole)))]
    assert found.unreadable <= torn


def test_a_writer_goes_on_with_its_file_after_a_restart(tmp_path: Path) -> None:
    """What it wrote before counts against what the file may hold."""
    for at in range(60):
        Folder(tmp_path, "w").add(result(f"{at}", at=float(at)), 10, DAY)
    (file,) = tmp_path.iterdir()
    assert file.read_bytes().count(b"\n") <= 26
    assert names(tmp_path, most=10)[0] == "59"


def test_a_long_or_odd_name_of_a_model_is_no_path(tmp_path: Path) -> None:
    """Names hold slashes and dots, and a file's name has a bound."""
    for model in ("../m", "x" * 500, "a@b", "~", "é"):
        Folder(tmp_path, "../w").add(result("a", model=model), 10, DAY)
        assert names(tmp_path, model=model) == ["a"]
    assert {file.parent for file in tmp_path.rglob("*")} == {tmp_path}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """The text names the folder; the next result tries anew."""
    (tmp_path / "file").write_bytes(b"")
    folder = Folder(tmp_path / "file", "w")
    with pytest.raises(StoreError, match="file"):
        folder.add(result("a"), 10, DAY)
    (tmp_path / "file").unlink()
    folder.add(result("b"), 10, DAY)
    assert names(tmp_path / "file") == ["b"]


def test_a_folder_that_was_taken_away_is_made_again(tmp_path: Path) -> None:
    """One result is lost, and no more."""
    path = tmp_path / "folder"
    folder = Folder(path, "w")
    folder.add(result("a"), 10, DAY)
    shutil.rmtree(path)
    with pytest.raises(StoreError):
        folder.add(result("b"), 10, DAY)
    folder.add(result("c"), 10, DAY)
    assert names(path) == ["c"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Nobody who may write to the folder leads results, or another file's end, astray."""
    (tmp_path / "m@w.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        Folder(tmp_path, "w").add(result("a"), 10, DAY)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_touched(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """A pipe would never end, nor would a device: the worker's one thread must not wait for either."""
    put(tmp_path / "m@w.jsonl")
    with pytest.raises(StoreError, match="what is there is no file: remove it"):
        Folder(tmp_path, "w").add(result("a"), 10, DAY)


def test_a_folder_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    """The remedy names the key of the configuration."""
    with pytest.raises(ConfigError, match=r"shadow\.folder"):
        read(tmp_path / "none", "m", 0.0, 10)
