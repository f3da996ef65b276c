"""Versions of a model, how traffic moves from one to another, and what is mirrored: for `models` and `rollouts`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.config_base import ModelName, Name, NotNegative, Section

SplitBy = Literal["session", "tenant", "request"]
OnFailure = Literal["rollback", "pause", "report"]
ShadowMode = Literal["mirror", "compare"]
Keep = Literal["metrics", "answers", "all"]
Percent = Annotated[float, Meta(gt=0, le=100)]
Share = Annotated[float, Meta(ge=0, le=1)]

CAPTURE_CLUSTER = "warmpath_captures"
"""Envoy cluster of the workers once more, for copies of answers: no trouble with these must touch decisions."""
SHADOW_CLUSTERS = "warmpath_shadow_"
"""What the names of Envoy clusters begin with that requests are mirrored to; the rest is the pool's."""


class ModelAdapter(Section, frozen=True, kw_only=True):
    """The LoRA adapter that a model is, on top of its pool's base model.

    Attributes:
        name: its name at the engines.
        id: number that TensorRT-LLM knows it by, unique in the pool and never given to another one: it enters the hash
            of every block.
        path: where TensorRT-LLM finds its weights; the other engines have it loaded under its name.
    """

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    id: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    path: str = ""


class Version(Section, frozen=True, kw_only=True):
    """One version of a model: a pool of its own, which no other version of the model has.

    Attributes:
        pool: pool that serves it.
        weight: its part of the traffic, against the weights of the other versions; 0 for none.
        served_as: name that the engines know it by; the model's own when absent.
        adapter: LoRA adapter that it is; none when absent.
    """

    pool: Name
    weight: NotNegative = 0.0
    served_as: ModelName | None = None
    adapter: ModelAdapter | None = None


class Shadow(Section, frozen=True, kw_only=True):
    """Requests of a model that a further version gets too, without any effect on the client.

    Attributes:
        version: version that gets them; give it weight 0.
        share: share of requests that it gets, 0 to 1.
        mode: `mirror` has Envoy send them again and drops the answers; `compare` keeps and compares both answers.
        max_concurrent: most of them at once, of each worker.
        max_load: none while the shadow's or the client's pool has this share of its room in use.
        timeout_s: longest time that one of them takes.
        keep: what is stored of a comparison: numbers and hashes, the answers too, or the prompts too.
        folder: folder on the sidecar's hosts that results are written to, as JSONL; empty for a stream in Redis.
        max_results: results that are kept, the newest.
        keep_s: results older than this are dropped.
        refusals: regular expressions (Python's `re`) of answers that refuse; the built-in ones when empty.
        embed_url: `http://host:port` of an engine with `/v1/embeddings`; how alike answers are in meaning is compared
            too where it is set.
        embed_model: the model asked there.
    """

    version: Name
    share: Share = 0.05
    mode: ShadowMode = "mirror"
    max_concurrent: Annotated[int, Meta(ge=1, le=1024)] = 8
    max_load: Share = 0.7
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 300.0
    keep: Keep = "metrics"
    folder: str = ""
    max_results: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    keep_s: Annotated[float, Meta(gt=0)] = 604_800.0
    refusals: Annotated[list[str], Meta(max_length=64)] = msgspec.field(default_factory=list)
    embed_url: Annotated[str, Meta(pattern=r"^(https?://.+)?$")] = ""
    embed_model: str = ""


class Latency(Section, frozen=True, kw_only=True):
    """A gate on a time: its percentiles on the canary against those on the baseline.

    Attributes:
        percentiles: percentiles that are compared; none switches the gate off.
        tolerance: how much greater they may be, as a share: 0.1 is a tenth.
    """

    percentiles: Annotated[list[Annotated[float, Meta(ge=1, le=99)]], Meta(max_length=4)] = msgspec.field(
        default_factory=lambda: [50.0, 90.0]
    )
    tolerance: NotNegative = 0.1


class Rate(Section, frozen=True, kw_only=True):
    """A gate on how often something happens, on the canary against the baseline.

    Attributes:
        enabled: whether it is looked at.
        tolerance: how much more often it may happen: 0.005 is half a percent of all answers.
    """

    enabled: bool = True
    tolerance: Share = 0.005


class Drift(Section, frozen=True, kw_only=True):
    """A gate on the length of answers: the median on the canary against that on the baseline, either way.

    Attributes:
        enabled: whether it is looked at.
        tolerance: how much longer answers may be, as a share; and shorter, by the same factor.
    """

    enabled: bool = True
    tolerance: NotNegative = 0.2


class Gates(Section, frozen=True, kw_only=True):
    """What a canary is judged by.

    Attributes:
        ttft: time to the first token, of streamed answers to prompts of like uncached length.
        tpot: time of each token after the first.
        errors: requests that the version failed (5xx, broken connections, time limits); 4xx are the client's.
        abandons: clients that left before the end of their answer.
        broken: answers that were empty or cut: no token, or an end before the engine's own.
        length: output tokens of an answer.
    """

    ttft: Latency = Latency()
    tpot: Latency = Latency()
    errors: Rate = Rate()
    abandons: Rate = Rate(tolerance=0.02)
    broken: Rate = Rate()
    length: Drift = Drift()


class Rollouts(Section, frozen=True, kw_only=True):
    """How a rollout goes, where its start does not say otherwise.

    Attributes:
        steps: percent of the traffic that the canary gets, step by step; the last is 100.
        hold_s: shortest time of each step.
        settle_s: answers of requests that began within this time of a step's beginning do not count: caches are cold.
        min_samples: answers of the canary, and of the baseline, that a step needs at least.
        on_failure: what a failed gate does: roll back, stop where it is, or only say so.
        false_alarms: chance that a canary which is no worse is ever failed, by all gates and steps together.
        require_verdict: a step also waits for a verdict of good quality, posted from outside.
        retire_after_s: after 100 %, how long conversations that began on the baseline may stay there.
        testers: tenants that may choose a version by the header `x-warmpath-version`; `*` for everyone.
        gates: what a canary is judged by.
        history: events of each model that are kept.
    """

    steps: Annotated[list[Percent], Meta(min_length=1, max_length=32)] = msgspec.field(
        default_factory=lambda: [1.0, 5.0, 25.0, 100.0]
    )
    hold_s: NotNegative = 600.0
    settle_s: NotNegative = 10.0
    min_samples: Annotated[int, Meta(ge=0, le=1_000_000)] = 100
    on_failure: OnFailure = "rollback"
    false_alarms: Annotated[float, Meta(gt=0, lt=0.5)] = 0.01
    require_verdict: bool = False
    retire_after_s: NotNegative = 1800.0
    testers: Annotated[list[str], Meta(max_length=1000)] = msgspec.field(default_factory=list)
    gates: Gates = Gates()
    history: Annotated[int, Meta(ge=10, le=1_000_000)] = 1000
