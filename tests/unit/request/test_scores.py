"""Reranks and scores: the pairs of texts that an engine reads together."""

from typing import Any

import pytest

from tests.unit.request.calls import RERANK, SCORE, call

QUERY, ONE, TWO = b"\xfdq", b"\xfda", b"\xfdb"


@pytest.mark.parametrize(
    ("documents", "segments"),
    [
        (["a", "b"], (QUERY, ONE, TWO)),
        ([{"text": "a", "title": "t"}, {"text": "b"}], (QUERY, ONE, TWO)),
        ("a", (QUERY, ONE)),
        ([{"content": [{"type": "text", "text": "a"}]}], (QUERY, b"\xfd\xfeta")),
        ([{"title": "a"}], (QUERY, b'\xfd{"title":"a"}')),
    ],
)
def test_a_rerank_is_its_query_and_then_its_documents(documents: object, segments: tuple[bytes, ...]) -> None:
    """Documents may be texts, objects with a text, parts, or objects of the client's own."""
    assert call(RERANK, query="q", documents=documents).segments == segments


@pytest.mark.parametrize(
    ("body", "segments"),
    [
        ({"text_1": "q", "text_2": ["a", "b"]}, (QUERY, ONE, TWO)),
        ({"queries": "q", "documents": ["a", "b"]}, (QUERY, ONE, TWO)),
        ({"queries": ["q"], "items": ["a"]}, (QUERY, ONE)),
        ({"data_1": "q", "data_2": "a"}, (QUERY, ONE)),
        ({"query": "q", "items": ["a", "b"]}, (QUERY, ONE, TWO)),
        ({"query": "q", "items": ["a", "b"], "item_first": True}, (ONE, TWO, QUERY)),
        ({"text_1": ["q", "a"], "text_2": ["a", "b"]}, (QUERY, ONE, ONE, TWO)),
        ({"queries": ["q", "a"], "items": ["a", "b"], "item_first": True}, (ONE, QUERY, TWO, ONE)),
        ({"query": [1], "items": [[2], [3]]}, tuple(b"\xfb\0\0\0" + bytes([at]) for at in (1, 2, 3))),
    ],
)
def test_a_score_is_its_pairs(body: dict[str, Any], segments: tuple[bytes, ...]) -> None:
    """One text against many, or as many against as many, under each engine's names."""
    assert call(SCORE, **body).segments == segments


@pytest.mark.parametrize("path", [RERANK, SCORE])
def test_what_a_score_template_is_told_comes_first(path: str) -> None:
    """The `instruction` of vLLM is a variable of the template, and one that is given there goes before it."""
    body = {"query": "q", "documents": ["a"]}
    short = call(path, **body, instruction="i").segments
    assert short == call(path, **body, chat_template_kwargs={"instruction": "i"}).segments
    assert short == call(path, **body, chat_template_kwargs={"instruction": "i"}, instruction="j").segments
    assert short[1:] == call(path, **body).segments
