"""Pairs of texts that are read together: what rerank and score have in common."""

from typing import Any

import msgspec

from extproc.request.apis.body import Templated, templated_lead
from extproc.request.canonical import json_bytes
from extproc.request.media import Room
from extproc.request.message import PromptError
from extproc.request.prompt import Prompt, content_prompt, leading, prompts


def pairs_prompt(
    body: Templated, instruction: object, first: object, second: object, *, second_first: bool = False
) -> Prompt:
    """Return the prompt of one text against many, or of as many against as many.

    An engine reads one prompt a pair: the first text, then the second. Of one text against many the first is counted
    once: the prompts share it, and a body of 5 MB could otherwise ask for gigabytes of segments.

    Args:
        body: what the template needs besides.
        instruction: what vLLM adds to the variables of the template.
        first: a text, token ids, an object, or a list of them; None when not sent.
        second: the same, for the other side.
        second_first: the second text stands before the first in each prompt.

    Raises:
        PromptError: a text is malformed, a side is empty, or the sides differ in length.
    """
    if first is None or second is None:
        return Prompt()
    room = Room()
    ones, others = _texts(first, room), _texts(second, room)
    if len(ones) > 1 and len(ones) != len(others):
        raise PromptError("the sides of the pairs differ in length")
    segments: list[bytes]
    if len(ones) == 1:
        segments = [*others, *ones] if second_first else [*ones, *others]
    else:
        pairs = zip(others, ones, strict=True) if second_first else zip(ones, others, strict=True)
        segments = [text for pair in pairs for text in pair]
    lead = msgspec.structs.replace(templated_lead(body), chat_template_kwargs=_variables(body, instruction))
    return Prompt((*leading(lead), *segments))


def _variables(body: Templated, instruction: object) -> object:
    given: Any = body.chat_template_kwargs
    if instruction is None or not isinstance(given, dict | None):
        return given
    return {"instruction": instruction, **(given or {})}


def _texts(side: object, room: Room) -> list[bytes]:
    if not isinstance(side, list) or (side and isinstance(side[0], int)):
        return [_text(side, room)]
    if not side:
        raise PromptError("one side of the pairs is empty")
    return [_text(item, room) for item in side]


def _text(item: object, room: Room) -> bytes:
    """The segment of a text, of token ids, of `{"text": …}` or of parts `{"content": […]}`; else the object's JSON."""
    if isinstance(item, dict):
        if "content" in item:
            return content_prompt(item["content"], room)
        text = item.get("text")
        item = text if isinstance(text, str) else json_bytes(item).decode()
    return prompts(item)[0]
