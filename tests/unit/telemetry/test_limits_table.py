"""docs/operating.md has every number of the traffic rules: its default, what clients see, its metric and its alert."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from extproc.config import Breakers, Gateway, Overload, RateLimits, Relay, Retries, Rollouts, Section, Timeouts
from extproc.config_gateway import GatewayRoute
from extproc.config_limits import TimeoutRule
from extproc.config_overload import TenantShare
from extproc.config_quotas import RateLimit
from extproc.config_rollouts import Shadow
from tests.unit.test_docs import default_of, section_of, shown

TEXT: Final = (Path(__file__).parents[3] / "docs" / "operating.md").read_text(encoding="utf-8")
SECTIONS: Final[dict[str, type[Section]]] = {
    "timeouts.": Timeouts,
    "timeouts.rules.": TimeoutRule,
    "retries.": Retries,
    "breakers.": Breakers,
    "overload.": Overload,
    "overload.tenants.<name>.": TenantShare,
    "rate_limits.": RateLimits,
    "rate_limits.rules.": RateLimit,
    "relay.": Relay,
    "rollouts.": Rollouts,
    "models.<name>.shadow.": Shadow,
    "gateway.": Gateway,
    "gateway.routes.": GatewayRoute,
}
NO_LIMITS: Final = {"gateway.concurrency", "gateway.sidecar.workers", "relay.port"}
"""Numbers that bound no traffic: how many threads and processes there are, and where they listen."""


def takes_a_number(kind: msgspec.inspect.Type) -> bool:
    """Whether a key takes a number, or a number or nothing."""
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return any(isinstance(each, msgspec.inspect.IntType | msgspec.inspect.FloatType) for each in kinds)


def numbers(kind: type[Section], prefix: str, own: Any = msgspec.NODEFAULT) -> Iterator[tuple[str, str]]:
    """Every key of a section that takes a number, with its default as YAML writes it.

    `own` is what the section is by default where it stands: of several of one kind each may have defaults of its own.
    """
    for field in msgspec.structs.fields(kind):
        path = f"{prefix}{field.name}"
        nested, named = section_of(field.type)
        if nested and not named:
            yield from numbers(nested, f"{path}.", field.default)
        elif takes_a_number(msgspec.inspect.type_info(field.type)):
            default = default_of(field) if own in (msgspec.NODEFAULT, None) else shown(getattr(own, field.name))
            yield path, default.strip("`")


KEYS: Final = {
    path: default
    for prefix, kind in SECTIONS.items()
    for path, default in numbers(kind, prefix)
    if path not in NO_LIMITS and not path.endswith("_port")
}


def rows() -> dict[str, list[str]]:
    """Cells of every row of the tables of limits, by each key that its first cell names."""
    part = TEXT.partition("<!-- limits -->\n")[2].partition("<!-- /limits -->")[0]
    found: dict[str, list[str]] = {}
    for line in part.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for key in re.findall(r"`([a-z][\w.<>]*)`", cells[0]) if cells else []:
            assert key not in found, key
            found[key] = cells
    return found


ROWS: Final = rows()


def test_the_tables_have_every_number_and_nothing_else() -> None:
    """A key that was added, renamed or removed is missed here."""
    assert set(ROWS) == set(KEYS)


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_row_has_its_default_and_every_cell(key: str) -> None:
    """The default is the one of the code; why, what clients see, and the metric are said."""
    assert len(ROWS.get(key, [])) == 5
    named = re.findall(r"`([a-z][\w.<>]*)`", ROWS[key][0])
    defaults = [each.strip() for each in ROWS[key][1].split(";")]
    assert len(defaults) in {1, len(named)}
    told = defaults[named.index(key) if len(defaults) > 1 else 0]
    assert _as_number(told) == _as_number(KEYS[key])
    assert all(ROWS[key])


def _as_number(told: str) -> float | None:
    words = told.replace(",", "").split()
    if words[0] in {"null", "none"}:
        return None
    return float(words[0]) * {"MiB": 1 << 20}.get(words[1] if len(words) > 1 else "", 1)
