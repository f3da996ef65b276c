"""How true predictions are on real vLLM: cached tokens and TTFT of growing conversations that share their beginnings.

The word of vLLM itself decides: `usage` of each stream. Predictions are those of the decision, as `warmpath explain`
tells them.
"""

import asyncio
from collections.abc import Sequence
from statistics import median

import msgspec
import pytest

from tests.engines.gateway import TTFT_SUM, Answer, Gateway, Messages, Predicted, prose, turn

pytestmark = pytest.mark.vllm

ASSISTANTS = 3
CONVERSATIONS = 12
TURNS = 6
# Engines work on several requests at once, so that there are backlogs to predict.
AT_ONCE = 3
ANSWER_TOKENS = 24
LARGEST_ERROR = 0.05


class Seen(msgspec.Struct, frozen=True):
    """One request: what was expected of it and what came.

    Attributes:
        turn: number of the turn, from 0.
        predicted: what the decision expected.
        answer: what the client saw.
    """

    turn: int
    predicted: Predicted
    answer: Answer

    @property
    def cached_error(self) -> float:
        """Predicted less reported cached tokens, as a share of the prompt."""
        return (self.predicted.cached_tokens - self.answer.cached_tokens) / self.answer.prompt_tokens

    @property
    def ttft_error(self) -> float:
        """Predicted less seen TTFT, as a share of what was seen."""
        return (self.predicted.ttft_s - self.answer.first_byte_s) / self.answer.first_byte_s


async def converse(through: Gateway, number: int, room: asyncio.Semaphore, seen: list[Seen]) -> None:
    """A whole conversation with one of the assistants; `seen` takes its turns in the order that they end."""
    name = f"conversation {number}"
    messages: Messages = [{"role": "system", "content": prose(f"assistant {number % ASSISTANTS}", 2400)}]
    messages.append({"role": "user", "content": prose(name, 200 + 150 * (number % 4))})
    for at in range(TURNS):
        async with room:
            answer = await through.ask(
                messages, stream=True, stream_options={"include_usage": True}, max_tokens=ANSWER_TOKENS
            )
        seen.append(Seen(at, await through.predicted(answer.request_id), answer))
        messages = turn(messages, answer.text, prose(f"{name}, turn {at}", 200 + 150 * ((number + at) % 4)))


async def test_predictions_of_growing_conversations_are_near_what_vllm_does(through: Gateway) -> None:
    """Past the first third, the median prediction of cached tokens is within 5 % of the prompt, template included.

    Three system texts of about 800 tokens are each shared by four conversations of six turns; a turn adds some 60 to
    250 tokens. TTFT is printed and not asserted: both engines, Envoy, the sidecar and the client share two cores.
    """
    before = await through.settled()
    seen: list[Seen] = []
    room = asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as tasks:
        for number in range(CONVERSATIONS):
            tasks.create_task(converse(through, number, room, seen))
    assert len(seen) == CONVERSATIONS * TURNS
    steady = seen[len(seen) // 3 :]
    print("\n".join(table(seen)))
    print(f"steady state: {len(steady)} of {len(seen)} requests")
    print(f"cached tokens, error as a share of the prompt: {spread([each.cached_error for each in steady])}")
    print(f"TTFT, error as a share of what the client saw: {spread([each.ttft_error for each in steady])}")
    gateway_s = (await through.settled() - before)[TTFT_SUM]
    predicted_s, client_s = sum(each.predicted.ttft_s for each in seen), sum(each.answer.first_byte_s for each in seen)
    print(
        f"TTFT of all: predicted {predicted_s:.1f} s, at the gateway {gateway_s:.1f} s, at the client {client_s:.1f} s"
    )
    assert {each.predicted.engine for each in steady} == {0, 1}
    assert median(each.answer.cached_tokens for each in steady) > 0
    assert median(abs(each.cached_error) for each in steady) <= LARGEST_ERROR


def spread(errors: Sequence[float]) -> str:
    """Median and 90th percentile of the absolute errors, and the median with its sign."""
    sizes = sorted(map(abs, errors))
    return f"median {median(sizes):.1%}, 90th {sizes[len(sizes) * 9 // 10]:.1%}, signed median {median(errors):+.1%}"


def table(seen: Sequence[Seen]) -> list[str]:
    """One row a request, in the order that they ended."""
    rows = ["turn engine  prompt predicted  cached predicted reported  TTFT ms predicted seen"]
    for each in seen:
        told, answer = each.predicted, each.answer
        rows.append(
            f"{each.turn:4} {told.engine:6} {answer.prompt_tokens:7} {told.prompt_tokens:9.0f} "
            f"{told.cached_tokens:17.0f} {answer.cached_tokens:8} {told.ttft_s * 1000:18.0f} "
            f"{answer.first_byte_s * 1000:4.0f}"
        )
    return rows
