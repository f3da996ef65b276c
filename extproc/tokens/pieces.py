"""Where a text may be cut so that its pieces, tokenized apart and put together, give the ids of the whole.

`tokenizers` (0.23, `added_vocabulary.rs`) looks for added tokens that are not normalized in the raw text first, from
left to right, the longest at each place. What lies between two of them is normalized and split by itself, and knows
nothing of its neighbours. So a text may be cut in front of each token found so. The token stays at the head of its
piece: what stands behind it is then not the beginning of a text, to which some tokenizers add a space.

Not everywhere: a token that takes white space in, or looks at the letter next to it, reaches over a cut.
"""

import re
from collections.abc import Collection, Iterator
from typing import Final

from extproc.tokens.folder import Added

LEAST_CHARS: Final = 256
"""A shorter piece costs more to look up than to tokenize again with its neighbour."""
_WINDOW_CHARS: Final = 1 << 16
"""Characters searched in one call, which lets no other thread run: 5 ms if they are all beginnings of tokens."""


class Cutter:
    """Cuts texts of one tokenizer.

    Args:
        added: all its added tokens.
        least_chars: least length of a piece that is cut off.
    """

    def __init__(self, added: Collection[Added], least_chars: int = LEAST_CHARS) -> None:
        self._least = least_chars
        raw = [token for token in added if token.content and not _normalized(token)]
        places = [token.content for token in raw if not (token.lstrip or token.rstrip)]
        self._places = frozenset(places if _independent(raw) else ())
        # Longest first: Python's `|` takes the first that fits.
        words = sorted((token.content for token in raw), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, words)))
        self._reach = _WINDOW_CHARS + max(map(len, words), default=0)

    def pieces(self, text: str) -> list[str]:
        """Pieces that make up the text; a text that begins with this one has all but the last of them too."""
        if not self._places:
            return [text]
        return list(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[str]:
        began = 0
        for at, token in self._found(text):
            if at - began >= self._least and token in self._places:
                yield text[began:at]
                began = at
        yield text[began:]

    def _found(self, text: str) -> Iterator[tuple[int, str]]:
        """Tokens and their places, from left to right; a window reaches as far as one that begins in it can."""
        start = 0
        while start < len(text):
            end = start + _WINDOW_CHARS
            for found in self._tokens.finditer(text, start, start + self._reach):
                if found.start() >= end:
                    break
                yield found.start(), found[0]
                start = found.end()
            start = max(start, end)


def _normalized(token: Added) -> bool:
    return not token.special if token.normalized is None else token.normalized


def _independent(raw: Collection[Added]) -> bool:
    """Whether no token's place depends on what stands beside it, but for the white space that it takes in."""
    if any(token.single_word for token in raw):
        return False
    strips = any(token.lstrip or token.rstrip for token in raw)
    return not strips or all(token.content == token.content.strip() for token in raw)
