"""What is learnt of the lengths of a pool's prompts and answers."""

from collections.abc import Iterator, Sequence

from extproc.state.deltas import Answered, Measured, unpack
from extproc.state.learn import OutputLengths, PromptRatios, TokenEstimator
from extproc.state.learnt import PoolLearnt
from extproc.state.turns import AnswerReuse


class Lengths:
    """Lengths in one pool.

    Args:
        bytes_per_token: prompt bytes a token stands for before anything was seen.

    Attributes:
        tokens: bytes of a token in the pool.
        reuse: share of an answer that the next turn finds.
    """

    def __init__(self, bytes_per_token: float) -> None:
        self.tokens = TokenEstimator(bytes_per_token)
        self.reuse = AnswerReuse()
        self._ratios = PromptRatios()
        self._outputs = OutputLengths()

    def bytes_per_token_of(self, blocks: Sequence[int]) -> float:
        """Prompt bytes a token stands for in this prompt: as in one that began like it, else as in the pool."""
        return self._ratios.of(blocks) or self.tokens.bytes_per_token

    def expected_output(self, blocks: Sequence[int], max_tokens: int | None) -> float:
        """Tokens expected of one answer: as of prompts that begin alike, else as of the pool; at most `max_tokens`."""
        return self._outputs.expected(blocks, max_tokens)

    def answered(self, answer: Answered) -> None:
        """Learn from an answer, whatever prompt it was to."""
        self.tokens.observe(answer.prompt_bytes, answer.prompt_tokens)
        self._outputs.observe(answer.output_tokens)

    def measured(self, delta: Measured) -> None:
        """Learn of a prompt, for those that begin like it."""
        blocks = unpack(delta.blocks)
        self._ratios.observe(blocks, delta.bytes_per_token)
        self._outputs.observe_at(blocks, delta.output_tokens)

    def learnt(self) -> PoolLearnt:
        """What is known, for another worker to go on from."""
        return PoolLearnt(
            tokens=self.tokens.sums,
            reuse=self.reuse.share,
            output=self._outputs.pool,
            ratios=dict(self._ratios.known),
            outputs=dict(self._outputs.known),
        )

    def resume(self, learnt: PoolLearnt) -> Iterator[None]:
        """Go on from what another worker knew, in steps of some 0.1 ms."""
        self.tokens.resume(learnt.tokens)
        self.reuse.resume(learnt.reuse)
        yield from self._outputs.resume(learnt.output, learnt.outputs)
        yield from self._ratios.resume(learnt.ratios)
