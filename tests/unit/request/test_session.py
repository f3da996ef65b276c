"""Which id wins, what counts as one, and what is stored of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.session import BODY_FIELDS, HEADERS, clean_id, pin_key, session_of


@pytest.mark.parametrize("position", range(len(HEADERS)))
def test_headers_win_in_their_order(position: int) -> None:
    """The first header of the list that is present wins, whatever order the client sent them in."""
    headers = {name: name.upper() for name in reversed(HEADERS[position:])}
    assert session_of(headers, {"session_id": "body"}) == HEADERS[position].upper()


BODY: dict[str, object] = {
    "session_id": "from session_id",
    "conversation_params": {"conversation_id": "from conversation_params"},
    "metadata": {"user_id": "user_0f_account__session_from-metadata"},
    "user": json.dumps({"device_id": "d", "account_uuid": "", "session_id": "from-user"}),
    "conversation": "from conversation",
    "prompt_cache_key": "from prompt_cache_key",
}


@pytest.mark.parametrize("position", range(len(BODY_FIELDS)))
def test_body_fields_win_in_their_order(position: int) -> None:
    """Without a header the first body field of the list that is present wins."""
    fields = {name: BODY[name] for name in reversed(BODY_FIELDS[position:])}
    assert session_of({"x-session-id": " "}, fields).replace("-", " ") == f"from {BODY_FIELDS[position]}"


def test_a_correlation_id_is_asked_late() -> None:
    """It may name one request only, so everything else goes before it, but for the key that many may share."""
    headers = {"x-correlation-id": "c"}
    assert session_of(headers, {"conversation": "conv_1"}) == "conv_1"
    assert session_of(headers, {"prompt_cache_key": "key"}) == "c"
    assert session_of({**headers, "x-multi-turn-session-id": "s"}, {}) == "s"


@pytest.mark.parametrize(
    "user_id",
    [
        "user_5dd07c33_account__session_d2e70091-3007-41a3",
        "user_5dd07c33_account_ad1c-07_session_d2e70091-3007-41a3",
        '{"device_id":"3f4a","account_uuid":"","session_id":"d2e70091-3007-41a3"}',
    ],
)
def test_claude_code_names_its_session_in_the_user_id(user_id: str) -> None:
    """Both forms count, in the metadata of a message and in the `user` that a gateway made of it."""
    assert session_of({}, {"metadata": {"user_id": user_id}}) == "d2e70091-3007-41a3"
    assert session_of({}, {"user": user_id}) == "d2e70091-3007-41a3"


@pytest.mark.parametrize(
    "user_id",
    [
        *("user_5dd07c33", "alice@example.org", "d2e70091-3007-41a3-a916-cb8b0d3098de", "user_a_session_b", ""),
        *(
            "{",
            "{}",
            '{"session_id":7}',
            '{"user_id":"u"}',
            "[]",
            '{"session_id":"' + "s" * 3000 + '"}',
            7,
            None,
            "{\ud800",
        ),
        *("user_a_account__session_", "x user_a_account__session_b", "user_a_account__session_b c", "{" + "[" * 2000),
    ],
)
def test_a_user_is_no_session(user_id: object) -> None:
    """One user has many conversations: an id of a user alone leaves the session to be inferred."""
    assert session_of({}, {"metadata": {"user_id": user_id}, "user": user_id}) == ""


def test_a_stored_response_is_no_session() -> None:
    """It changes with every turn, and has a field of the request of its own."""
    assert session_of({}, {"previous_response_id": "resp_1"}) == ""


def test_ids_are_cleaned_alike() -> None:
    """An id in a body and the same id in a header come out equal, whatever their length."""
    assert clean_id(" r " + "x" * 2000) == clean_id("r " + "x" * 2000)
    assert clean_id(" r ") == "r"
    assert clean_id(7) == ""


def test_a_conversation_may_be_an_object() -> None:
    """OpenAI clients send the conversation as its id or as an object with an id."""
    assert session_of({}, {"conversation": {"id": " conv_1 "}}) == "conv_1"


@pytest.mark.parametrize("value", [None, 7, True, [], {}, {"id": 3}, "", "\t "])
def test_a_value_of_another_type_is_passed_over(value: object) -> None:
    """A field that holds no text, or a blank one, leaves the turn to the next."""
    assert session_of({}, {"session_id": value, "prompt_cache_key": "key"}) == "key"
    assert session_of({}, {"session_id": value}) == ""


def test_a_long_id_is_replaced_by_its_hash() -> None:
    """An id of 1 KiB is kept; a longer one is hashed, and two that differ stay apart."""
    assert session_of({"x-session-id": "s" * 1024}, {}) == "s" * 1024
    one, other = (session_of({"x-session-id": "s" * 1024 + end}, {}) for end in "ab")
    assert len(one) == len(other) == 32
    assert one != other


@given(st.dictionaries(st.sampled_from(BODY_FIELDS), st.text(alphabet=st.characters(codec=None))))
def test_any_text_is_a_session_id(fields: dict[str, str]) -> None:
    """No text breaks the reading, half surrogate pairs included, and its pin key can be made."""
    assert len(pin_key(b"secret", "pool", session_of({}, fields))) == 32


@given(st.binary(min_size=1, max_size=100), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
def test_a_pin_key_separates_pools_and_sessions(secret: bytes, pool: str, session: str, more: str) -> None:
    """Moving characters from the session into the pool's name gives another key."""
    one, other = pin_key(secret, pool + more, session), pin_key(secret, pool, more + session)
    assert (one == other) == (not more)


def test_a_pin_key_depends_on_the_secret_and_says_nothing_else() -> None:
    """Keys under two secrets differ, long secrets too; a key is 32 hexadecimal digits."""
    secrets = [b"a", b"b", b"a" * 64, b"a" * 65, b"a" * 66]
    keys = {pin_key(secret, "pool", "session") for secret in secrets}
    assert len(keys) == len(secrets)
    assert all(len(key) == 32 and int(key, 16) >= 0 and "session" not in key for key in keys)


def test_a_pin_key_needs_a_secret() -> None:
    """Without a secret anyone could test guesses, so it is refused and the remedy named."""
    with pytest.raises(ValueError, match="set one"):
        pin_key(b"", "pool", "session")
