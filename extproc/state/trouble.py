"""What a shared store can be in trouble with: a word each for metrics, health and logs, and the errors that say so."""

import re
from enum import StrEnum
from typing import Final

from extproc.errors import StoreError


class Trouble(StrEnum):
    """Why the shared store did not do what was asked of it; the values are a closed set."""

    GONE = "gone"
    """No connection to it, or the connection was lost."""
    SLOW = "slow"
    """No answer within the deadline."""
    CERTIFICATE = "certificate"
    """TLS: one side does not trust the other's certificate, or one side does not speak TLS."""
    WRONG_PASSWORD = "wrong_password"  # noqa: S105 -- the name of a trouble
    """It asks for a login, or does not know the one it was given."""
    NO_PERMISSION = "no_permission"
    """The user may not run a command, or not on our keys."""
    OLD_VERSION = "old_version"
    """Older than what the scripts need."""
    LOADING = "loading"
    """It reads its data from disk and serves nothing meanwhile."""
    FULL = "full"
    """`maxmemory` is reached and its policy lets nothing go."""
    READ_ONLY = "read_only"
    """A replica, whether its master answers or not."""
    NO_REPLICAS = "no_replicas"
    """`min-replicas-to-write` replicas are not there."""
    NOT_SAVING = "not_saving"
    """It cannot write its data to disk and refuses writes (`stop-writes-on-bgsave-error`)."""
    BUSY = "busy"
    """A script of somebody holds it up."""
    CLUSTER_DOWN = "cluster_down"
    """The cluster does not serve this slot now, or moves it at this moment."""
    REFUSED = "refused"
    """Any other error, or a reply of another kind than the command has."""


_BY_CODE: Final = {
    "NOAUTH": Trouble.WRONG_PASSWORD,
    "WRONGPASS": Trouble.WRONG_PASSWORD,
    "NOPERM": Trouble.NO_PERMISSION,
    "LOADING": Trouble.LOADING,
    "OOM": Trouble.FULL,
    "READONLY": Trouble.READ_ONLY,
    "MASTERDOWN": Trouble.READ_ONLY,
    "NOREPLICAS": Trouble.NO_REPLICAS,
    "MISCONF": Trouble.NOT_SAVING,
    "BUSY": Trouble.BUSY,
    "UNKILLABLE": Trouble.BUSY,
    "CLUSTERDOWN": Trouble.CLUSTER_DOWN,
    "TRYAGAIN": Trouble.CLUSTER_DOWN,
    "MOVED": Trouble.CLUSTER_DOWN,
    "ASK": Trouble.CLUSTER_DOWN,
}
EXHAUSTED: Final = "EXHAUSTED"
"""Code of our own for a stream that has an entry of the last id that there is, which Redis calls an `ERR`."""
_INNER: Final = re.compile(rf"\b({'|'.join(_BY_CODE)})\b")
# Redis 6.2 and 7, then Valkey.
_FORBIDDEN: Final = ("The user executing the script can't", "ACL failure in script")


class StoreDeadlineError(StoreError):
    """The shared store did not answer within the deadline; the call may still have been executed."""


class UnreachableError(StoreError):
    """No node that could answer is connected; the command was not executed, or nobody can tell.

    Attributes:
        trouble: what keeps it from being connected.
    """

    def __init__(self, text: str, trouble: Trouble = Trouble.GONE) -> None:
        super().__init__(text)
        self.trouble = trouble


class AnsweredError(StoreError):
    """Redis answers, though not with what was asked for: it is neither gone nor slow."""


class RefusedError(AnsweredError):
    """Redis answered with an error.

    Attributes:
        code: the first word of the error (texts may hold values and are not kept).
        to: where a cluster says the key is: `slot host:port`; empty for all but `MOVED` and `ASK`.
    """

    def __init__(self, code: str, to: str = "") -> None:
        super().__init__(f"Redis refused the command: {code}")
        self.code = code
        self.to = to


def refusal(text: str) -> RefusedError:
    """The error that Redis' error reply stands for; of its text only what names no value is kept."""
    code, _, rest = text.partition(" ")
    if code == "ERR" and "script" in rest:
        # An error of a command within a script is told as the script's own, in other words by each version.
        if any(words in rest for words in _FORBIDDEN):
            code = "NOPERM"
        elif inner := _INNER.search(rest):
            code = inner[0]
    if code == "ERR" and "exhausted the last possible ID" in rest:
        code = EXHAUSTED
    return RefusedError(code, rest if code in {"MOVED", "ASK"} else "")


def trouble_of(error: StoreError) -> Trouble:
    """What the store is in trouble with, by the error that a call ended with."""
    if isinstance(error, RefusedError):
        return of_code(error.code)
    if isinstance(error, AnsweredError):
        return Trouble.REFUSED
    if isinstance(error, StoreDeadlineError):
        return Trouble.SLOW
    return error.trouble if isinstance(error, UnreachableError) else Trouble.GONE


def of_code(code: str) -> Trouble:
    """The trouble that the first word of Redis' error reply names."""
    return _BY_CODE.get(code, Trouble.REFUSED)
