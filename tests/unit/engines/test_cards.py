"""Lists of models: what is a model, what is an adapter, and who owns them."""

import json
from typing import Any

import pytest

from extproc.engines.cards import Cards, cards
from extproc.engines.detect import all_adapters, candidates
from extproc.errors import EngineError


def read(*rows: object) -> Cards:
    """A list of these cards."""
    return cards(json.dumps({"object": "list", "data": rows}).encode())


def test_cards_with_a_parent_are_adapters() -> None:
    """An adapter is resident from when it was loaded, whether it has requests or not."""
    base: dict[str, Any] = {"id": "base", "owned_by": "vllm", "parent": None}
    assert read(base, {"id": "sql", "parent": "base"}, {"id": "alias"}) == Cards(("base", "alias"), ("sql",), "vllm")


@pytest.mark.parametrize(
    ("owner", "kind"),
    [("vllm", "vllm"), ("sglang", "sglang"), ("tensorrt_llm", "tensorrt_llm"), ("openai", "auto"), (None, "auto")],
)
def test_the_first_card_names_the_owner(owner: str | None, kind: str) -> None:
    """Only names that engines are known to use for themselves count."""
    assert read({"id": "m", "owned_by": owner}).kind == kind


def test_cards_that_cannot_be_used_are_left_out() -> None:
    """No id, an id that is none, or one that is too long."""
    assert read({}, {"id": 3}, {"id": ""}, {"id": "x" * 300}, None, {"id": "m"}).models == ("m",)


def test_a_list_of_no_models_names_nobody() -> None:
    """An engine that serves nothing yet."""
    assert read() == Cards((), (), "auto")


def test_very_many_adapters_are_cut() -> None:
    """Names are published with every scrape."""
    assert len(read(*({"id": str(number), "parent": "m"} for number in range(5000))).adapters) == 1024


@pytest.mark.parametrize(
    "page", [b"", b"[]", b'{"data": null}', b'{"error": "Unauthorized"}', b"\xff", b'{"data":' * 9999]
)
def test_a_page_that_is_no_list_is_refused(page: bytes) -> None:
    """Errors in JSON, HTML and the like."""
    with pytest.raises(EngineError):
        cards(page)


def test_the_owner_comes_first_and_a_configured_kind_stands_alone() -> None:
    """The owner decides the order alone; what is configured is not doubted."""
    adapters = all_adapters()
    assert [each.kind for each in candidates(adapters, "auto")] == ["vllm", "sglang", "tensorrt_llm"]
    assert [each.kind for each in candidates(adapters, "auto", "sglang")] == ["sglang", "vllm", "tensorrt_llm"]
    assert [each.kind for each in candidates(adapters, "sglang", "vllm")] == ["sglang"]
