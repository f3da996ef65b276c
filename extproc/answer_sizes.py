"""Output tokens of an answer that came without usage, counted from the bytes that Envoy saw of it.

An engine streams one event for each token, or for the few that came together, and each repeats the same frame around
its text; a whole answer is one frame around all. So bytes grow with tokens in a straight line, whose two numbers are
learnt from answers of the same form whose engine did report usage.
"""

from typing import Final

_LEAST_SEEN: Final = 8
"""Answers that must have been seen before one is counted by them."""
_KEEP: Final = 0.99
"""Weight that each further answer leaves to those before it: about the last hundred count."""

Form = tuple[str, str, bool]
"""Pool, API, and whether the answer was streamed: what the frame depends on."""


class AnswerSizes:
    """Bytes of answers by their tokens, in one process."""

    def __init__(self) -> None:
        self._lines: dict[Form, _Line] = {}

    def learn(self, form: Form, size: int, tokens: int) -> None:
        """Take in a whole answer whose engine told its tokens.

        Args:
            form: the answer's form; a small closed set.
            size: bytes of its body; not positive counts as unknown.
            tokens: output tokens of all its choices; not positive counts as unknown.
        """
        if size > 0 and tokens > 0:
            self._lines.setdefault(form, _Line()).add(float(tokens), float(size))

    def tokens(self, form: Form, size: int) -> float:
        """Output tokens that an answer of so many bytes stands for; -1 when too few of its form were seen."""
        line = self._lines.get(form)
        return line.tokens(float(size)) if line is not None and size > 0 else -1.0


class _Line:
    """Least squares over answers whose weight falls with each further one."""

    __slots__ = ("_answers", "_seen", "_size", "_size_tokens", "_square", "_tokens")

    def __init__(self) -> None:
        self._answers = 0
        self._seen = self._tokens = self._size = self._square = self._size_tokens = 0.0

    def add(self, tokens: float, size: float) -> None:
        self._answers += 1
        self._seen = self._seen * _KEEP + 1.0
        self._tokens = self._tokens * _KEEP + tokens
        self._size = self._size * _KEEP + size
        self._square = self._square * _KEEP + tokens * tokens
        self._size_tokens = self._size_tokens * _KEEP + size * tokens

    def tokens(self, size: float) -> float:
        if self._answers < _LEAST_SEEN:
            return -1.0
        tokens, mean = self._tokens / self._seen, self._size / self._seen
        spread = self._square / self._seen - tokens * tokens
        together = self._size_tokens / self._seen - mean * tokens
        # Answers of one length show no line, and noise may tilt it: the mean of bytes by tokens stands in.
        a_token = together / spread if spread > tokens else 0.0
        if not 0.0 < a_token <= mean / tokens:
            return size / (mean / tokens)
        return max(0.0, tokens + (size - mean) / a_token)
