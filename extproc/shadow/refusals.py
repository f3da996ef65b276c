"""Whether an answer refuses: regular expressions over how it begins, kept from running away.

Python's `re` holds the interpreter while it looks, and some patterns need a time that grows exponentially with the
text. So only the beginning of an answer is looked at, and a pattern is taken only if it cannot match in too many ways.
Measured with the worst patterns that were found to be taken, on the worst text: 30 to 50 ms; the built-in ones on a
text that almost matches: 36 µs.
"""

import re
import unicodedata
from collections.abc import Iterable
from typing import Final

from extproc.errors import ConfigError

OPENING: Final = 300
"""Characters of an answer that are looked at: a refusal says so at once."""
_LONGEST: Final = 256
_MOST_WAYS: Final = 4_000
"""Ways in which a pattern may match from one place: those of two `.*`, or of eleven letters that may be left out."""
_LENGTHS: Final = 60
"""Lengths of an open repeat: they share the text, so two have far fewer ways than the square of its length."""
_APOSTROPHES: Final = str.maketrans({"\u2019": "'", "\u02bc": "'", "\u00b4": "'"})

BUILT_IN: Final = (
    r"^(i'm|i am) (really |very |truly |so )?sorry,? (but )?(i|we) (can't|cannot|can not|am unable|won't)\b",
    r"^(sorry|apologies|unfortunately),? (but )?i (can't|cannot|can not|am unable|won't|am not able)\b",
    r"\bi (can't|cannot|can not|won't|will not|am not able to|am unable to|'m not able to|'m unable to) "
    r"(help|assist|comply|provide|fulfill|fulfil|do that|answer|continue|create|generate|support|discuss|engage)\b",
    r"\bi must (respectfully )?(decline|refuse)\b",
    r"\b(goes|is) against my (guidelines|programming|policy|policies)\b",
)
"""Refusals in English. Write your own where models answer in other languages."""


def compiled(patterns: Iterable[str], place: str) -> tuple[re.Pattern[str], ...]:
    """The patterns, ready; the built-in ones when there are none. Case does not matter.

    Raises:
        ConfigError: one of them is wrong; `place` is named.
    """
    found = []
    for index, pattern in enumerate(patterns):
        if text := flaw(pattern):
            raise ConfigError(f"{place}[{index}]: {text}")
        found.append(re.compile(pattern, re.IGNORECASE))
    return tuple(found) or tuple(re.compile(pattern, re.IGNORECASE) for pattern in BUILT_IN)


def flaw(pattern: str) -> str:
    """What is wrong with a pattern, and the remedy; empty when it may be used."""
    if len(pattern) > _LONGEST:
        return f"has {len(pattern)} characters: write several expressions of at most {_LONGEST}"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"no regular expression: {error}: correct it, or write a backslash in front of what is meant literally"
    return _runaway(pattern)


def refuses(text: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    """Whether a text begins as a refusal. White space counts as one blank, curly apostrophes as straight ones."""
    # Twice as much is straightened out as is looked at, since white space may become shorter.
    opening = unicodedata.normalize("NFC", text[: 2 * OPENING]).translate(_APOSTROPHES)
    opening = " ".join(opening.split())[:OPENING]
    return any(pattern.search(opening) for pattern in patterns)


_PIECE: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?#[^)]*\)|\(\?P=\w+\)|\(\?\(|\(\?P<\w+>|\(\?<?[=!]|\(\?>|\(\?[-\w]*[:)]"
    r"|[*+?]|\{\d*,\d*\}|\{\d+\}|.",
    re.DOTALL,
)
"""A pattern's pieces: an escape, a set, a comment, the opening of a group, a repeat, a character."""
_BACK: Final = re.compile(r"\\[1-9]|\(\?P=|\(\?\(")
_VERBOSE: Final = re.compile(r"\(\?\w*x[-\w]*[:)]")


def _runaway(pattern: str) -> str:
    """What may make a valid pattern run away.

    A pattern can match in so many ways from each place: a repeat has as many as it has lengths, what may be
    left out one more, a choice the sum of its branches, and what stands in a row the product. A repeat of what has
    several ways has a power of them, and is refused.
    """
    rows, atom, repeated = [[1, 0]], 1, False
    for match in _PIECE.finditer(pattern):
        piece = match[0]
        if _BACK.match(piece) or _VERBOSE.match(piece):
            return "refers back to a group, or is verbose: write what it stands for, in one line"
        if piece in "*+?" or (piece[0] == "{" and len(piece) > 1):
            if repeated:
                # It makes the repeat lazy or possessive.
                continue
            repeated = True
            if piece not in ("?", "{0,1}", "{,1}", "{1}") and atom > 1:
                return "repeats what can match in several ways, which may take for ever: repeat a text or a set only"
            atom = atom + 1 if piece == "?" else _times(piece)
            continue
        repeated = False
        rows[-1][0] *= atom
        atom = 1
        if piece == "|":
            rows[-1] = [1, sum(rows[-1])]
        elif piece == ")":
            atom = sum(rows.pop())
        elif piece[0] == "(" and piece[-1] != ")":
            rows.append([1, 0])
    ways = sum(rows[0]) if atom == 1 else rows[0][0] * atom + rows[0][1]
    return "" if ways <= _MOST_WAYS else "has too many repeats and choices in a row: write several shorter expressions"


def _times(repeat: str) -> int:
    """How many lengths a repeat allows: `*`, `+`, `{m}`, `{m,}`, `{,n}` or `{m,n}`."""
    least, comma, most = repeat.strip("{}").partition(",")
    if repeat[0] != "{" or (comma and not most):
        return _LENGTHS
    return 1 if not comma else max(1, min(_LENGTHS, int(most) - int(least or 0) + 1))
