"""Troubles of the shared store: which error means which, whatever version of Redis says it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import StoreError
from extproc.state.trouble import (
    AnsweredError,
    StoreDeadlineError,
    Trouble,
    UnreachableError,
    of_code,
    refusal,
    trouble_of,
)


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", Trouble.FULL),
        ("READONLY You can't write against a read only replica.", Trouble.READ_ONLY),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", Trouble.READ_ONLY),
        ("NOPERM User u has no permissions to run the 'set' command", Trouble.NO_PERMISSION),
        ("NOAUTH Authentication required.", Trouble.WRONG_PASSWORD),
        ("WRONGPASS invalid username-password pair or user is disabled.", Trouble.WRONG_PASSWORD),
        ("LOADING Redis is loading the dataset in memory", Trouble.LOADING),
        ("NOREPLICAS Not enough good replicas to write.", Trouble.NO_REPLICAS),
        ("MISCONF Errors writing to the AOF file: No space left on device", Trouble.NOT_SAVING),
        ("BUSY Redis is busy running a script.", Trouble.BUSY),
        ("UNKILLABLE Sorry the script already executed write commands", Trouble.BUSY),
        ("CLUSTERDOWN Hash slot not served", Trouble.CLUSTER_DOWN),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Trouble.CLUSTER_DOWN),
        ("ERR unknown command 'OOM', with args beginning with:", Trouble.REFUSED),
        ("ERR The stream has exhausted the last possible ID, unable to add more items", Trouble.REFUSED),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", Trouble.REFUSED),
        (
            "ERR Error running script (call to f_a8e0): @user_script:1: @user_script: 1: -OOM command not allowed",
            Trouble.FULL,
        ),
        ("ERR user_script:23: OOM command not allowed when used memory. script: on @user_script:23.", Trouble.FULL),
        ("ERR Error running script (call to f_a8): @user_script:1: -READONLY You can't write", Trouble.READ_ONLY),
        (
            "ERR Error running script (call to f_a8): @user_script: 1: The user executing the script can't run this "
            "command or subcommand",
            Trouble.NO_PERMISSION,
        ),
        (
            "ERR ACL failure in script: No permissions to access a key script: on @user_script:1.",
            Trouble.NO_PERMISSION,
        ),
        ("ERR user_script:3: bad argument #1 to 'unpack' script: on @user_script:3.", Trouble.REFUSED),
    ],
)
def test_what_redis_answers_names_a_trouble(text: str, trouble: Trouble) -> None:
    """First words decide; within a script's error the word of the command that failed, in each version's wording."""
    assert trouble_of(refusal(text)) is trouble


def test_errors_without_an_answer_have_troubles_too() -> None:
    """Silence is slow, no connection is gone or what kept it away, a reply of another kind is refused."""
    assert trouble_of(StoreDeadlineError("x")) is Trouble.SLOW
    assert trouble_of(UnreachableError("x")) is Trouble.GONE
    assert trouble_of(UnreachableError("x", Trouble.OLD_VERSION)) is Trouble.OLD_VERSION
    assert trouble_of(AnsweredError("x")) is Trouble.REFUSED
    assert trouble_of(StoreError("x")) is Trouble.GONE


@given(st.text(max_size=200))
def test_no_text_of_redis_is_kept(text: str) -> None:
    """Errors of Redis may quote keys and values: only the first word, or a known one, is in ours."""
    error = refusal("ERR " + text)
    assert str(error).removeprefix("Redis refused the command: ") == error.code
    assert error.to == ""
    assert error.code == "ERR" or of_code(error.code) is not Trouble.REFUSED


def test_where_a_slot_is_is_kept() -> None:
    """What follows MOVED and ASK is an address, and the way on."""
    assert refusal("MOVED 3999 127.0.0.1:6381").to == "3999 127.0.0.1:6381"
    assert refusal("ASK 3999 127.0.0.1:6381").to == "3999 127.0.0.1:6381"
