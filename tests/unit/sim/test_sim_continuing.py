"""An engine asked to go on says what it would have said."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.bodies import Message
from extproc.sim.continuing import rest, said
from extproc.sim.fleet import SimFleet
from extproc.sim.settings import SimSettings
from extproc.sim.tokens import TOKEN_BYTES, answer, padded, render

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@given(
    prompt=st.text(min_size=1, max_size=40), begun=st.integers(0, 30), more=st.integers(1, 10), seed=st.integers(0, 5)
)
def test_the_rest_of_an_answer_is_found_behind_its_beginning(prompt: str, begun: int, more: int, seed: int) -> None:
    """Wherever it was cut, and without the header of a chat that says where it began."""
    origin = padded(prompt.encode())
    whole = answer(origin, begun + more, seed=seed)
    cut = begun * TOKEN_BYTES
    found = said(origin + whole[:cut], seed=seed)
    assert found == begun
    assert rest(origin + whole[:cut], found, more, seed=seed) == whole[cut:]


def test_an_open_message_is_the_beginning_of_the_answer() -> None:
    """`continue_final_message` leaves out the end of the last message."""
    question = Message(role="user", content="hello")
    asked = render([question]).data
    begun = answer(asked, 3)
    open_ = render(
        [question, Message(role="assistant", content=begun.decode())], generation_prompt=False, open_ended=True
    ).data
    assert open_ == asked + begun
    assert said(open_) == 3


@pytest.mark.parametrize("prompt", [b"text", b"bal bal bal ", b"", b"<|assistant|>\n\0\0other text!"])
def test_what_nobody_said_is_a_prompt(prompt: bytes) -> None:
    """A text that is no answer to what stands before it is answered as a whole."""
    assert said(prompt) == 0
    assert rest(prompt, 0, 4) == answer(prompt, 4)


@contextlib.asynccontextmanager
async def engine(profile: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of one engine whose answers end after eight tokens."""
    settings = SimSettings(profile=profile, answer_tokens=8, time_factor=20.0)
    async with SimFleet(1, settings) as fleet, aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client:
        yield client


async def asked(client: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    """Post, and return the JSON."""
    async with client.post(path, json=body) as answer:
        assert answer.status == status, await answer.text()
        value: dict[str, Any] = await answer.json()
        return value


@pytest.mark.parametrize("profile", ["vllm-0.33", "vllm-0.11", "sglang"])
async def test_a_chat_goes_on_and_ends_where_it_would_have_ended(profile: str) -> None:
    """Text and end are those of the answer in one go, though no limit is given."""
    question = {"role": "user", "content": "hello"}
    async with engine(profile) as client:
        whole = (await asked(client, CHAT, {"messages": [question]}))["choices"][0]
        text = whole["message"]["content"]
        begun = {"role": "assistant", "content": text[:20]}
        going_on = {"continue_final_message": True, "add_generation_prompt": False}
        rest = (await asked(client, CHAT, {"messages": [question, begun], **going_on}))["choices"][0]
    assert rest["message"]["content"] == text[20:]
    assert (rest["finish_reason"], len(text)) == ("stop", 8 * TOKEN_BYTES)


async def test_a_chat_goes_on_by_token_ids_as_a_completion() -> None:
    """The ids of prompt and answer are a prompt whose answer has begun."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "return_token_ids": True}
    async with engine("vllm-0.33") as client:
        whole = await asked(client, CHAT, chat)
        ids = [*whole["prompt_token_ids"], *whole["choices"][0]["token_ids"][:3]]
        rest = (await asked(client, COMPLETIONS, {"prompt": ids, "max_tokens": 20}))["choices"][0]
    assert rest["text"] == whole["choices"][0]["message"]["content"][3 * TOKEN_BYTES :]
    assert rest["finish_reason"] == "stop"


async def test_an_open_message_has_no_header_behind_it() -> None:
    """An engine (vLLM) refuses both at once."""
    body = {"messages": [{"role": "assistant", "content": "so"}], "continue_final_message": True}
    async with engine("vllm-0.33") as client:
        assert "add_generation_prompt" in (await asked(client, CHAT, body, 400))["error"]["message"]


async def test_sglang_tells_no_token_ids() -> None:
    """`return_token_ids` is vLLM's."""
    body = {"messages": [{"role": "user", "content": "hello"}], "return_token_ids": True}
    async with engine("sglang") as client:
        whole = await asked(client, CHAT, body)
    assert whole["choices"][0]["token_ids"] is None
    assert "prompt_token_ids" not in whole
