"""The trade-off curve: numbers by weight, and a picture whose axes say what they are."""

import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from extproc.config import Routing
from extproc.errors import ConfigError
from extproc.replay.compare import Compared, replay
from extproc.replay.curve import WEIGHTS, Point, check, curve, draw, picture
from extproc.replay.generate import generated

POINTS = [Point(0.0, 0.1, 1.01, 300.0), Point(1.0, 0.6, 1.1, 100.0), Point(20.0, 0.7, 2.5, None)]


def test_a_greater_weight_finds_more_cached() -> None:
    """Each point is a replay under `weighted` with that weight, the other weights being as given."""
    trace = generated("shared_prefixes", 1, seconds=6.0)
    wanted = Compared(policies=(), engines=3, routing=Routing(load_weight=0.5))
    points = curve(trace, wanted, (0.0, 0.5, 20.0))
    assert [point.hit_weight for point in points] == [0.0, 0.5, 20.0]
    assert points[0].cached_share < points[1].cached_share <= points[2].cached_share
    routing = Routing(hit_weight=0.5, load_weight=0.5)
    alone = replay(trace, "weighted", msgspec.structs.replace(wanted, routing=routing))
    assert points[1] == Point(0.5, alone.cached_share, alone.busy_imbalance, alone.ttft_ms.p90)


def test_the_weights_go_from_none_to_more_than_anybody_wants() -> None:
    """In ascending order, so that the line through the points is a curve."""
    assert WEIGHTS[0] == 0.0
    assert sorted(set(WEIGHTS)) == list(WEIGHTS)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    """Signature, whole chunks with right checksums, a size that can be read, and small enough for a page."""
    path = tmp_path / "curve.png"
    draw(POINTS, "a trace", path)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    kinds, at = [], 8
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        body = content[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", content[at + 8 + length : at + 12 + length])
        assert zlib.crc32(kind + body) == checksum
        if kind == b"IHDR":
            assert struct.unpack(">II", body[:8]) == (840, 720)
        kinds.append(kind)
        at += 12 + length
    assert (kinds[0], kinds[-1], b"IDAT" in kinds) == (b"IHDR", b"IEND", True)
    assert len(content) < 100_000


def test_the_picture_says_what_it_shows() -> None:
    """All axes are labelled with what they measure and its unit, the title names the trace, each point its weight."""
    figure = picture(POINTS, "a trace")
    assert figure.get_suptitle().startswith("a trace")
    assert [axes.get_ylabel().replace("\n", " ") for axes in figure.axes] == [
        "prompt tokens found cached, %",
        "busiest engine / mean",
        "TTFT p90, ms",
    ]
    below = figure.axes[-1]
    assert below.get_xlabel() == "weight on a cache hit, in seconds of load"
    assert [text.get_text() for text in below.get_xticklabels()] == ["0", "1", "20"]
    shown = [np.array(axes.lines[0].get_ydata(), dtype=float) for axes in figure.axes]
    expected: list[list[float]] = [[10, 60, 70], [1.01, 1.1, 2.5], [300, 100, np.nan]]
    assert np.allclose(shown, expected, equal_nan=True)


def test_a_picture_that_cannot_be_written_is_told_before_and_after(tmp_path: Path) -> None:
    """Before minutes of replays when the folder is missing; else when it comes to it."""
    check(tmp_path / "curve.png")
    with pytest.raises(ConfigError, match="there is no such folder"):
        check(tmp_path / "absent" / "curve.png")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(POINTS, "a trace", tmp_path)
