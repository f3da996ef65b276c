"""How alike two answers to one request are. Pure: values in, a value out.

Nothing of a comparison is text: numbers, and hashes under a key. Two answers are compared if both came whole, in an API
that is compared, with one choice each. Requests for several answers at once are not compared: they are drawn at random,
so pairing the first with the first says nothing.
"""

import hashlib
import re
from typing import Final, Literal

import msgspec
from rapidfuzz.distance import Levenshtein

from extproc.shadow.answer import Answer, Flaw
from extproc.shadow.refusals import refuses

LONGEST: Final = 8_000
"""Characters of each text, from its beginning, whose edit distance is taken.

rapidfuzz 3.14 holds the interpreter meanwhile: 0.07 ms for two unlike texts of 1,000 characters, 0.6 ms for 4,000, 2.1
ms for 8,000, 13 ms for 20,000."""
_DIGEST_BYTES: Final = 12
_MOST_KEY_BYTES: Final = 64

Outcome = Literal["compared", "primary_failed", "shadow_failed", "both_failed", "unfit"]
"""What became of a comparison. `unfit`: an answer is too long to be kept, or has several choices."""


class Settings(msgspec.Struct, frozen=True):
    """What comparing needs.

    Attributes:
        key: key of the hashes of texts; empty leaves hashes out.
        refusals: what answers that refuse begin with; see `refusals.compiled`.
        longest: characters of each text whose edit distance is taken.
    """

    key: bytes
    refusals: tuple[re.Pattern[str], ...]
    longest: int = LONGEST


class Side(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the two answers, in numbers. Times are seconds since its request was sent.

    Attributes:
        status: HTTP status; 0 when none came.
        flaw: see `answer.Flaw`.
        finish: why the engine ended, as it says it.
        tokens: generated tokens; None when the engine does not tell and the answer did not stream.
        counted: whether `tokens` are events of the stream, for want of better.
        characters: of its text.
        reasoning: characters of its reasoning.
        tools: number of tool calls.
        refused: whether it refuses.
        ttft_s: time to its first token, if it streamed.
        tpot_s: time of each further token, if it streamed.
        duration_s: time to its end.
        digest: hash of text and tool calls, under a key.
    """

    status: int
    flaw: Flaw = ""
    finish: str = ""
    tokens: int | None = None
    counted: bool = False
    characters: int = 0
    reasoning: int = 0
    tools: int = 0
    refused: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    duration_s: float = 0.0
    digest: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Two answers side by side. All but `outcome` and the sides is None unless both could be compared.

    Attributes:
        outcome: whether they could be.
        primary: the client's answer.
        shadow: the other one.
        exact: texts and tool calls are the same.
        similarity: 1 - Levenshtein distance / length of the longer text, in characters: 1 for equal texts.
        partial: only the beginnings of the texts were aligned, since they are long.
        differs_at: characters that both texts begin with, where they differ.
        characters_ratio: characters of the shadow's text by those of the client's; None also where that is empty.
        tokens_ratio: the same of tokens, where both are known in the same way.
        same_finish: both ended for the same reason.
        same_tools: the same tools are called in the same order with the same arguments.
        meaning: cosine of the embeddings of both texts; None where it is not asked for, or could not be had.
    """

    outcome: Outcome
    primary: Side
    shadow: Side
    exact: bool | None = None
    similarity: float | None = None
    partial: bool = False
    differs_at: int | None = None
    characters_ratio: float | None = None
    tokens_ratio: float | None = None
    same_finish: bool | None = None
    same_tools: bool | None = None
    meaning: float | None = None


def compared(primary: Answer, shadow: Answer, settings: Settings) -> Comparison:
    """Compare the client's answer with the shadow's. Takes 15 to 50 µs and an edit distance, see `LONGEST`."""
    counted = primary.tokens is None or shadow.tokens is None
    ours, theirs = _side(primary, settings, counted=counted), _side(shadow, settings, counted=counted)
    outcome = _outcome(primary, shadow)
    if outcome != "compared":
        return Comparison(outcome=outcome, primary=ours, shadow=theirs)
    same_text, same_tools = primary.text == shadow.text, primary.tools == shadow.tools
    return Comparison(
        outcome=outcome,
        primary=ours,
        shadow=theirs,
        exact=same_text and same_tools,
        similarity=1.0 if same_text else similarity(primary.text, shadow.text, settings.longest),
        partial=not same_text and max(len(primary.text), len(shadow.text)) > settings.longest,
        differs_at=None if same_text else common(primary.text, shadow.text),
        characters_ratio=_ratio(ours.characters, theirs.characters),
        tokens_ratio=_ratio(ours.tokens, theirs.tokens),
        same_finish=primary.finish == shadow.finish,
        same_tools=same_tools,
    )


def similarity(one: str, other: str, longest: int = LONGEST) -> float:
    """1 - Levenshtein distance / length of the longer text; of both no more than the first `longest` characters.

    Texts that are longer count as alike as their beginnings; one that goes on alone beyond them as if it ended there.
    """
    return float(Levenshtein.normalized_similarity(one[:longest], other[:longest]))


def common(one: str, other: str) -> int:
    """Characters that two texts both begin with, found by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def digest(key: bytes, *texts: str) -> str:
    """Hash of texts under a key, 24 hexadecimal digits; empty without a key. No two lists of texts are taken for one.

    Who reads hashes cannot find out by trying whether a text is among them, unless they know the key.
    """
    if not key:
        return ""
    used = key if len(key) <= _MOST_KEY_BYTES else hashlib.blake2b(key).digest()
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=used, person=b"warmpath-shadow")
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        state.update(len(encoded).to_bytes(8, "big"))
        state.update(encoded)
    return state.hexdigest()


def _outcome(primary: Answer, shadow: Answer) -> Outcome:
    if "too_long" in (primary.flaw, shadow.flaw) or max(primary.choices, shadow.choices) > 1:
        return "unfit"
    match bool(primary.flaw), bool(shadow.flaw):
        case True, True:
            return "both_failed"
        case True, False:
            return "primary_failed"
        case False, True:
            return "shadow_failed"
    return "compared"


def _side(answer: Answer, settings: Settings, *, counted: bool) -> Side:
    """An answer in numbers; `counted` takes events for tokens, so that both sides are counted in the same way."""
    calls = [part for call in answer.tools for part in (call.name, call.arguments)]
    return Side(
        status=answer.status,
        flaw=answer.flaw,
        finish=answer.finish,
        tokens=(answer.events or None) if counted else answer.tokens,
        counted=counted and answer.events > 0,
        characters=len(answer.text),
        reasoning=answer.reasoning,
        tools=len(answer.tools),
        refused=answer.refused or refuses(answer.text, settings.refusals),
        ttft_s=answer.ttft_s,
        tpot_s=answer.tpot_s,
        duration_s=answer.duration_s,
        digest=digest(settings.key, answer.text, *calls) if answer.complete else "",
    )


def _ratio(primary: int | None, shadow: int | None) -> float | None:
    return shadow / primary if primary and shadow is not None else None
