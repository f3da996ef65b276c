"""What counts as a refusal, and which patterns are let in to say so."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ConfigError
from extproc.shadow.refusals import BUILT_IN, OPENING, compiled, flaw, refuses

BUILT = compiled((), "refusals")


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that.",
        "I\u2019m sorry, but I can\u2019t assist with that request.",
        "I am sorry, I cannot do this.",
        "Sorry, I can't do that.",
        "Unfortunately, I am not able to share it.",
        "I understand how you feel. However, I cannot provide instructions for it.",
        "\n  I must\n decline.",
        "That goes against my guidelines.",
    ],
)
def test_answers_that_refuse(text: str) -> None:
    """Common English ones, with either apostrophe and any white space."""
    assert refuses(text, BUILT)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sure! Here is the recipe.",
        "I'm sorry to hear that. Try turning it off and on.",
        "The compiler cannot provide a default here.",
        "I can't wait to help you with this!",
        "Unfortunately, the train is late.",
        "x" * OPENING + " I must decline.",
    ],
)
def test_answers_that_do_not(text: str) -> None:
    """Pity, things that cannot, and what stands far behind the beginning are no refusals."""
    assert not refuses(text, BUILT)


def test_own_patterns_stand_in_place_of_the_built_in_ones() -> None:
    """For models that answer in other languages; case does not matter."""
    own = compiled([r"^tut mir leid"], "refusals")
    assert refuses("Tut mir leid, das geht nicht.", own)
    assert not refuses("I must decline.", own)


@pytest.mark.parametrize(
    "pattern",
    [*BUILT_IN, r"a.*b", r"a*b+", r"(ab)+ (cd)*", r"[a+*]{3}", r"\(a+\)+", r"a+?b", r"a++b", r"a{2,}?", r"a{2"],
)
def test_harmless_patterns_are_taken(pattern: str) -> None:
    """Repeats in a row and of plain texts, escapes and sets."""
    assert flaw(pattern) == ""


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a+)+$", "several ways"),
        ("(?:a|aa)*$", "several ways"),
        ("(a?){50}", "several ways"),
        ("((a{1,3}){1,3})", "several ways"),
        ("(?>a+)+", "several ways"),
        ("(?P<x>.*)*b", "several ways"),
        ("a.*b.*c.*d", "too many"),
        ("a?" * 20 + "a" * 20, "too many"),
        ("(a|a)" * 20 + "b", "too many"),
        (r"(a)\1", "refers back"),
        (r"(?P<x>a)(?P=x)", "refers back"),
        (r"(a)(?(1)b|c)", "refers back"),
        ("(?x)(a+) +b", "verbose"),
        ("(", "no regular expression"),
        ("a" * 300, "300 characters"),
    ],
)
def test_patterns_that_may_run_away_are_refused(pattern: str, why: str) -> None:
    """`re` holds the whole process while it looks: exponential patterns, and those of many ways, do not come in."""
    assert why in flaw(pattern)
    with pytest.raises(ConfigError, match=r"^models\.m\.shadow\.refusals\[1\]: ") as raised:
        compiled(["fine", pattern], "models.m.shadow.refusals")
    assert why in str(raised.value)


ATOMS = st.sampled_from(["a", "ab", ".", "[ab]", r"\w", "(a)", "(a|b)", "(?:a)"])
REPEATS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "*?", "++"])
SHORT = st.lists(st.tuples(ATOMS, REPEATS), min_size=1, max_size=4).map(lambda row: "".join(map("".join, row)))


@given(st.text(max_size=20) | SHORT | st.lists(SHORT, max_size=3).map(lambda rows: f"({'|'.join(rows)})*"))
def test_any_text_is_judged(pattern: str) -> None:
    """A pattern is told to be wrong, or compiles; it never raises."""
    if not flaw(pattern):
        re.compile(pattern)


def test_an_open_repeat_of_a_repeat_is_never_taken() -> None:
    """Whatever group it stands in: the shapes of exponential patterns, one by one."""
    for opening in ("(", "(?:", "(?P<n>", "(?i:", "(?=", "(?>"):
        for inner in ("a+", "a*", "a?", "a|b", "a{1,2}", "(a+)", "x(b|c)"):
            for outer in ("*", "+", "{2,}", "{3}", "*?", "+?"):
                assert flaw(f"{opening}{inner}){outer}"), (opening, inner, outer)
