"""The tables of a report, in all their forms."""

import html.parser
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from extproc.shadow import plots
from extproc.shadow.compare import compared
from extproc.shadow.figures import figures
from extproc.shadow.report import NO_PLOTS, Table, page, tables, title, to_html, to_markdown, to_text
from extproc.shadow.result import Result
from tests.unit.shadow.parts import SETTINGS, result, text


def results() -> list[Result]:
    """Twelve comparisons: half exactly the same, one refused by the shadow, one that failed."""
    found = [result(f"r{n}", similarity=1.0 if n % 2 else 0.25, at=1000.0 + n) for n in range(10)]
    refused = compared(text("kitten"), text("I must decline."), SETTINGS)
    failed = compared(text("a"), text("", flaw="cut"), SETTINGS)
    return [*found, result("refused", at=1010.0, compared=refused), result("failed", at=1011.0, compared=failed)]


def test_a_report_as_text() -> None:
    """Every number that was found stands in its row."""
    (found,) = figures(results())
    shown = to_text(title(found), tables(found), ["a note"])
    lines = [re.split(r"  +", line.strip()) for line in shown.splitlines()]
    assert shown.startswith(
        "m: version v2 against v1, 12 results from 1970-01-01 00:16:40 UTC to 1970-01-01 00:16:51 UTC\n"
    )
    assert ["compared", "11", "91.7%"] in lines
    assert ["exactly the same", "5 of 11", "45.5% (21.3% to 72.0%)"] in lines
    assert ["only the shadow's", "1", "9.1%"] in lines
    assert ["TTFT, ms", "10", "100.0", "100.0", "100.0", "100.0", "1.000 (1.000 to 1.000)"] in lines
    assert ["flaw: cut", "0", "1"] in lines
    assert ["r0", "0.250", "3", "40", "40", "stop", "stop"] in lines
    assert shown.endswith("a note\n")


def test_a_report_of_failures_only_has_no_tables_of_likeness() -> None:
    """A table without rows is left out."""
    (found,) = figures(results()[-1:])
    assert [table.title for table in tables(found)] == ["Comparisons", "Flaws, and reasons of ends"]


HOSTILE = '<script>x</script> ![a](http://b) |`_*\x1b[31m\n"'


def hostile() -> Result:
    """A result whose id and answers try to be something else."""
    one = result(HOSTILE, similarity=0.0)
    return msgspec.structs.replace(one, answers=(HOSTILE, HOSTILE))


def test_what_answers_say_stays_text() -> None:
    """Neither page nor terminal takes an answer, or an id that a client chose, for anything but text."""
    (found,) = figures([hostile()])
    shown = to_text(title(found), tables(found))
    assert "\x1b" not in shown
    assert "client text" not in shown
    marked = to_markdown(title(found), tables(found), ["a.png"])
    assert "<script>" not in marked
    assert "![a]" not in marked
    assert "![a.png](a.png)" in marked
    row = next(line for line in marked.splitlines() if "&lt;script" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 10
    written = to_html(title(found), tables(found), ["a.png"])
    assert "<script>" not in written
    assert '<img src="a.png"' in written


class Tags(html.parser.HTMLParser):
    """The tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 -- the parser's own signature
        """Open one."""
        self.seen.add(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close one."""
        assert self.open.pop() == tag


def test_a_page_is_whole() -> None:
    """Every tag is closed, and nothing is loaded but the plots."""
    found = figures([hostile(), *results()])
    tags = Tags()
    written = page([to_html(title(one), tables(one), ["a.png"]) for one in found])
    tags.feed(written)
    assert tags.open == []
    assert tags.seen <= {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h2",
        "h3",
        "table",
        "tr",
        "td",
        "th",
        "p",
        "img",
    }
    assert set(re.findall(r'(?:src|href)="([^"]*)"', written)) == {"a.png"}


def test_cells_have_a_bound() -> None:
    """A long id does not make a table unreadable."""
    shown = to_text("h", [Table("t", ("a",), [("x" * 1000,)])])
    assert max(map(len, shown.splitlines())) <= 161


def test_plots_of_the_same_results_are_the_same(tmp_path: Path) -> None:
    """Three pictures, byte by byte; of nothing that was compared there are none."""
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    names = plots.draw(results(), tmp_path, "p")
    assert names == ["p-similarity.png", "p-length.png", "p-latency.png"]
    first = [(tmp_path / name).read_bytes() for name in names]
    assert all(picture.startswith(b"\x89PNG") for picture in first)
    assert len(set(first)) == 3
    plots.draw(results(), tmp_path, "p")
    assert [(tmp_path / name).read_bytes() for name in names] == first
    assert plots.draw(results()[-1:], tmp_path, "q") == []


def test_answers_in_one_piece_are_drawn_too(tmp_path: Path) -> None:
    """They have no time to a first token: that half of the picture stays empty."""
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    one = result("a", compared=compared(text("a"), text("b"), SETTINGS))
    assert len(plots.draw([one], tmp_path, "p")) == 3


def test_nothing_loads_matplotlib_unasked() -> None:
    """Workers import this room: pictures cost them nothing, and are not needed."""
    code = "import sys, extproc.shadow.plots, extproc.rollout_report; print('matplotlib' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
    assert "warmpath[report]" in NO_PLOTS
