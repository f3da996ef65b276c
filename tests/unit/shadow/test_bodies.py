"""The body of a shadow: what the client sent, without names, and only where answers can be compared."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.shadow.bodies import LONGEST, model_of, shadow_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.0}


def sent(api: str = "chat", **more: Any) -> dict[str, Any] | None:
    """What the shadow gets of a chat with more fields."""
    body = shadow_body(json.dumps({**CHAT, **more}).encode(), api)
    return None if body is None else json.loads(body)


def test_a_plain_body_stays_byte_for_byte() -> None:
    """What needs no change is not copied."""
    body = json.dumps(CHAT, indent=3).encode()
    assert shadow_body(body, "chat") is body


@pytest.mark.parametrize(
    "field",
    ["user", "safety_identifier", "prompt_cache_key", "metadata", "request_id", "session_id", "kv_transfer_params"],
)
def test_what_names_somebody_stays_out(field: str) -> None:
    """Users, sessions and ids are nobody's business at the shadow."""
    assert sent(**{field: "alice"}) == CHAT


def test_a_response_is_not_kept_at_the_shadow() -> None:
    """A stored response would take memory that nobody frees."""
    assert sent("responses") == {**CHAT, "store": False}
    assert sent("responses", store=True, request_id="resp_1") == {**CHAT, "store": False}


@pytest.mark.parametrize(
    ("api", "more"),
    [
        ("responses", {"previous_response_id": "resp_1"}),
        ("responses", {"conversation": "c"}),
        ("responses", {"background": True}),
        ("chat", {"n": 2}),
        ("completion", {"best_of": 3}),
        ("chat", {"n": "two"}),
    ],
)
def test_what_cannot_be_compared_has_no_shadow(api: str, more: dict[str, Any]) -> None:
    """Several answers, and those that follow from what one engine keeps."""
    assert sent(api, **more) is None


@pytest.mark.parametrize("more", [{"n": 1}, {"n": None}, {"best_of": 1}])
def test_one_answer_is_one(more: dict[str, Any]) -> None:
    """The default, written out."""
    assert sent(**more) == {**CHAT, **more}
    assert sent("responses", previous_response_id=None, background=False) is not None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"x":"' + b"x" * LONGEST + b'"}'])
def test_what_cannot_be_read_or_kept_has_no_shadow(body: bytes) -> None:
    """Neither has what is longer than is kept."""
    assert shadow_body(body, "chat") is None


@pytest.mark.parametrize(
    ("body", "model"),
    [(b'{"model":"m"}', "m"), (b'{"model":3}', ""), (b"{}", ""), (b"[", ""), (b'{"model":"\\u00e4"}', "ä")],
)
def test_the_model_that_a_body_names(body: bytes, model: str) -> None:
    """Empty where it names none."""
    assert model_of(body) == model


@given(st.binary(max_size=200), st.sampled_from(["chat", "responses", "messages", "completion"]))
def test_no_bytes_break_it(body: bytes, api: str) -> None:
    """Clients send anything."""
    shadow_body(body, api)
    model_of(body)
