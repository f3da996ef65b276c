"""What is replayed, whatever file or generator it came from: requests as lengths and chained block hashes."""

from collections.abc import Sequence

import msgspec


class Row(msgspec.Struct, frozen=True, gc=False):
    """One request of a trace. Prompts are known by their blocks alone; no text is kept.

    Attributes:
        at_s: arrival in seconds from the start of the trace; with `after`, seconds between the end of that row's
            answer and this request (think time).
        after: index of the row whose answer this one waits for, always smaller than its own; -1 for none.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: what the engine generates for each answer, at least 1.
        blocks: chained unsigned 64-bit hashes of the `prompt_tokens // block_tokens` full blocks of the prompt.
        answer_blocks: the full blocks, chained on, that prompt and answer together have beyond `blocks`; empty when
            the trace does not tell.
        session: session id that the client sends; empty for none.
        turn: identity of the conversation so far, as `extproc.request.model.Request` has it; empty when the trace
            knows of no conversations.
        follows: the `turn` that this one continues; empty for a first turn.
        max_tokens: limit that the client sets on the answer; None for none.
        n: answers asked for.
        stream: whether the client asks for a streamed answer.
    """

    at_s: float
    after: int
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    answer_blocks: Sequence[int] = ()
    session: str = ""
    turn: bytes = b""
    follows: bytes = b""
    max_tokens: int | None = None
    n: int = 1
    stream: bool = True


class Trace(msgspec.Struct, frozen=True):
    """Requests in the order they are expected, and the block size their hashes stand for.

    Rows without `after` arrive in ascending order; every other row stands behind the one it waits for, so any
    beginning of the list is a trace of its own.

    Attributes:
        name: file or workload it came from.
        block_tokens: tokens of one block of `Row.blocks`.
        rows: the requests.
    """

    name: str
    block_tokens: int
    rows: list[Row]

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.rows)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests together."""
        return sum(row.prompt_tokens for row in self.rows)

    @property
    def output_tokens(self) -> int:
        """Generated tokens of all requests together, each of a request's `n` answers counted."""
        return sum(row.output_tokens * row.n for row in self.rows)

    @property
    def ideal_cached_share(self) -> float:
        """Share of prompt tokens that a single engine with an endless cache finds cached, answers included.

        An engine computes the last token of a prompt in any case, or it would have nothing to answer from; so the
        block it stands in is not counted.
        """
        seen: set[int] = set()
        cached = 0
        for row in self.rows:
            known = leading(row.blocks, seen)
            cached += min(known, (row.prompt_tokens - 1) // self.block_tokens) * self.block_tokens
            seen.update(row.blocks)
            seen.update(row.answer_blocks)
        return cached / total if (total := self.prompt_tokens) else 0.0


def leading(blocks: Sequence[int], known: set[int]) -> int:
    """Return how many blocks at the beginning of `blocks` are known."""
    return next((n for n, block in enumerate(blocks) if block not in known), len(blocks))
