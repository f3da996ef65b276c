"""Embeddings: `/v1/embeddings`, of texts, token ids or conversations."""

from typing import Any

import msgspec

from extproc.request.apis.body import tokenized_lead
from extproc.request.apis.chat import Chat, chat_prompt
from extproc.request.prompt import Prompt, leading, prompts
from extproc.request.volatile import Rules


class Embedding(Chat, gc=False):
    """Body of an embedding: an `input`, or the messages of a conversation (vLLM)."""

    input: Any = None


def embedding_prompt(body: Embedding, rules: Rules) -> Prompt:
    """Return what is embedded. A conversation is one prompt that no later request continues.

    Raises:
        PromptError: the input or the messages are malformed.
    """
    if body.input is None:
        return msgspec.structs.replace(chat_prompt(body, rules), conversation=False, answered=0)
    return Prompt((*leading(tokenized_lead(body, special_tokens=True)), *prompts(body.input)))
