"""What comparisons leave behind: results, as much of them as may be kept, and words about what does not work."""

import json
import logging

import pytest
from prometheus_client import generate_latest

from extproc.config_rollouts import Keep
from tests.ports import free_port
from tests.unit.top.test_shadowing import BODY, Stand, copy_of

PROMPT, ANSWER, PERSON = "sesame prompt", "sesame answer", "sesame person"
OTHER = json.dumps({"choices": [{"message": {"content": ANSWER}, "finish_reason": "stop"}]}).encode()


async def compared(stand: Stand, request_id: str) -> None:
    """One comparison, of answers that differ."""
    stand.post.answers.set()
    body = {**BODY, "messages": [{"role": "user", "content": PROMPT}], "user": PERSON}
    decision = await stand.ask(request_id, body)
    stand.copies.give(decision.charge_id, copy_of(OTHER))
    await stand.idle()


@pytest.mark.parametrize(
    ("keep", "prompt", "answer"), [("metrics", False, False), ("answers", False, True), ("all", True, True)]
)
async def test_nothing_is_kept_or_said_beyond_what_is_allowed(
    caplog: pytest.LogCaptureFixture, keep: Keep, prompt: bool, answer: bool
) -> None:
    """Neither store, log nor metrics have prompt, answer, person or key, but for what `keep` names."""
    stand = Stand(keep=keep)
    with caplog.at_level(logging.DEBUG):
        await compared(stand, "id")
        [line] = await stand.store.records("shadow", "m", 9)
        await stand.shadowing.close()
    kept, said = line.payload.decode(), caplog.text + generate_latest(stand.registry).decode()
    assert (PROMPT in kept, ANSWER in kept, PERSON in kept) == (prompt, answer, prompt)
    assert "Bearer" not in kept
    assert "sesame" not in said
    assert "Bearer" not in said


async def test_an_engine_that_embeds_nothing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong `embed_url` would else be seen by nobody; the comparison stands without."""
    stand = Stand(embed_url=f"http://127.0.0.1:{free_port()}", embed_model="e")
    await compared(stand, "one")
    await compared(stand, "two")
    assert stand.counted() == {"compared": 2}
    await stand.shadowing.close()
    told = [record for record in caplog.records if "not compared in meaning" in record.message]
    assert [record.__dict__["model"] for record in told] == ["m"]
