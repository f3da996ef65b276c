"""Completions of plain prompts: `/v1/completions`."""

from typing import Any

from extproc.request.apis.body import Tokenized, tokenized_lead
from extproc.request.prompt import Prompt, leading, prompts
from extproc.request.volatile import Rules


class Completion(Tokenized, gc=False):
    """Body of a completion."""

    prompt: Any = None


def completion_prompt(body: Completion, rules: Rules) -> Prompt:  # noqa: ARG001 -- one signature for all APIs
    """Return the prompts of a completion: a text, token ids, or a list of either.

    Raises:
        PromptError: the prompt is malformed.
    """
    if body.prompt is None:
        return Prompt()
    return Prompt((*leading(tokenized_lead(body, special_tokens=True)), *prompts(body.prompt)))
