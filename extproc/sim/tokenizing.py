"""`/tokenize`, as vLLM and SGLang have it."""

from typing import Any

from extproc.sim.bodies import TokenizeBody
from extproc.sim.refusals import invalid
from extproc.sim.tokens import TOKEN_BYTES, padded, render_chat, to_ids


def tokenized(body: TokenizeBody, longest: int) -> dict[str, Any]:
    """Return the answer to either form of the request.

    Args:
        body: the request.
        longest: the model's context in tokens.

    Raises:
        Refusal: 400, there is neither a prompt nor a chat.
    """
    if body.messages is not None:
        data = render_chat(body.messages, body.tools, generation_prompt=body.add_generation_prompt)
    elif body.prompt is not None:
        data = padded(body.prompt.encode())
    else:
        raise invalid("1 validation error:\n  Field required: prompt or messages")
    ids, strings = to_ids(data), None
    if body.return_token_strs:
        starts = range(0, len(data), TOKEN_BYTES)
        strings = [data[start : start + TOKEN_BYTES].decode("utf-8", "replace") for start in starts]
    return {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings}
