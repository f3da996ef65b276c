"""`/tokenize`, as vLLM and SGLang have it: media are not named, and all have the same tokens."""

import base64
from collections.abc import Sequence
from typing import Any

from extproc.sim.bodies import TokenizeBody
from extproc.sim.refusals import invalid
from extproc.sim.tokens import IMAGE_TOKENS, TOKEN_BYTES, Medium, padded, render, to_ids

_TENSOR = base64.b64encode(bytes(IMAGE_TOKENS * 1536)).decode()


def tokenized(body: TokenizeBody, longest: int) -> dict[str, Any]:
    """Return the answer to either form of the request.

    Args:
        body: the request.
        longest: the model's context in tokens.

    Raises:
        Refusal: 400, there is neither a prompt nor a chat.
    """
    if body.messages is not None:
        data = render(body.messages, body.tools, generation_prompt=body.add_generation_prompt).data
    elif body.prompt is not None:
        data = padded(body.prompt.encode())
    else:
        raise invalid("1 validation error:\n  Field required: prompt or messages")
    ids, strings = to_ids(data), None
    if body.return_token_strs:
        starts = range(0, len(data), TOKEN_BYTES)
        strings = [data[start : start + TOKEN_BYTES].decode("utf-8", "replace") for start in starts]
    return {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings}


def features(media: Sequence[Medium], *, tensors: bool) -> dict[str, Any] | None:
    """Return what vLLM's render route tells of media, by their kinds; None without any.

    Args:
        media: those of the prompt.
        tensors: whether their contents are wanted too: some 0.5 MB each.
    """
    if not media:
        return None
    kinds = list(dict.fromkeys(one.kind for one in media))
    sorted_out = {kind: [one for one in media if one.kind == kind] for kind in kinds}
    return {
        "mm_hashes": {kind: [one.identifier for one in found] for kind, found in sorted_out.items()},
        "mm_placeholders": {
            kind: [{"offset": one.offset, "length": IMAGE_TOKENS} for one in found]
            for kind, found in sorted_out.items()
        },
        "kwargs_data": {kind: [_TENSOR] * len(found) for kind, found in sorted_out.items()} if tensors else None,
        "mm_metadata": None,
    }
