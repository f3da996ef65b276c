"""A tokenizer of Hugging Face's `tokenizers`: texts into ids, as vLLM's renderer calls it, with a cache of pieces.

Measured by `tests/bench/tokens.py` (AMD EPYC, Python 3.11, tokenizers 0.23; medians of 31): a new conversation of
31,000 tokens takes 33 ms of CPU from body to ids, its next turn 3 ms, the same again 1.2 ms.
"""

import os
from array import array
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer
from xxhash import xxh3_128_digest

from extproc.errors import ConfigError
from extproc.tokens.cache import TokenCache
from extproc.tokens.folder import Added, Folder
from extproc.tokens.pieces import LEAST_CHARS, Cutter
from extproc.tokens.values import Made, NoTokensError, Why

# One text at a time is all that is asked for. Threads of the library's own would take the cores of other workers.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Encoder:
    """One tokenizer and what it made ids of before. Safe in threads.

    Args:
        folder: where it comes from.
        cache: where ids are kept.
        least_chars: least length of the pieces that it keeps them by.

    Raises:
        ConfigError: `tokenizer.json` cannot be read, or gives other ids each time.
    """

    def __init__(self, folder: Folder, cache: TokenCache, least_chars: int = LEAST_CHARS) -> None:
        self._tokenizer = _loaded(folder)
        self._cache = cache
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._cutter = Cutter([_added(token) for token in added], least_chars)
        self._around = _around(self._tokenizer)

    def encode(self, text: str, *, special_tokens: bool) -> "tuple[array[int], int]":
        """Ids of a text, and how many of them were found in the cache.

        Args:
            text: the text.
            special_tokens: whether the tokenizer adds its own around it.

        Raises:
            NoTokensError: the text has half a surrogate pair, which no tokenizer takes.
        """
        before: Sequence[int] = ()
        behind: Sequence[int] = ()
        mark, pieces = b"", self._cutter.pieces(text)
        if special_tokens and self._around is None:
            mark, pieces = b"s", [text]
        elif special_tokens and self._around:
            before, behind = self._around
        try:
            keys = [xxh3_128_digest(mark + piece.encode()) for piece in pieces]
        except UnicodeEncodeError:
            raise NoTokensError(Why.UNREADABLE) from None
        ids, found = array("I", before), 0
        for key, piece in zip(keys, pieces, strict=True):
            part = self._cache.get(key)
            if part is None:
                part = Made(self._made(piece, special_tokens=bool(mark)))
                self._cache.put(key, part)
            else:
                found += len(part.ids)
            ids += part.ids
        ids.extend(behind)
        return ids, found

    def _made(self, text: str, *, special_tokens: bool) -> "array[int]":
        # The batch call lets other threads run meanwhile; `encode` does not (0.23).
        return array("I", self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids)


def _loaded(folder: Folder) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(folder.tokenizer))
    except Exception as error:  # noqa: BLE001 -- the library raises nothing more special
        raise ConfigError(f"{folder.tokenizer} cannot be read: {error}: copy the model's own there") from None
    if getattr(tokenizer.model, "dropout", None):
        raise ConfigError(f"{folder.tokenizer} gives other ids each time: remove `dropout`")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _add_tokens(tokenizer, folder)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, folder: Folder) -> None:
    """Add what the configuration lists and `tokenizer.json` lacks, as `transformers` does."""
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    texts = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = [_library_token(token) for token in folder.added]
    missing = [token for token in listed if repr(token) not in known]
    texts |= {token.content for token in missing}
    named = dict.fromkeys(text for text in folder.special.values() if text not in texts)
    tokenizer.add_tokens([*missing, *(AddedToken(text, special=True) for text in named)])


def _library_token(token: Added) -> AddedToken:
    normalized = not token.special if token.normalized is None else token.normalized
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=normalized,
        special=token.special,
    )


def _added(token: AddedToken) -> Added:
    return Added(token.content, token.lstrip, token.rstrip, token.single_word, token.normalized, token.special)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids that the tokenizer puts in front of a text and behind it; None where that cannot be told."""
    found = set()
    for probe in ("a", "b"):
        plain, full = (tokenizer.encode(probe, add_special_tokens=special).ids for special in (False, True))
        at = [i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain]
        if not plain or len(at) != 1:
            return None
        found.add((tuple(full[: at[0]]), tuple(full[at[0] + len(plain) :])))
    if len(found) != 1:
        return None
    before, behind = found.pop()
    return list(before), list(behind)
