"""Reranking: `/rerank`, `/v1/rerank` and `/v2/rerank`, as Jina, Cohere and the engines have it."""

from typing import Any

from extproc.request.apis.body import Templated
from extproc.request.apis.pairs import pairs_prompt
from extproc.request.prompt import Prompt
from extproc.request.volatile import Rules


class Rerank(Templated, gc=False):
    """Body of a rerank: a query, and documents as texts or objects."""

    query: Any = None
    documents: Any = None
    instruction: Any = None


def rerank_prompt(body: Rerank, rules: Rules) -> Prompt:  # noqa: ARG001 -- one signature for all APIs
    """Return the query and the documents it is paired with.

    Raises:
        PromptError: a query or document is malformed.
    """
    return pairs_prompt(body, body.instruction, body.query, body.documents)
