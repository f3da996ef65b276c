"""The report of a shadow, from its figures: tables as text, Markdown or HTML. Pure."""

import datetime
import html
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from extproc.shadow.figures import Figures, Pairs, Share, Spread

NO_PLOTS: Final = "no plots: they need Matplotlib: pip install 'warmpath[report]'"
_MOST_CELL: Final = 160
_MS: Final = 1000.0


class Table(msgspec.Struct, frozen=True):
    """A table: its title, the heads of its columns, and its rows; of each the first cell is its name."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(found: Figures) -> list[Table]:
    """What is told of one pair of versions; tables without rows are left out."""
    every = [_counted(found), _likeness(found), _refusals(found), _measures(found), _ends(found), _worst(found)]
    return [table for table in every if table.rows]


def title(found: Figures) -> str:
    """One line that says what was compared."""
    return (
        f"{found.model}: version {found.shadow} against {found.primary}, {found.number:,} results from "
        f"{moment(found.first)} to {moment(found.last)}"
    )


def moment(at: float) -> str:
    """A time as people read it, UTC."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def to_text(heading: str, found: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """A heading and tables for a terminal."""
    parts = [heading, *(f"{table.title}\n{_lined(table)}" for table in found), *notes]
    return "\n\n".join(parts) + "\n"


def to_markdown(heading: str, found: Sequence[Table], plots: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """The same as Markdown; `plots` are files beside it."""
    parts = [f"## {_flat(heading)}"]
    for table in found:
        lines = [table.head, ["---", *("---:" for _ in table.head[1:])], *table.rows]
        rows = ["| " + " | ".join(map(_flat, line)) + " |" for line in lines]
        parts.append(f"### {_flat(table.title)}\n\n" + "\n".join(rows))
    parts += [f"![{name}]({name})" for name in plots]
    return "\n\n".join([*parts, *map(_flat, notes)]) + "\n"


def to_html(heading: str, found: Sequence[Table], plots: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """The same as a part of a page of HTML; see `page`."""
    parts = [f"<h2>{html.escape(heading)}</h2>"]
    for table in found:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.head)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.rows)
        body = "".join(f"<tr>{row}</tr>\n" for row in rows)
        parts.append(f"<h3>{html.escape(table.title)}</h3>\n<table>\n<tr>{head}</tr>\n{body}</table>")
    parts += [f'<p><img src="{html.escape(name)}" alt="{html.escape(name)}"></p>' for name in plots]
    return "\n".join([*parts, *(f"<p>{html.escape(note)}</p>" for note in notes)]) + "\n"


def page(parts: Sequence[str]) -> str:
    """A whole page of HTML, which loads nothing but the plots beside it."""
    style = (
        "body{font-family:sans-serif;max-width:70em;margin:2em auto}table{border-collapse:collapse}"
        "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:right}td:first-child,th:first-child{text-align:left}"
        "img{max-width:100%}"
    )
    head = f'<meta charset="utf-8"><title>Shadow report</title><style>{style}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{"".join(parts)}</body></html>\n'


def _counted(found: Figures) -> Table:
    of = found.number
    rows = [[name.replace("_", " "), f"{number:,}", f"{number / of:.1%}"] for name, number in found.outcomes.items()]
    return Table("Comparisons", ("outcome", "number", "share"), rows)


def _likeness(found: Figures) -> Table:
    rows = [["exactly the same", *_share(found.exact)], ["same reason of end", *_share(found.same_finish)]]
    if found.same_tools.of:
        rows.append(["same tool calls", *_share(found.same_tools)])
    rows = [[*row, "", "", ""] for row in rows if found.exact.of]
    spreads: Mapping[str, Spread | None] = {
        "similarity": found.similarity,
        "similarity of meaning": found.meaning,
        "characters, shadow/client": found.characters_ratio,
        "tokens, shadow/client": found.tokens_ratio,
    }
    for name, known in spreads.items():
        if known:
            quantiles = (f"{value:.3f}" for value in (known.p10, known.p50, known.p90))
            rows.append([name, f"{known.number:,}", "", *quantiles])
    notes = [f"{found.partial:,} aligned in part"] if found.partial else []
    notes += [f"tokens of {found.counted:,} counted by events"] if found.counted else []
    heading = f"Likeness ({', '.join(notes)})" if notes else "Likeness"
    return Table(heading, ("", "number", "share (95 %)", "p10", "p50", "p90"), rows)


def _share(of: Share) -> tuple[str, str]:
    if not of.of:
        return "0 of 0", "-"
    return f"{of.number:,} of {of.of:,}", f"{of.number / of.of:.1%} ({of.low:.1%} to {of.high:.1%})"


def _refusals(found: Figures) -> Table:
    if not any(found.refusals.get(who) for who in ("both", "primary", "shadow")):
        return Table("Refusals", (), ())
    whom = {"both": "both refuse", "primary": "only the client's", "shadow": "only the shadow's", "neither": "neither"}
    total = sum(found.refusals.values())
    rows = [
        [text, f"{found.refusals.get(who, 0):,}", f"{found.refusals.get(who, 0) / total:.1%}"]
        for who, text in whom.items()
    ]
    return Table("Refusals", ("", "number", "share"), rows)


_NAMES: Final[Mapping[str, tuple[str, float]]] = {
    "ttft_s": ("TTFT, ms", _MS),
    "tpot_s": ("TPOT, ms", _MS),
    "duration_s": ("whole answer, ms", _MS),
    "tokens": ("output tokens", 1.0),
    "characters": ("characters", 1.0),
}


def _measures(found: Figures) -> Table:
    head = ("", "pairs", "client p50", "p90", "shadow p50", "p90", "shadow/client (95 %)")
    rows = [[_NAMES[name][0], *_pairs(pairs, _NAMES[name][1])] for name, pairs in found.measures.items()]
    return Table("Side by side", head, rows)


def _pairs(pairs: Pairs, scale: float) -> list[str]:
    values = (pairs.primary.p50, pairs.primary.p90, pairs.shadow.p50, pairs.shadow.p90)
    ratio = "-" if pairs.ratio is None else f"{pairs.ratio:.3f}"
    if pairs.low is not None and pairs.high is not None:
        ratio += f" ({pairs.low:.3f} to {pairs.high:.3f})"
    return [f"{pairs.number:,}", *(f"{value * scale:,.1f}" for value in values), ratio]


def _ends(found: Figures) -> Table:
    rows = [
        [f"{kind}: {name.replace('_', ' ')}", f"{ours.get(name, 0):,}", f"{theirs.get(name, 0):,}"]
        for kind, (ours, theirs) in (("flaw", found.flaws), ("end", found.finishes))
        for name in dict.fromkeys([*ours, *theirs])
    ]
    return Table("Flaws, and reasons of ends", ("", "client", "shadow"), rows)


def _worst(found: Figures) -> Table:
    told = any(one.excerpts for one in found.worst)
    head = ["request", "similarity", "differs at", "client chars", "shadow chars", "client end", "shadow end"]
    rows = []
    for one in found.worst:
        at = "-" if one.differs_at is None else f"{one.differs_at:,}"
        row = [one.id, f"{one.similarity:.3f}", at, *(f"{size:,}" for size in one.characters), *one.finish]
        rows.append([*row, *(one.excerpts or ("", ""))] if told else row)
    return Table("Least alike", [*head, "client text there", "shadow text there"] if told else head, rows)


def _lined(table: Table) -> str:
    """A table with its columns under one another; texts of answers are left to files."""
    lines = [
        [_shown(cell) for cell in line[: 7 if "client text there" in table.head else None]]
        for line in (table.head, *table.rows)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return "\n".join([rows[0], "  ".join("-" * width for width in widths), *rows[1:]])


def _shown(cell: str) -> str:
    """A cell in one line, without what could steer a terminal: ids and reasons of ends come from outside."""
    short = cell if len(cell) <= _MOST_CELL else f"{cell[:_MOST_CELL]}…"
    return "".join(char if char.isprintable() else " " for char in short)


_MARKS: Final = str.maketrans({mark: f"\\{mark}" for mark in "\\`*_[]|!~#"})


def _flat(cell: str) -> str:
    """A cell of a table of Markdown, in one line, its text as it is: an answer must not become a picture or link."""
    return html.escape(_shown(cell).translate(_MARKS), quote=False)
