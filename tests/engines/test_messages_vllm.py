"""The Messages API on real vLLM, as Claude Code calls it: a billing line in front that changes with every request."""

import msgspec
import pytest

from tests.engines.gateway import CACHED, OUTPUT, PROMPT, Gateway, Json, Messages, Predicted, Totals, events, prose
from tests.engines.gateway import turn as with_turn
from tests.engines.vllm_engine import BLOCK_SIZE

pytestmark = pytest.mark.vllm

ANSWER_TOKENS = 40


class Message(msgspec.Struct, frozen=True):
    """One answer.

    Attributes:
        text: what the engine wrote.
        usage: tokens as vLLM counted them.
        predicted: what the decision expected.
        grown: what Warmpath's metrics grew by.
    """

    text: str
    usage: Json
    predicted: Predicted
    grown: Totals

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that vLLM found in its cache."""
        return int(self.usage["cache_read_input_tokens"])

    @property
    def prompt_tokens(self) -> int:
        """The whole prompt: this API counts what is read from the cache, and what is added to it, apart."""
        return sum(int(self.usage[name]) for name in _PARTS)


_PARTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


async def say(through: Gateway, model: str, name: str, cch: str, messages: Messages, *, stream: bool) -> Message:
    """Send the next turn of Claude Code, whose billing line says `cch`."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.177.{cch[:3]}; cc_entrypoint=cli; cch={cch};"
    texts = (billing, "You are a coding agent. ", prose(name, 4000))
    body = {
        "model": model,
        "system": [{"type": "text", "text": text} for text in texts],
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "stream": stream,
    }
    before = await through.settled()
    reply = await through.send("POST", "/v1/messages", body)
    grown = await through.settled() - before
    predicted = await through.predicted(reply.request_id)
    if not stream:
        told = reply.json()
        return Message(told["content"][0]["text"], told["usage"], predicted, grown)
    parts = events(reply.body)
    text = "".join(part["delta"]["text"] for part in parts if part["type"] == "content_block_delta")
    usage = next(part["usage"] for part in parts if part["type"] == "message_delta")
    return Message(text, usage, predicted, grown)


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_that_differ_in_the_billing_line_share_the_cache_and_are_predicted_to(
    through: Gateway, model_name: str, stream: bool
) -> None:
    """Both vLLM and hashing drop the billing line: every later turn finds its whole past, as predicted.

    The first turn is sent twice, with nothing changed but `cch`. Tokens reach the metrics as the whole prompt, although
    this API reports cached ones apart.
    """
    rows = ["prompt predicted  cached predicted reported"]
    for number in range(3):
        name = f"claude {stream} {number}"
        messages: Messages = [{"role": "user", "content": prose(f"asks {name}", 400)}]
        past = 0
        for turn in range(4):
            answer = await say(through, model_name, name, f"{number}{turn}f3e", messages, stream=stream)
            told, reported = answer.predicted, answer.cached_tokens
            rows.append(f"{answer.prompt_tokens:6} {told.prompt_tokens:9.0f} {told.cached_tokens:17.0f} {reported:8}")
            assert reported >= (past - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert answer.grown[PROMPT] == answer.prompt_tokens
            assert answer.grown[CACHED] == reported
            assert answer.grown[OUTPUT] == answer.usage["output_tokens"]
            if past:
                assert abs(told.cached_tokens - reported) <= 3 * BLOCK_SIZE
            past = answer.prompt_tokens
            if turn:
                messages = with_turn(messages, answer.text, prose(f"asks {name} {turn}", 150))
    print("\n".join(rows))
