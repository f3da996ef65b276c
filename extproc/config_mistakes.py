"""Finds the first value of a configuration that its type refuses, and says what to write instead.

Walks values and types side by side: msgspec's own message names neither the key of a mapping nor what would have
been right.
"""

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from extproc.config import Address, Name, Section
from extproc.config_gateway import ClaimName, RoutePath
from extproc.config_pools import ZmqAddress
from extproc.config_relay import RelayPath

_TYPE_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list such as [a, b]",
    dict: "a mapping of `key: value` lines",
}
_PATH_WORDS = "a path without query, for example "
_NAME_PATTERN = typing.get_args(Name)[1].pattern
_PATTERN_WORDS = {
    typing.get_args(Address)[1].pattern: "`host:port`, for example 127.0.0.1:8001",
    _NAME_PATTERN: "1 to 63 letters, digits, dots, hyphens or underscores; first a letter or digit",
    r"^(rediss?(\+(sentinel|cluster))?|unix)://": "a redis://, rediss:// or unix:// URL, +sentinel or +cluster",
    typing.get_args(ZmqAddress)[1].pattern: "a ZMQ address, for example tcp://*:5557",
    typing.get_args(RoutePath)[1].pattern: f"{_PATH_WORDS}/v1/embeddings",
    typing.get_args(RelayPath)[1].pattern: f"{_PATH_WORDS}/v1/chat/completions",
    typing.get_args(ClaimName)[1].pattern: "the name of a claim, for example sub or org.team",
    r"^(https?://.+)?$": "an http:// or https:// URL, for example http://10.0.0.9:8100",
}
_LEAST_BEGINNING = 3
_SHOWN_CHARS = 80
_HIDDEN = ".secret"
_USER_INFO = re.compile(r"://[^/\s]*@")


class Mistake(msgspec.Struct, frozen=True):
    """One mistake.

    Attributes:
        path: where, as `$.pools.main.endpoints[0]`.
        text: what was found and what to write.
    """

    path: str
    text: str


def nearest(word: str, known: Iterable[str], what: str) -> str:
    """A remedy for a word that is not known: the nearest known one, or all of them."""
    names = [*known]
    # A word that begins with a known one is meant before another that only looks like it: `maximum` is `max`, not
    # `max_ms`.
    begun = sorted((name for name in names if len(name) >= _LEAST_BEGINNING and word.startswith(name)), key=len)
    near = (
        difflib.get_close_matches(word, names, n=1, cutoff=0.75)
        or begun[-1:]
        or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    )
    return f"did you mean `{near[0]}`?" if near else f"{what}: {', '.join(sorted(names))}"


def first_mistake(value: Any, kind: Any, path: str = "$") -> Mistake | None:
    """Compare a plain value with a type, depth first in the order of the file; None when it fits."""
    kind, optional = _required(kind)
    if value is None and optional:
        return None
    plain, limits = _unwrap(kind)
    if isinstance(plain, type) and issubclass(plain, Section):
        return _in_section(value, plain, path)
    container = typing.get_origin(plain)
    if container is dict:
        return _in_mapping(value, plain, limits, path)
    if container is list:
        return _in_list(value, plain, limits, path)
    return _in_leaf(value, plain, limits, path)


def _required(kind: Any) -> tuple[Any, bool]:
    """A type without its `| None`, and whether it had one."""
    inner = [one for one in typing.get_args(kind) if one is not types.NoneType]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return inner[0], True
    return kind, False


def _unwrap(kind: Any) -> tuple[Any, Meta]:
    if typing.get_origin(kind) is Annotated:
        plain, limits = typing.get_args(kind)[:2]
        return plain, limits
    return kind, Meta()


def _in_section(value: Any, section: type[Section], path: str) -> Mistake | None:
    kinds = typing.get_type_hints(section, include_extras=True)
    if not isinstance(value, dict):
        return _wrong_type(value, dict, path, f" with {', '.join(sorted(kinds))}")
    for key, inner in value.items():
        if key not in kinds:
            remedy = nearest(str(key), kinds, "known keys")
            return Mistake(f"{path}.{key}", f"unknown key `{key}`: {remedy}")
        if found := first_mistake(inner, kinds[key], f"{path}.{key}"):
            return found
    for field in msgspec.structs.fields(section):
        if field.required and field.name not in value:
            what = _type_words(_unwrap(kinds[field.name])[0])
            return Mistake(path, f"`{field.name}` is missing: add `{field.name}:` with {what}")
    return None


