"""Volatile text: what is passed over, where, and which rules are refused."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import Volatile, VolatileRule
from extproc.errors import ConfigError
from extproc.request.blocks import chain
from extproc.request.model import Request
from extproc.request.shapes import parse
from extproc.request.volatile import BUILTIN, NONE, Rules, rules_of
from tests.unit.request.calls import CHAT, call

LINE = "x-anthropic-billing-header: cc_version=2.1.{0}; cc_entrypoint=cli; cch={1};"
ONE, OTHER = LINE.format("177.01c", "36ee5"), LINE.format("177.9f0", "0aaa9")
SYSTEM = "You are Claude Code. " * 300
TEXT = st.text(alphabet=st.characters(codec=None))


def message(system: object, rules: Rules = BUILTIN, path: str = "/v1/messages") -> Request:
    """Parse a request that has a system text."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "system": system}
    if path == CHAT:
        body["messages"].insert(0, {"role": "system", "content": body.pop("system")})
    return call(path, None, rules, **body)


@pytest.mark.parametrize("path", ["/v1/messages", CHAT])
@pytest.mark.parametrize("blocks", [True, False])
def test_two_turns_that_differ_only_in_the_billing_line_are_one_prompt(path: str, blocks: bool) -> None:
    """Claude Code computes two parts of its first line anew each time; hashes and turns do not see it."""
    one, other = (
        message(
            [{"type": "text", "text": line}, {"type": "text", "text": SYSTEM}] if blocks else f"{line}\n{SYSTEM}",
            path=path,
        )
        for line in (ONE, OTHER)
    )
    assert chain(one.segments, one.salt, 64) == chain(other.segments, other.salt, 64)
    assert one.turn == other.turn
    assert one.segments == message([{"type": "text", "text": SYSTEM}] if blocks else SYSTEM, path=path).segments


def test_without_the_rule_the_billing_line_hides_everything_behind_it() -> None:
    """Switched off, two such turns share nothing."""
    one, other = (message(f"{line}\n{SYSTEM}", NONE) for line in (ONE, OTHER))
    assert not set(chain(one.segments, b"", 64)) & set(chain(other.segments, b"", 64))


@pytest.mark.parametrize(
    "text",
    [
        "the line is x-anthropic-billing-header: cc_version=1; cch=a;",
        "x-anthropic-billing-header: explain this to me",
        "x-anthropic-billing-header:",
        "X-Anthropic-Billing-Header: cch=a;",
    ],
)
def test_talk_about_the_billing_line_is_no_billing_line(text: str) -> None:
    """Only the exact form at the very beginning is passed over."""
    assert BUILTIN.settle(text, 4096) is text


def test_text_on_the_billing_line_counts() -> None:
    """What follows the last of the line's values is the prompt's own."""
    assert BUILTIN.settle(f"{ONE} cc_new=1; Hello; a=b", 4096) == "Hello; a=b"
    assert BUILTIN.settle(f"{ONE}\nThe line was\n{OTHER}", 4096) == f"The line was\n{OTHER}"


STAMP = Rules([(r"now: \d+", "now"), (r"(id)=\w+", r"\1")], 64)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_rules_look_into_the_opening_only(role: str) -> None:
    """System messages in front and the message after them are looked into, later ones are not."""

    def messages(*stamps: int) -> list[dict[str, Any]]:
        roles = [role, role, "user", role, "user"]
        return [{"role": r, "content": f"now: {stamp}"} for r, stamp in zip(roles, stamps, strict=True)]

    segments = [
        call(CHAT, None, STAMP, messages=messages(*stamps)).segments for stamps in ((1, 2, 3, 4, 5), (6, 7, 8, 9, 0))
    ]
    assert [one == other for one, other in zip(*segments, strict=True)] == [True, True, True, False, False]


def test_rules_look_at_the_first_bytes_only() -> None:
    """The reach is counted in bytes of UTF-8 over all texts of a message together."""
    assert STAMP.settle("é" * 28 + "now: 12", 64) == "é" * 28 + "now"
    assert STAMP.settle("é" * 29 + "now: 12", 64) == "é" * 29 + "now2"
    assert STAMP.settle("é" * 31 + "now: 12", 64) == "é" * 31 + "now: 12"
    parts = [{"type": "text", "text": "b" * 60}, {"type": "text", "text": "id=1"}, "id=2", {"type": "image_url"}]
    (segment,) = call(CHAT, None, STAMP, messages=[{"role": "user", "content": parts}]).segments
    assert b"\xfetid\xfetid=2\xfem" in segment


@given(TEXT, st.integers(1, 100), st.sampled_from(["", "-"]))
def test_a_rule_changes_nothing_behind_its_reach(text: str, first: int, replacement: str) -> None:
    """A rule that replaces every character keeps the text from the first character that ends behind the reach."""
    settled = Rules([(r"(?s).", replacement)], first).settle(text, first)
    kept = settled.lstrip("-") if replacement else settled
    inside = text[: len(text) - len(kept)] if text.endswith(kept) else None
    if replacement and set(text) & {"-"}:
        return
    assert inside is not None
    assert len(inside.encode("utf-8", "surrogatepass")) <= first
    assert not kept or len((inside + kept[0]).encode("utf-8", "surrogatepass")) > first


@given(TEXT)
def test_a_text_without_a_match_comes_back_itself(text: str) -> None:
    """Nothing is copied when there is nothing to pass over."""
    for rules in (NONE, BUILTIN, Rules([("\0never\0", "x")])):
        assert rules.settle(text, 4096) is text


@pytest.mark.parametrize("pattern", ["(", "[", "*", "(?P<a>", "a{99999999999999999999}"])
def test_a_malformed_pattern_is_refused_by_its_place(pattern: str) -> None:
    """The error names the rule as the configuration counts it, and says what is wrong."""
    settings = Volatile(rules=[VolatileRule(pattern="a"), VolatileRule(pattern=pattern)])
    with pytest.raises(ConfigError, match=re.escape("rules[1].pattern")):
        rules_of(settings)


@pytest.mark.parametrize("replacement", [r"\1", r"\g<name>", "\\"])
def test_a_malformed_replacement_is_refused_by_its_place(replacement: str) -> None:
    """A template that names a group the pattern lacks is found when it is read, not at the first request."""
    with pytest.raises(ConfigError, match=re.escape("rules[0].replacement")):
        rules_of(Volatile(rules=[VolatileRule(pattern="a", replacement=replacement)]))


def test_the_configuration_makes_the_rules() -> None:
    """Built-in rules unless switched off, then the operator's, with the operator's reach."""
    own = [VolatileRule(pattern="now: .*", replacement="now")]
    both, only = rules_of(Volatile(rules=own, first_bytes=100)), rules_of(Volatile(builtin=False, rules=own))
    assert both.settle(f"{ONE}\nnow: 5", 4096) == "now"
    assert only.settle(f"{ONE}\nnow: 5", 4096) == f"{ONE}\nnow"
    assert (both.first_bytes, only.first_bytes) == (100, 4096)
    assert not rules_of(Volatile(builtin=False))
    assert rules_of(Volatile())


def test_a_malformed_message_stays_malformed() -> None:
    """Rules leave what is no message to the parser, which says so."""
    for content in (7, [7], [{"type": "text", "text": 7}]):
        assert parse(CHAT, {}, b"[]", STAMP).flaw == "not_object"
        assert call(CHAT, None, STAMP, messages=[{"role": "user", "content": content}]).flaw == "bad_prompt"
    assert call(CHAT, None, STAMP, messages=[7]).flaw == "bad_prompt"
