"""What is kept of a comparison, and what never is."""

import pytest

from extproc.config_rollouts import Keep
from extproc.errors import StoreError
from extproc.shadow.compare import compared, digest
from extproc.shadow.result import LONGEST_ANSWER, LONGEST_PROMPT, About, decode, encode, result
from tests.unit.shadow.parts import SETTINGS, text

ABOUT = About(
    id="r1", at=5.0, model="m", primary="v1", shadow="v2", api="chat", streamed=True, prompt_tokens=7, body=b'"secret"'
)


def kept(keep: Keep, ours: str = "ours", theirs: str = "theirs", body: bytes = ABOUT.body) -> bytes:
    """The line of a result."""
    one, other = text(ours), text(theirs)
    about = About(**{name: getattr(ABOUT, name) for name in About.__struct_fields__} | {"body": body})
    return encode(result(about, compared(one, other, SETTINGS), one, other, keep, SETTINGS.key))


@pytest.mark.parametrize(
    ("keep", "answers", "prompt"),
    [("metrics", None, None), ("answers", ("ours", "theirs"), None), ("all", ("ours", "theirs"), '"secret"')],
)
def test_texts_are_kept_only_as_allowed(keep: Keep, answers: object, prompt: object) -> None:
    """`metrics` keeps no text, `answers` both answers, `all` the prompt too."""
    line = kept(keep)
    found = decode(line)
    assert (found.answers, found.prompt) == (answers, prompt)
    assert (b"ours" in line, b"secret" in line) == (answers is not None, prompt is not None)
    assert found.prompt_digest == digest(SETTINGS.key, '"secret"')


def test_what_is_kept_is_read_again() -> None:
    """All of it, in one line."""
    line = kept("all")
    assert b"\n" not in line
    assert encode(decode(line)) == line
    assert (decode(line).id, decode(line).prompt_tokens) == ("r1", 7)
    assert decode(line).compared.similarity == pytest.approx(2 / 6)


def test_texts_that_are_kept_have_a_bound() -> None:
    """By characters, and by the bytes that the store takes of a record: blanks of control take six each."""
    found = decode(kept("all", "a" * 50_000, "b" * 50_000, b"c" * 50_000))
    assert found.answers == ("a" * LONGEST_ANSWER, "b" * LONGEST_ANSWER)
    assert found.prompt == "c" * LONGEST_PROMPT
    assert len(kept("all", "\x01" * 50_000, "", b"\x02" * 50_000)) <= 65_536


@pytest.mark.parametrize("line", [b"", b"{}", b"[" * 2000, b'{"id": "\xff"}', b"null"])
def test_what_is_no_result_is_told(line: bytes) -> None:
    """A torn line or somebody else's record."""
    with pytest.raises(StoreError, match="cannot be read"):
        decode(line)
