"""Scores of pairs of texts: `/score` and `/v1/score`, in each engine's spelling."""

from typing import Any

from extproc.request.apis.body import Templated
from extproc.request.apis.pairs import pairs_prompt
from extproc.request.prompt import Prompt
from extproc.request.volatile import Rules


class Score(Templated, gc=False):
    """Body of a score. vLLM names the two sides four ways; `query` with `items` is SGLang's."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    query: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    instruction: Any = None
    item_first: Any = None


def score_prompt(body: Score, rules: Rules) -> Prompt:  # noqa: ARG001 -- one signature for all APIs
    """Return the two sides of the pairs to score.

    Raises:
        PromptError: a text is malformed, or the sides differ in length.
    """
    first = _sent(body.text_1, body.queries, body.query, body.data_1)
    second = _sent(body.text_2, body.documents, body.items, body.data_2)
    return pairs_prompt(body, body.instruction, first, second, second_first=body.item_first is True)


def _sent(*values: object) -> object:
    return next((value for value in values if value is not None), None)
