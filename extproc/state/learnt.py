"""What was learnt of an endpoint and of a pool, as plain values: another worker goes on from them."""

import msgspec

from extproc.state.rate import LearntRate


class EndpointLearnt(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one endpoint beside its profile.

    Attributes:
        endpoint: endpoint id.
        started_at: start of its engine, seconds since the epoch; 0 when unknown.
        kv_tokens: claimed cache in tokens; 0 when unknown.
        block_tokens: tokens in a KV block.
        share: believed share of the claimed cache.
        reports: see `facts.Facts`.
        uncached: mean uncached tokens of the requests it answered; -1 before the first.
        rate: its speed.
        marks: how old a reading of the profile's use counter is, in seconds, and the reading; oldest first.
        turns: the newest turns that it answered: digest, prompt and output tokens.
    """

    endpoint: str
    started_at: float
    kv_tokens: int
    block_tokens: int
    share: float
    reports: bool
    uncached: float
    rate: LearntRate
    marks: list[tuple[float, int]]
    turns: list[tuple[bytes, float, float]]


class PoolLearnt(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a pool as a whole.

    Attributes:
        tokens: see `learn.TokenEstimator.sums`.
        reuse: share of an answer that the next turn finds.
        output: mean tokens of an answer, and of how many answers.
        ratios: bytes a token by block.
        outputs: mean tokens and number of answers by block.
        numbers: last number of each replica's batches that was taken in.
        kept: see `Conversations.learnt`.
    """

    tokens: tuple[float, float]
    reuse: float
    output: tuple[float, int]
    ratios: dict[int, float]
    outputs: dict[int, tuple[float, int]]
    numbers: dict[str, int] = {}
    kept: list[tuple[bytes, float]] = []
