"""What finished requests teach of prompts: how many bytes a token stands for, how long answers get.

Pure estimators fed with observations in any order; every worker sees the same observations through the feed
and so comes to the same numbers.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

_LEAST_BYTES_PER_TOKEN, _MOST_BYTES_PER_TOKEN = 0.25, 64.0
_REMEMBERED = 32_768

PRIOR_OUTPUT = 256.0
"""Tokens of an answer before any was seen."""
_PRIOR_ANSWERS = 8
_FEW_ANSWERS = 4
_GAIN = 1 / 64
_STEP = 256
"""Blocks that are taken over from another worker at a time."""


class TokenEstimator:
    """Prompt bytes a token, as a ratio of decayed sums so that long prompts weigh more than short ones."""

    _DECAY = 0.98

    def __init__(self, prior: float, prior_tokens: float = 2000.0) -> None:
        self._bytes = prior * prior_tokens
        self._tokens = prior_tokens

    def observe(self, prompt_bytes: float, prompt_tokens: float) -> None:
        """Add one answer whose `usage` told its prompt tokens.

        One that no text can have is passed over: the sums would remember a broken usage for hundreds of answers, and
        profiles are cut to what the ratio says an engine can hold.
        """
        least, most = _LEAST_BYTES_PER_TOKEN * prompt_tokens, _MOST_BYTES_PER_TOKEN * prompt_tokens
        if 0.0 < least <= prompt_bytes <= most < math.inf:
            self._bytes = self._bytes * self._DECAY + prompt_bytes
            self._tokens = self._tokens * self._DECAY + prompt_tokens

    @property
    def sums(self) -> tuple[float, float]:
        """Bytes and tokens seen, decayed; another worker's estimator goes on from them."""
        return self._bytes, self._tokens

    def resume(self, sums: tuple[float, float]) -> None:
        """Go on from another's sums; what no text can have is passed over as in `observe`."""
        seen, tokens = sums
        if 0.0 < _LEAST_BYTES_PER_TOKEN * tokens <= seen <= _MOST_BYTES_PER_TOKEN * tokens < math.inf:
            self._bytes, self._tokens = seen, tokens

    @property
    def bytes_per_token(self) -> float:
        """Current ratio, kept between 0.25 and 64."""
        return plausible(self._bytes / self._tokens)


class PromptRatios:
    """Bytes a token of answered prompts, found again by the prompts that begin like them.

    One ratio for a whole pool is a mean over prose, code and JSON: measured on vLLM, a second turn about 4 KB of
    source code was predicted 1,248 cached tokens where 1,792 were, and 1,728 with the ratio of its own first turn.

    A ratio is kept at the last block of its prompt, for the turns that follow, and at blocks 1, 2, 4, 8, ...,
    for prompts that share only a beginning with it. The ratios used least recently are forgotten.
    """

    def __init__(self, limit: int = _REMEMBERED) -> None:
        """`limit` is the number of blocks that carry a ratio."""
        self._limit = limit
        self._ratios: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ratios)

    def observe(self, blocks: Iterable[int], bytes_per_token: float) -> None:
        """Keep a ratio at these blocks, the `marks` of an answered prompt."""
        if not _LEAST_BYTES_PER_TOKEN <= bytes_per_token <= _MOST_BYTES_PER_TOKEN:
            return
        for block in blocks:
            self._ratios[block] = bytes_per_token
            self._ratios.move_to_end(block)
        while len(self._ratios) > self._limit:
            self._ratios.popitem(last=False)

    @property
    def known(self) -> Mapping[int, float]:
        """Ratio by block, those used longest ago first."""
        return self._ratios

    def resume(self, known: Mapping[int, float]) -> Iterator[None]:
        """Go on from what another worker knew, in steps."""
        self._ratios.clear()
        for number, (block, ratio) in enumerate(known.items()):
            if ratio > 0.0:
                self.observe((block,), ratio)
            if number % _STEP == 0:
                yield

    def of(self, blocks: Sequence[int]) -> float | None:
        """The ratio of the answered prompt that shares most blocks with this one; None when none begins like it."""
        # Every kept prompt marked its first block, so a prompt that is new to the pool costs one look-up.
        if not blocks or blocks[0] not in self._ratios:
            return None
        return next(self._ratios[block] for block in reversed(blocks) if block in self._ratios)


