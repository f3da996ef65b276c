"""Text as tokens: equal prefixes stay equal, an answer sent back is what was generated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.sim.bodies import Message
from extproc.sim.tokens import (
    answer,
    block_hashes,
    embedding,
    from_ids,
    padded,
    render_chat,
    to_ids,
    token_count,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=50)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_token_ids_come_back(ids: list[int]) -> None:
    """Ids to bytes and back."""
    assert to_ids(from_ids(ids)) == ids


@pytest.mark.parametrize("ids", [[-1], [2**32], ["a"], [None]])
def test_what_is_no_token_id_is_refused(ids: list[int]) -> None:
    """Ids have 32 bits."""
    with pytest.raises(ValueError, match="whole numbers"):
        from_ids(ids)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "tool"]), TEXT), min_size=1, max_size=5), TEXT)
def test_a_history_that_grows_gives_a_prompt_that_grows(history: list[tuple[str, str]], question: str) -> None:
    """Prompt and answer of one turn are a prefix of the next turn's prompt, in whole tokens."""
    messages = [Message(role=role, content=text) for role, text in history]
    prompt = render_chat(messages)
    said = answer(prompt, 7)
    messages += [Message(role="assistant", content=said.decode()), Message(role="user", content=question)]
    following = render_chat(messages)
    assert len(prompt) % 4 == 0
    assert following.startswith(prompt + said)


def test_tools_come_first() -> None:
    """So that conversations with the same tools share a prefix, and others do not."""
    messages = [Message(role="user", content="hi")]
    with_tools = render_chat(messages, [{"type": "function", "function": {"name": "f"}}])
    assert with_tools.startswith(b"<|tools|>")
    assert with_tools.endswith(render_chat(messages))


def test_an_image_is_its_content() -> None:
    """The same picture gives the same tokens, another one others, and a large one no more of them."""

    def prompt(url: str) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url}}
        return render_chat([Message(role="user", content=[part, {"type": "text", "text": "what?"}])])

    assert prompt("http://a/1.png") == prompt("http://a/1.png")
    assert prompt("http://a/1.png") != prompt("http://a/2.png")
    assert len(prompt("data:" + "x" * 100_000)) == len(prompt("http://a/1.png"))


def test_tool_calls_are_part_of_the_prompt() -> None:
    """Two histories that differ in a call must not share blocks."""
    calls = [
        Message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": args}}]) for args in ("1", "2")
    ]
    assert render_chat(calls[:1]) != render_chat(calls[1:])


def test_hashes_are_chained() -> None:
    """A block's hash depends on all before it: equal blocks behind different prefixes differ."""
    one = block_hashes(b"a" * 64 + b"b" * 64, 16)
    two = block_hashes(b"c" * 64 + b"b" * 64, 16)
    assert len(one) == 2
    assert not set(one) & set(two)
    assert block_hashes(b"a" * 64 + b"z" * 63, 16) == one[:1]


def test_salt_and_adapter_part_the_namespaces() -> None:
    """Not one block in common, whichever differs."""
    data = b"a" * 256
    kinds: list[dict[str, str]] = [{}, {"salt": "s"}, {"adapter": "s"}, {"adapter": "s", "salt": "s"}]
    hashes = [block_hashes(data, 16, **kind) for kind in kinds]
    assert len({one for row in hashes for one in row}) == 16


def test_answers_are_whole_tokens_and_repeatable() -> None:
    """Same prompt, seed and choice: same words."""
    said = answer(b"abcd", 10)
    assert token_count(said) == 10
    assert said == answer(b"abcd", 10)
    assert len({said, answer(b"abcd", 10, choice=1), answer(b"abcd", 10, seed=1), answer(b"abce", 10)}) == 4
    assert answer(b"abcd", 20).startswith(said)


def test_padding_fills_the_last_token_only() -> None:
    """No token more than needed."""
    assert [len(padded(b"x" * n)) for n in range(6)] == [0, 4, 4, 4, 4, 8]


def test_an_embedding_has_length_one() -> None:
    """As embedding models give."""
    assert sum(value * value for value in embedding(b"abcd", 128)) == pytest.approx(1.0)
