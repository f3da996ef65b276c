"""A call read without its prompt, for policies that do not look at it."""

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.model import Request, RouteKind
from extproc.request.shapes import Flaw, parse, peek
from tests.unit.request.calls import CHAT, FIELDS, JSON, PATHS


@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8), st.text(max_size=8))
def test_a_peek_sees_what_a_parse_sees_except_the_prompt(path: str, body: dict[str, Any], header: str) -> None:
    """All that policies without prefix scoring need is read; segments and turns are not."""
    headers = {"x-session-affinity": header}
    data = json.dumps(body).encode()
    parsed, peeked = parse(path, headers, data), peek(path, headers, data)
    assert (peeked.segments, peeked.turn, peeked.follows) == ((), b"", b"")
    if parsed.flaw in {"", Flaw.NO_PROMPT, Flaw.BAD_PROMPT}:
        assert peeked == msgspec.structs.replace(parsed, segments=(), turn=b"", follows=b"", flaw="")


def test_a_peek_does_not_walk_the_messages() -> None:
    """Messages nested deeper than any reader of values could follow are passed over."""
    body = b'{"model":"m","messages":' + b"[" * 500 + b"]" * 500 + b"}"
    assert peek(CHAT, {}, body) == Request(kind=RouteKind.CHAT, model="m", salt=b"m\0\0\0\1m")
    assert peek("/v1/models", {"x-session-id": "s"}, body) == Request(session="s")
    assert peek(CHAT, {}, b"[]").flaw == Flaw.NOT_OBJECT
