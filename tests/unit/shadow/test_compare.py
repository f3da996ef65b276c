"""How alike two answers are: golden numbers, and what no comparison may tell."""

import hashlib
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.shadow.answer import Answer, ToolCall, unreached
from extproc.shadow.compare import LONGEST, Settings, common, compared, digest, similarity
from tests.unit.shadow.parts import SETTINGS, text

TEXTS = st.text(max_size=40)


def distance(one: str, other: str) -> int:
    """Levenshtein distance by its recurrence (Wagner and Fischer, 1974)."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        above, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (left != right))
    return row[-1]


@given(TEXTS, TEXTS)
def test_similarity_is_the_edit_distance_by_the_longer_length(one: str, other: str) -> None:
    """1 - distance / longer length; 1 for two empty texts."""
    expected = 1.0 - distance(one, other) / max(1, len(one), len(other))
    assert similarity(one, other) == pytest.approx(expected)


@given(TEXTS, TEXTS)
def test_the_first_difference_is_where_the_common_beginning_ends(one: str, other: str) -> None:
    """As found character by character."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    assert common(one, other) == len(list(same))


def test_two_answers_side_by_side() -> None:
    """Golden: `kitten` and `sitting` are three edits apart, and seven characters long at most."""
    ours, theirs = text("kitten", tokens=4), text("sitting", tokens=6, finish="length")
    found = compared(ours, theirs, SETTINGS)
    assert (found.outcome, found.exact, found.partial) == ("compared", False, False)
    assert found.similarity == pytest.approx(1 - 3 / 7)
    assert (found.differs_at, found.tokens_ratio) == (0, 1.5)
    assert found.characters_ratio == pytest.approx(7 / 6)
    assert (found.same_finish, found.same_tools) == (False, True)


def test_equal_answers_are_equal() -> None:
    """No distance is taken, whatever their length, and no place differs."""
    found = compared(text("a" * 3 * LONGEST), text("a" * 3 * LONGEST), SETTINGS)
    assert (found.exact, found.similarity, found.partial, found.differs_at) == (True, 1.0, False, None)
    assert found.primary.digest == found.shadow.digest != ""


def test_the_same_text_with_other_tool_calls_is_not_the_same_answer() -> None:
    """Arguments and the order of calls count."""
    f, g = ToolCall("f", "{}"), ToolCall("g", "{}")
    found = compared(text("", tools=(f, g)), text("", tools=(g, f)), SETTINGS)
    assert (found.exact, found.same_tools, found.similarity, found.differs_at) == (False, False, 1.0, None)
    assert found.primary.digest != found.shadow.digest
    assert (found.primary.tools, found.shadow.tools) == (2, 2)


def test_long_texts_are_aligned_by_their_beginnings() -> None:
    """The time of a comparison has a bound: what stands behind it counts for lengths and for equality only."""
    head = "x" * LONGEST
    found = compared(text(head + "a"), text(head + "bcd"), SETTINGS)
    assert (found.exact, found.similarity, found.partial, found.differs_at) == (False, 1.0, True, LONGEST)
    settings = msgspec.structs.replace(SETTINGS, longest=4)
    assert compared(text("abcd-----"), text("abxd"), settings).similarity == pytest.approx(0.75)


def test_an_empty_answer_has_no_ratio() -> None:
    """Nothing is so many times as long as nothing; the other way round it is 0."""
    found = compared(text("", tokens=0), text("abc", tokens=1), SETTINGS)
    assert (found.characters_ratio, found.tokens_ratio, found.similarity) == (None, None, 0.0)
    assert compared(text("abc"), text("", tokens=0), SETTINGS).characters_ratio == 0.0


def test_tokens_of_both_are_counted_in_the_same_way() -> None:
    """Where one engine tells no usage, events of both streams stand for tokens, and the result says so."""
    ours, theirs = text("a b", tokens=None, events=2), text("a b c", tokens=3, events=4)
    found = compared(ours, theirs, SETTINGS)
    assert (found.primary.tokens, found.shadow.tokens, found.tokens_ratio) == (2, 4, 2.0)
    assert found.primary.counted
    assert found.shadow.counted
    whole = compared(text("a b", tokens=None), theirs, SETTINGS)
    assert (whole.primary.tokens, whole.tokens_ratio) == (None, None)


FAILED = Answer(status=503, flaw="status")


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [
        (text("a"), FAILED, "shadow_failed"),
        (FAILED, text("a"), "primary_failed"),
        (FAILED, unreached(1.0), "both_failed"),
        (text("a", flaw="cut"), text("a"), "primary_failed"),
        (text("a"), text("", flaw="too_long"), "unfit"),
        (text("a", choices=2), text("a", choices=2), "unfit"),
    ],
)
def test_only_two_whole_answers_are_compared(ours: Answer, theirs: Answer, outcome: str) -> None:
    """Half an answer says nothing of how alike the versions are, and has no hash; that one failed says much."""
    found = compared(ours, theirs, SETTINGS)
    assert found.outcome == outcome
    assert (found.exact, found.similarity, found.same_tools, found.differs_at) == (None, None, None, None)
    assert (found.primary.flaw, found.shadow.flaw) == (ours.flaw, theirs.flaw)
    assert (found.primary.digest != "", found.shadow.digest != "") == (not ours.flaw, not theirs.flaw)


def test_refusals_of_either_are_known() -> None:
    """By how the text begins, or because the engine marks it."""
    ours, theirs = text("I'm sorry, but I can't help with that."), text("Sure!", refused=True)
    found = compared(ours, theirs, SETTINGS)
    assert (found.primary.refused, found.shadow.refused) == (True, True)
    assert not compared(text("Sure!"), text("Of course."), SETTINGS).shadow.refused


SECRETS = ("correct horse battery", "staple")


@pytest.mark.parametrize("more", [{}, {"flaw": "cut"}, {"finish": "length"}])
def test_a_comparison_holds_no_text(more: dict[str, Any]) -> None:
    """What is stored where no text may be kept: numbers, reasons and hashes under a key."""
    ours = text(SECRETS[0], tools=(ToolCall(SECRETS[1], SECRETS[1]),), **more)
    written = msgspec.json.encode(compared(ours, text(f"{SECRETS[0]} {SECRETS[1]}"), SETTINGS)).decode()
    assert not any(word in written for secret in SECRETS for word in secret.split())
    plain = hashlib.blake2b(SECRETS[0].encode(), digest_size=12).hexdigest()
    assert plain not in written


def test_hashes_are_of_their_key() -> None:
    """Golden, by hashlib alone: who has not got the key cannot test a guess. A long key is hashed first."""
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in (b"ab", "é".encode()))
    expected = hashlib.blake2b(framed, digest_size=12, key=b"k", person=b"warmpath-shadow").hexdigest()
    assert digest(b"k", "ab", "é") == expected
    assert digest(b"other", "ab", "é") != expected
    assert digest(b"k", "a", "bé") != expected
    assert digest(b"", "ab") == ""
    long = b"x" * 100
    assert digest(long, "ab") == digest(hashlib.blake2b(long).digest(), "ab")
    assert compared(text("a"), text("b"), Settings(b"", ())).primary.digest == ""
