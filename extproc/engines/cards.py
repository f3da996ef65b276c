"""`GET /v1/models`: served models, LoRA adapters, and which kind of engine says that it owns them."""

from typing import Final

import msgspec

from extproc.config_pools import EngineKind
from extproc.engines.numbers import MOST_NAMES, decoded, named, rows, table
from extproc.errors import EngineError

MODELS_PAGE: Final = "/v1/models"
"""All kinds have it. vLLM and SGLang ask for their API key there when they were given one."""

_OWNERS: Final[dict[str, EngineKind]] = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt_llm"}
"""Kinds by what their cards have as `owned_by`: vLLM `entrypoints/openai/engine/protocol.py`, SGLang
`srt/entrypoints/openai/protocol.py`, TensorRT-LLM `serve/openai_protocol.py`."""


class Cards(msgspec.Struct, frozen=True, gc=False):
    """A list of models.

    Attributes:
        models: ids of the cards without a parent.
        adapters: ids of the cards with one: LoRA adapters that were loaded and not unloaded, whether they have requests
            or not.
        kind: engine that the first card names as its owner; `auto` when it is none that is known.
    """

    models: tuple[str, ...]
    adapters: tuple[str, ...]
    kind: EngineKind


def cards(page: bytes) -> Cards:
    """Read a list of models.

    Raises:
        EngineError: it is too long, no JSON, or no list of models.
    """
    answer = table(decoded(page))
    if not isinstance(answer.get("data"), list):
        raise EngineError("the list of models has no `data`", "other_kind")
    found = [card for card in rows(answer["data"]) if named(card, "id")]
    return Cards(
        models=tuple(named(card, "id") for card in found if not card.get("parent"))[:MOST_NAMES],
        adapters=tuple(named(card, "id") for card in found if card.get("parent"))[:MOST_NAMES],
        kind=_OWNERS.get(named(found[0], "owned_by"), "auto") if found else "auto",
    )
