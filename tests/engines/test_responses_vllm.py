"""The Responses API on real vLLM: one engine stores a response, and continues it under the id that Warmpath chose.

The engines run with their store of responses switched on.
"""

from typing import Any

import aiohttp
import msgspec
import pytest

from tests.engines.gateway import (
    PREFILL_TOKENS_PER_S,
    PROMPT,
    TTFT_COUNT,
    Gateway,
    Json,
    Predicted,
    events,
    prose,
)
from tests.engines.vllm_engine import BLOCK_SIZE, VllmEngine

pytestmark = pytest.mark.vllm

PATH = "/v1/responses"
FOLLOW_UPS = 2
# Two blocks and more: what an answer leaves in the cache shows through rounding.
ANSWER_TOKENS = 72


class Response(msgspec.Struct, frozen=True):
    """One stored response.

    Attributes:
        id: its id.
        usage: tokens as vLLM counted them.
        predicted: what the decision expected.
    """

    id: str
    usage: Json
    predicted: Predicted

    @property
    def prompt_tokens(self) -> int:
        """The whole prompt, what was stored included."""
        return int(self.usage["input_tokens"])

    @property
    def cached_tokens(self) -> int:
        """How much of it vLLM found in its cache."""
        return int(self.usage["input_tokens_details"]["cached_tokens"])


async def respond(through: Gateway, model: str, text: str, *, stream: bool = False, **more: Any) -> Response:
    """Ask for a response and wait until the sidecar knows its usage. Raises ValueError unless vLLM answers 200."""
    body = {"model": model, "input": text, "max_output_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": stream}
    reply = await through.send("POST", PATH, {**body, **more})
    told = events(reply.body)[-1]["response"] if stream and reply.status == 200 else reply.json()
    await through.settled()
    return Response(told["id"], told["usage"], await through.predicted(reply.request_id))


async def test_vllm_takes_request_id_for_the_id_and_knows_no_other_engines_responses(
    engines: list[VllmEngine], model_name: str
) -> None:
    """`request_id` of the body becomes the id of the response, and every engine but its own answers 404 to that.

    So a router can name a response before it exists, and has to send after it whatever names it later.
    """
    body = {"model": model_name, "input": "hello", "max_output_tokens": 4}
    follow = {**body, "previous_response_id": "resp_named_by_us"}
    own, other = (f"http://{engine.address}{PATH}" for engine in engines)
    async with aiohttp.ClientSession() as http:
        async with http.post(own, json={**body, "request_id": "resp_named_by_us"}) as answer:
            assert (answer.status, (await answer.json())["id"]) == (200, "resp_named_by_us")
        for url, status in ((own, 200), (other, 404)):
            async with http.get(f"{url}/resp_named_by_us") as answer:
                assert answer.status == status
            async with http.post(url, json=follow) as answer:
                assert answer.status == status


async def test_a_response_is_continued_and_read_where_it_is_and_its_tokens_are_known(
    through: Gateway, model_name: str
) -> None:
    """Ten conversations and more on both engines: each follow-up is answered, by the engine of the first response.

    The engine puts the stored conversation and its answer in front of the new text. What it then reports as cached is
    what was predicted, to the block; the prompt's length is too, but for the template and the bytes a token.
    """
    rows = ["engine  prompt predicted  cached predicted reported"]
    used: set[int] = set()
    for number in range(24):
        response = await respond(through, model_name, prose(f"stored {number}", 900), stream=number % 2 == 0)
        home = response.predicted.engine
        used.add(home)
        for turn in range(FOLLOW_UPS):
            text = prose(f"continues {number} {turn}", 200)
            earlier, stream = response.id, turn % 2 == 0
            response = await respond(through, model_name, text, stream=stream, previous_response_id=earlier)
            told = response.predicted
            rows.append(
                f"{told.engine:6} {response.prompt_tokens:7} {told.prompt_tokens:9.0f} {told.cached_tokens:17.0f} "
                f"{response.cached_tokens:8}"
            )
            assert (told.engine, told.pin) == (home, "honoured")
            assert abs(told.cached_tokens - response.cached_tokens) <= BLOCK_SIZE < response.cached_tokens
            read = await through.send("GET", f"{PATH}/{response.id}")
            assert read.json()["id"] == response.id
        if number >= 9 and len(used) == 2:
            break
    print("\n".join(rows))
    assert used == {0, 1}


async def test_instructions_that_every_turn_repeats_count_once(through: Gateway, model_name: str) -> None:
    """The engine takes the instructions of each turn in place of the stored ones, and finds them cached."""
    instructions = prose("instructions", 2500)
    for number in range(3):
        response = await respond(through, model_name, prose(f"asks {number}", 600), instructions=instructions)
        for turn in range(2):
            question = prose(f"asks {number} {turn}", 200)
            response = await respond(
                through, model_name, question, instructions=instructions, previous_response_id=response.id
            )
            told = response.predicted
            assert abs(told.cached_tokens - response.cached_tokens) <= BLOCK_SIZE < response.cached_tokens
            assert abs(told.prompt_tokens - response.prompt_tokens) <= 2 * BLOCK_SIZE


async def test_an_id_that_the_client_chose_is_kept_and_followed(through: Gateway, model_name: str) -> None:
    """The response is stored under the client's id, and what continues it goes there."""
    for number in range(6):
        mine = f"resp_mine_{number}"
        first = await respond(through, model_name, prose(mine, 300), request_id=mine)
        assert first.id == mine
        follow = await respond(through, model_name, prose(f"after {mine}", 300), previous_response_id=mine)
        assert follow.predicted.engine == first.predicted.engine


async def test_streamed_responses_teach_tokens_and_no_speed(through: Gateway, model_name: str) -> None:
    """The stream opens before the prefill, so its first byte says nothing of the time to the first token.

    After twelve cold prompts the speed is still the prior, whereas their tokens were counted.
    """
    before = await through.settled()
    told = [await respond(through, model_name, prose(f"cold {number}", 3000), stream=True) for number in range(12)]
    grown = await through.settled() - before
    assert grown[PROMPT] == sum(each.prompt_tokens for each in told)
    assert grown[TTFT_COUNT] == 0
    answer = await through.ask([{"role": "user", "content": prose("cold chat", 3000)}])
    predicted = await through.predicted(answer.request_id)
    assert predicted.cached_tokens == 0
    assert predicted.ttft_s == pytest.approx(predicted.prompt_tokens / PREFILL_TOKENS_PER_S)