def _in_mapping(value: Any, kind: Any, limits: Meta, path: str) -> Mistake | None:
    if not isinstance(value, dict):
        return _wrong_type(value, dict, path)
    key_kind, inner_kind = typing.get_args(kind)
    if limits.min_length and len(value) < limits.min_length:
        return Mistake(path, "is empty: name at least one")
    for key, inner in value.items():
        if not isinstance(key, str):
            return Mistake(f"{path}.{key}", f"found {_shown(key, path)} as a name: put it in quotes")
        if found := _in_leaf(key, *_unwrap(key_kind), f"{path}.{key}"):
            return found
        if found := first_mistake(inner, inner_kind, f"{path}.{key}"):
            return found
    return None


def _in_list(value: Any, kind: Any, limits: Meta, path: str) -> Mistake | None:
    if not isinstance(value, list):
        return _wrong_type(value, list, path)
    if limits.min_length and len(value) < limits.min_length:
        return Mistake(path, "is empty: name at least one")
    if limits.max_length is not None and len(value) > limits.max_length:
        return Mistake(path, f"has {len(value)} values: write {limits.max_length} at most")
    inner_kind = typing.get_args(kind)[0]
    found = (first_mistake(inner, inner_kind, f"{path}[{index}]") for index, inner in enumerate(value))
    return next((one for one in found if one), None)


def _in_leaf(value: Any, kind: Any, limits: Meta, path: str) -> Mistake | None:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value in choices:
            return None
        if isinstance(value, str):
            remedy = nearest(value, choices, "valid are")
        elif str(value) in choices:
            remedy = f'write it in quotes: "{value}"'  # YAML reads 1.3 as a number
        else:
            remedy = f"valid are: {', '.join(choices)}"
        return Mistake(path, f"found {_shown(value, path)}: {remedy}")
    if isinstance(value, float) and not math.isfinite(value):
        return Mistake(path, f"found {_shown(value, path)}: write {_type_words(kind)}")
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        words = "" if value is None or limits.pattern == _NAME_PATTERN else _PATTERN_WORDS.get(limits.pattern or "", "")
        return Mistake(path, f"found {_shown(value, path)}: write {words}") if words else _wrong_type(value, kind, path)
    try:
        msgspec.convert(value, Annotated[kind, limits])
    except msgspec.ValidationError:
        return Mistake(path, f"found {_shown(value, path)}: write {_limit_words(kind, limits)}")
    return None


def _wrong_type(value: Any, kind: Any, path: str, more: str = "") -> Mistake:
    if value is None:
        return Mistake(path, f"has no value: remove the line or write {_type_words(kind)}{more}")
    return Mistake(path, f"found {_shown(value, path)}: write {_type_words(kind)}{more}")


def _type_words(kind: Any) -> str:
    plain = typing.get_origin(kind) or kind
    if isinstance(plain, type) and issubclass(plain, Section):
        plain = dict
    return _TYPE_WORDS.get(plain, "another value")


def _limit_words(kind: Any, limits: Meta) -> str:
    """What a constrained type accepts, in words."""
    if limits.pattern:
        return _PATTERN_WORDS.get(limits.pattern, f"text that matches {limits.pattern}")
    words = {"at least": limits.ge, "more than": limits.gt, "at most": limits.le, "less than": limits.lt}
    bounds = " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
    if limits.min_length is not None or limits.max_length is not None:
        bounds = f"of {limits.min_length or 0} to {limits.max_length} characters"
    return f"{_type_words(kind)} {bounds}"


def _shown(value: Any, path: str) -> str:
    """A value as it is shown in an error: containers by their kind, long ones cut, secrets not at all."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if path.endswith(_HIDDEN):
        return "a value"
    text = repr(value) if isinstance(value, str | int | float) else str(value)
    text = _USER_INFO.sub("://***@", text)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
