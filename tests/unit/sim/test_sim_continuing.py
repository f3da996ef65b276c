"""An engine asked to go on says what it would have said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.bodies import Message
from extproc.sim.continuing import rest, said
from extproc.sim.tokens import TOKEN_BYTES, answer, padded, render
from tests.unit.sim.client import Client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@given(prompt=st.text(min_size=1, max_size=40), begun=st.integers(0, 30), more=st.integers(1, 10), seed=st.integers(0, 5))
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
