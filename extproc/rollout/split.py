"""Which version of a model a request gets. Plain functions of values.

Each version has a score for each unit of traffic (a session, a tenant, a request), `-log(hash) / weight`, and the
lowest wins: weighted rendezvous hashing. Every version gets its weight's part of the units; a greater weight takes
units from others and gives none away; what others have among themselves stays as it is.
"""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec
import xxhash

from extproc.config_rollouts import SplitBy

_HASHES = float(1 << 64)

Why = Literal["weight", "tester", "running", "response", "no_endpoint"]
"""Why a version serves: by the weights; its client may choose and did; its conversation runs there; it holds the stored
response; no endpoint of the one that the weights gave can serve."""
By = Literal["session", "conversation", "tenant", "request", "nobody"]
"""What a version is chosen for: a session that the client names, a conversation that was recognised, a tenant, a
request, or nothing that could be told from others."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of one model, as they are now.

    Attributes:
        model: the model, by its own name.
        pools: pool by version.
        weights: part of the traffic by version; those that are missing get none.
        earlier: weights that were in force before, the newest first, whose conversations stay where they began.
        split_by: what one version is chosen for.
        epoch: rollout and step that the weights are of, for what is measured; empty without a rollout.
        main: version of requests that belong to nobody, such as those without a body.
    """

    model: str
    pools: Mapping[str, str]
    weights: Mapping[str, float]
    earlier: tuple[Mapping[str, float], ...] = ()
    split_by: SplitBy = "session"
    epoch: str = ""
    main: str = ""


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The version that a request gets.

    Attributes:
        model: the model.
        version: the version.
        pool: its pool.
        unit: what it was chosen for, as a share of 1: a keyed hash.
        epoch: see `Split.epoch`.
        earlier: (version, pool) that earlier weights would have given, the newest first; one of them has the request if
            its conversation is pinned there.
        asked: the client chose the version itself.
        why: why this version.
        by: what `unit` stands for.
        digest: the keyed hash itself; empty where none was made.
    """

    model: str
    version: str
    pool: str
    unit: float = 0.0
    epoch: str = ""
    earlier: tuple[tuple[str, str], ...] = ()
    asked: bool = False
    why: Why = "weight"
    by: By = "request"
    digest: bytes = b""


def chosen(split: Split, unit: bytes, by: By = "request") -> Choice:
    """The version for a unit of traffic, given as a digest of at least 16 bytes that cannot be guessed.

    Args:
        split: the versions.
        unit: the digest.
        by: what it stands for.
    """
    version = of_weights(split.weights, unit) or split.main
    earlier: dict[str, str] = {}
    for weights in split.earlier:
        before = of_weights(weights, unit)
        if before and before != version and before in split.pools:
            earlier[before] = split.pools[before]
    pool, began = split.pools[version], tuple(earlier.items())
    return Choice(split.model, version, pool, share_of(unit), split.epoch, began, by=by, digest=unit)


def of_weights(weights: Mapping[str, float], unit: bytes) -> str:
    """The version of a unit by these weights; empty when none has any."""
    scores = (
        (-math.log((xxhash.xxh3_64_intdigest(unit + version.encode()) + 1) / _HASHES) / weight, version)
        for version, weight in weights.items()
        if weight > 0.0
    )
    return min(scores, default=(0.0, ""))[1]


def share_of(unit: bytes) -> float:
    """A unit as a number of [0, 1)."""
    return int.from_bytes(unit[:6], "big") / (1 << 48)