_MOST_OUTPUT = 1e6
"""Longest answer that is believed; anything above it is a broken usage, and would be remembered for hours."""


class OutputLengths:
    """Mean tokens of an answer: of prompts that begin alike, and of the pool.

    Kept at the `marks` of answered prompts, like their ratios. One answer says little of the next, so a beginning
    counts from its fourth answer on; until then a shorter beginning, and in the end the pool, stands in.
    """

    def __init__(self, limit: int = _REMEMBERED) -> None:
        """`limit` is the number of blocks that carry a mean."""
        self._limit = limit
        self._means: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._pool = (PRIOR_OUTPUT, _PRIOR_ANSWERS)

    def __len__(self) -> int:
        return len(self._means)

    @property
    def pool(self) -> tuple[float, int]:
        """Mean of the pool, and of how many answers."""
        return self._pool

    @property
    def known(self) -> Mapping[int, tuple[float, int]]:
        """Mean and number of answers by block, those used longest ago first."""
        return self._means

    def resume(self, pool: tuple[float, int], known: Mapping[int, tuple[float, int]]) -> Iterator[None]:
        """Go on from what another worker knew, in steps."""
        if _is_mean(*pool):
            self._pool = pool
        self._means.clear()
        for number, (block, mean) in enumerate(known.items()):
            if _is_mean(*mean):
                self._means[block] = mean
            if number % _STEP == 0:
                yield
        while len(self._means) > self._limit:
            self._means.popitem(last=False)

    def observe(self, output_tokens: float) -> None:
        """Add one answer of the pool; an unknown length is passed over."""
        if 0.0 <= output_tokens <= _MOST_OUTPUT:
            self._pool = _averaged(self._pool, output_tokens)

    def observe_at(self, blocks: Iterable[int], output_tokens: float) -> None:
        """Add one answer to what is known at these blocks, the `marks` of its prompt."""
        if not 0.0 <= output_tokens <= _MOST_OUTPUT:
            return
        for block in blocks:
            self._means[block] = _averaged(self._means.get(block, (0.0, 0)), output_tokens)
            self._means.move_to_end(block)
        while len(self._means) > self._limit:
            self._means.popitem(last=False)

    def expected(self, blocks: Sequence[int], max_tokens: int | None) -> float:
        """Tokens expected of one answer to this prompt, never more than the client asks for."""
        most = math.inf if max_tokens is None else float(max(max_tokens, 0))
        known = (self._means.get(block, (0.0, 0)) for block in reversed(marks(blocks)))
        return min(most, next((mean for mean, answers in known if answers >= _FEW_ANSWERS), self._pool[0]))


def _is_mean(mean: float, count: int) -> bool:
    return 0.0 <= mean <= _MOST_OUTPUT and count > 0


def _averaged(known: tuple[float, int], value: float) -> tuple[float, int]:
    """The plain mean of the first 64 values, an exponential one from there on."""
    mean, count = known
    return mean + max(1.0 / (count + 1), _GAIN) * (value - mean), count + 1


def marks(blocks: Sequence[int]) -> Sequence[int]:
    """The blocks of a prompt that carry its ratio: 1, 2, 4, 8, ... and the last."""
    depths = {1 << power for power in range(len(blocks).bit_length())} | {len(blocks)}
    return [blocks[depth - 1] for depth in sorted(depths)] if blocks else []


def plausible(bytes_per_token: float) -> float:
    """Keep a ratio where text can have it: a broken usage must not make a prompt look empty or endless."""
    return min(max(bytes_per_token, _LEAST_BYTES_PER_TOKEN), _MOST_BYTES_PER_TOKEN)
