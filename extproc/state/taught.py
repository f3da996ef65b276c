"""What one answer teaches beside its endpoint's profile, as the deltas that other replicas need."""

from collections.abc import Sequence

from extproc.state.feed import Answered, Measured, Turned, pack
from extproc.state.learn import marks


def tells_only_who(answer: Answered) -> bool:
    """Whether the data plane told who serves, before the access log tells the rest."""
    return answer.prompt_bytes < 0 and answer.prompt_tokens < 0 and answer.ttft_s < 0


def measured(answer: Answered, blocks: Sequence[int]) -> Measured | None:
    """Lengths of a prompt and its answer, for prompts that begin like it; None when neither is known."""
    known = answer.prompt_bytes > 0 and answer.prompt_tokens > 0
    if not blocks or not (known or answer.output_tokens >= 0):
        return None
    ratio = answer.prompt_bytes / answer.prompt_tokens if known else -1.0
    return Measured(pack(marks(blocks)), ratio, answer.output_tokens)


def turned(answer: Answered, turn: bytes, started_at: float) -> Turned | None:
    """The turn of a conversation that was answered; None when nobody answered, or the lengths are unknown.

    Args:
        answer: the answer.
        turn: digest of the conversation; empty for none.
        started_at: start of the engine that answered.
    """
    if not (turn and answer.endpoint and answer.prompt_tokens > 0 and answer.output_tokens >= 0):
        return None
    return Turned(turn, answer.endpoint, answer.prompt_tokens, answer.output_tokens, started_at)
