"""Where an answer began that a prompt ends in, so that an engine asked to go on says what it would have said.

An answer follows from the whole prompt in front of it (`tokens.answer`). A prompt that holds the beginning of such an
answer is continued with the rest of it, as a model at temperature 0 does.
"""

import xxhash

from extproc.sim.tokens import ANSWER_HEADER, SYLLABLES, TOKEN_BYTES, answer, answer_from

_FARTHEST = 4096
"""Tokens that are looked through for the beginning of an answer in a prompt without the header of one."""


def said(prompt: bytes, *, seed: int = 0) -> int:
    """Return how many tokens at the end of `prompt` are the answer to what stands in front of them; 0 for none.

    Args:
        prompt: whole tokens.
        seed: as for `answer`.
    """
    header = prompt.rfind(ANSWER_HEADER)
    if header >= 0 and not header % TOKEN_BYTES:
        return _if_said(prompt, header + len(ANSWER_HEADER), seed)
    first = _first_syllable(prompt)
    if first == len(prompt):
        return 0
    state = xxhash.xxh3_128(prompt[:first], seed=seed & 0xFFFF_FFFF_FFFF_FFFF)
    for start in range(first, len(prompt), TOKEN_BYTES):
        token = prompt[start : start + TOKEN_BYTES]
        if answer_from(state.digest(), 1) == token and (length := _if_said(prompt, start, seed)):
            return length
        state.update(token)
    return 0


def _if_said(prompt: bytes, start: int, seed: int) -> int:
    length = (len(prompt) - start) // TOKEN_BYTES
    return length if answer(prompt[:start], length, seed=seed) == prompt[start:] else 0


def _first_syllable(prompt: bytes) -> int:
    """Where the tokens begin, at the end of a prompt, that are all of the kind that answers are made of."""
    start = len(prompt)
    last = max(0, start - _FARTHEST * TOKEN_BYTES)
    while start > last and prompt[start - TOKEN_BYTES : start] in SYLLABLES:
        start -= TOKEN_BYTES
    return start


def rest(prompt: bytes, begun: int, tokens: int, *, choice: int = 0, seed: int = 0) -> bytes:
    """Return the `tokens` tokens that follow `begun` tokens of an answer at the end of `prompt`."""
    size = begun * TOKEN_BYTES
    return answer(prompt[: len(prompt) - size], begun + tokens, choice=choice, seed=seed)[size:]
