"""Documentation that is made from the code stays equal to it."""

import re
import types
import typing
from pathlib import Path

import msgspec

from extproc.config import Config, Section
from extproc.envoy.exchange import table_markdown

DOCS = Path(__file__).parents[2] / "docs"


def between(name: str, mark: str) -> str:
    """What stands between the two marks of a page."""
    text = (DOCS / name).read_text(encoding="utf-8")
    return text.partition(f"<!-- {mark} -->\n")[2].partition(f"<!-- /{mark} -->")[0]


def keys(kind: type[Section], prefix: str = "", own: typing.Any = msgspec.NODEFAULT) -> str:
    """A Markdown table of a section's keys: defaults from the fields, meanings from the docstring.

    `own` is what the section is by default where it stands: of several of one kind each may have defaults of its own.
    """
    rows, inner = [], ""
    for field in msgspec.structs.fields(kind):
        path = f"{prefix}{field.name}"
        nested, named = section_of(field.type)
        if nested:
            inner += keys(nested, f"{path}.<name>." if named else f"{path}.", field.default)
        else:
            default = default_of(field) if own in (msgspec.NODEFAULT, None) else shown(getattr(own, field.name))
            rows.append(f"| `{path}` | {default} | {meaning(kind, field.name)} |")
    heading = f"\n## {prefix.rstrip('.') or 'top level'}\n\n{(kind.__doc__ or '').splitlines()[0]}\n\n"
    table = "| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    return (heading + table if rows else "") + inner


def section_of(annotation: typing.Any) -> tuple[type[Section] | None, bool]:
    """The section a field holds, and whether it holds several by name."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    named = typing.get_origin(annotation) is dict
    inner = typing.get_args(annotation)[1] if named else annotation
    if isinstance(inner, types.UnionType):  # a section, or none
        inner = typing.get_args(inner)[0]
    return (inner if isinstance(inner, type) and issubclass(inner, Section) else None), named


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """The default of a field."""
    if field.required:
        return "required"
    return shown(field.default if field.default is not msgspec.NODEFAULT else field.default_factory())


def shown(value: object) -> str:
    """A default as YAML would write it."""
    return f"`{msgspec.json.encode(value).decode()}`"


def meaning(kind: type[Section], name: str) -> str:
    """The field's line in the Attributes of its section, on one line."""
    found = re.search(rf"^        {name}: (.*(?:\n            .*)*)", kind.__doc__ or "", re.MULTILINE)
    assert found, f"{kind.__name__}.{name} is not described in its docstring"
    return re.sub(r"\s+", " ", found[1]).replace("|", "\\|")


def test_the_phase_table_in_the_docs_is_the_one_that_runs() -> None:
    """docs/flow.md shows the table of `envoy/exchange.py`."""
    assert between("flow.md", "phases").strip() == table_markdown().strip()


def test_every_key_is_documented_with_its_default_and_meaning() -> None:
    """docs/configuration.md holds the tables made from `config.py`."""
    assert between("configuration.md", "keys").strip() == keys(Config).strip()
