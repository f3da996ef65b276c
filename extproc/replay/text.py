"""Rows as real requests: the same block always becomes the same text, so any router and any engine sees the sharing.

A token is four bytes of text, as the simulated engines have it; an engine with a real tokenizer sees other counts
and the same sharing. What a chat adds around the text in front of the first message is the same for all requests:
it shifts where an engine's blocks begin and parts nothing that the row's blocks have in common.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from extproc.replay.rows import Row, Trace
from extproc.sim.tokens import answer

SESSION_HEADER = "x-session-id"


def messages(trace: Trace, index: int, answers: Mapping[int, str]) -> list[dict[str, str]]:
    """Return the `messages` of a row's chat.

    A row that continues another one's prompt sends its messages again, then the answer that it got if the row's
    history holds answers, then a message with what is new. Any other row is one message of the user.

    Args:
        trace: where the row stands.
        index: which row.
        answers: texts that the engine answered earlier rows with, by index; one that never came is left out, as a
            client would leave it out.
    """
    rows = trace.rows
    line = [index]
    while (before := rows[line[-1]].after) >= 0 and _continues(rows[before], rows[line[-1]]):
        line.append(before)
    line.reverse()
    history = [_said("user", _opening(trace, line[0]))]
    for before, now in pairwise(line):
        fresh = rows[now].prompt_tokens - rows[before].prompt_tokens
        if _keeps_answer(rows[before], rows[now]):
            fresh -= rows[before].output_tokens
            if text := answers.get(before):
                history.append(_said("assistant", text))
        history.append(_said("user", answer(_own(trace, now), max(1, fresh)).decode()))
    return history


def body(trace: Trace, index: int, answers: Mapping[int, str], model: str) -> bytes:
    """Return the body of a row's `POST /v1/chat/completions`.

    The answer's length is the row's: `max_tokens` is set to it, and `ignore_eos` keeps engines that know the field
    (vLLM, SGLang, the simulator) from ending sooner.

    Args:
        trace: where the row stands.
        index: which row.
        answers: as in `messages`.
        model: model name to ask for.
    """
    row = trace.rows[index]
    fields: dict[str, object] = {
        "model": model,
        "messages": messages(trace, index, answers),
        "max_tokens": row.output_tokens,
        "ignore_eos": True,
        "stream": row.stream,
    }
    if row.n > 1:
        fields["n"] = row.n
    return msgspec.json.encode(fields)


def headers(row: Row) -> dict[str, str]:
    """Return the request headers that a row's client sends of its own accord."""
    return {SESSION_HEADER: row.session} if row.session else {}


def _opening(trace: Trace, index: int) -> str:
    row = trace.rows[index]
    size = trace.block_tokens
    texts = [answer(block.to_bytes(8, "big"), size) for block in row.blocks]
    # No row shares a block that is not full, so the rest is the row's own.
    texts.append(answer(_own(trace, index), row.prompt_tokens - len(row.blocks) * size))
    return b"".join(texts).decode()


def _own(trace: Trace, index: int) -> bytes:
    return f"{trace.name}\0{index}".encode()


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _continues(before: Row, row: Row) -> bool:
    """Tell whether the prompt of `before` is the beginning of the row's; agents also shorten their histories."""
    return row.prompt_tokens > before.prompt_tokens and _begins(row.blocks, before.blocks)


def _keeps_answer(before: Row, row: Row) -> bool:
    if before.answer_blocks:
        return _begins(row.blocks[len(before.blocks) :], before.answer_blocks)
    return row.prompt_tokens > before.prompt_tokens + before.output_tokens


def _begins(blocks: Sequence[int], beginning: Sequence[int]) -> bool:
    return tuple(blocks[: len(beginning)]) == tuple(beginning)
