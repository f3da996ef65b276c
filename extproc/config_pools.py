"""Models and pools of `warmpath.yaml`: what clients ask for, and who serves it."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.config_base import Address, Count, ModelName, Name, Positive, Section
from extproc.config_overload import PoolOverload
from extproc.config_rollouts import ModelAdapter, Shadow, SplitBy, Version

PolicyName = Literal["predicted_ttft", "weighted", "least_tokens", "session_hash", "round_robin"]
EngineKind = Literal["auto", "vllm", "sglang", "tensorrt_llm"]
ProfileMode = Literal["estimated", "precise", "auto"]
TokenSource = Literal["auto", "local", "engine", "render"]


class Model(Section, frozen=True, kw_only=True):
    """One name that clients may ask for.

    Attributes:
        pool: pool that serves it, of a model with one version.
        served_as: name that the engines know it by; its own when absent.
        adapter: LoRA adapter that it is; none when absent.
        versions: its versions, in place of `pool`, `served_as` and `adapter`; see `docs/rollouts.md`.
        aliases: further names that clients may ask for it by.
        split_by: what gets one version: a session (without one its tenant, without that each request), a tenant, or
            each request.
        shadow: requests that a further version gets too; none when absent.
    """

    pool: Name | None = None
    served_as: ModelName | None = None
    adapter: ModelAdapter | None = None
    versions: dict[Name, Version] = msgspec.field(default_factory=dict)
    aliases: Annotated[list[ModelName], Meta(max_length=64)] = msgspec.field(default_factory=list)
    split_by: SplitBy = "session"
    shadow: Shadow | None = None

    @property
    def by_version(self) -> Mapping[str, Version]:
        """Its versions by name; the only one of a model without any has the name ``""``."""
        return self.versions or {
            "": Version(pool=self.pool or "", weight=1.0, served_as=self.served_as, adapter=self.adapter)
        }

    @property
    def main(self) -> str:
        """The version of most weight; of several the first."""
        versions = self.by_version
        return max(versions, key=lambda name: versions[name].weight)

    @property
    def main_pool(self) -> str:
        """Pool of its main version."""
        return self.by_version[self.main].pool

    def in_pool(self, pool: str) -> Version | None:
        """Its version in a pool; None where it has none."""
        return next((version for version in self.by_version.values() if version.pool == pool), None)


ZmqAddress = Annotated[
    str,
    Meta(pattern=r"^(tcp://[^\s{}]+:([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5]))?$"),
]


class EventSettings(Section, frozen=True, kw_only=True):
    """Where engines publish their KV events, for those that do not tell: vLLM before 0.31.

    Attributes:
        endpoint: ZMQ address as the engines were given it (`tcp://*:5557`); data-parallel rank r adds r to the port.
            Empty when they tell it themselves, or publish none. An engine that tells another host than its own is
            followed there only where this names that very address.
        replay: the same of their replay sockets; empty for none.
        topic: what their topics begin with. `{endpoint}` stands for the endpoint, which tells engines apart that all
            connect to one address.
    """

    endpoint: ZmqAddress = ""
    replay: ZmqAddress = ""
    topic: Annotated[str, Meta(max_length=256)] = ""


class TokenSettings(Section, frozen=True, kw_only=True):
    """Where the token ids of prompts come from, in pools whose profiles are precise.

    Attributes:
        source: `local` reads `tokenizer`, `engine` asks the pool's own engines, `render` asks `url`; `auto` takes the
            first of `local`, `render` and `engine` that is configured or found to answer, and asks `url` or the engines
            about chats with images, whose ids no tokenizer knows.
        tokenizer: folder with `tokenizer.json`, and `tokenizer_config.json` or `chat_template.jinja`.
        url: `http://host:port` of a render server (`vllm launch render`).
        budget_ms: longest time that a request waits for its token ids; past it, it is routed by estimated profiles.
        cache_mb: memory of each worker for token ids of earlier prompts.
    """

    source: TokenSource = "auto"
    tokenizer: str = ""
    url: Annotated[str, Meta(pattern=r"^(https?://.+)?$")] = ""
    budget_ms: Annotated[float, Meta(gt=0, le=10_000)] = 50.0
    cache_mb: Annotated[int, Meta(ge=1, le=65_536)] = 64


class Pool(Section, frozen=True, kw_only=True):
    """Endpoints that serve the same weights.

    Attributes:
        endpoints: `host:port` of each engine; names are resolved, and resolved again as they change.
        engine: what the engines are; `auto` finds out from their pages.
        profiles: `estimated` from decisions and reported usage; `auto` from the engines' KV events and token ids where
            both can be had, once all that an engine holds is known; `precise` the same, as soon as its events are read.
        events: where KV events come from, when the engines do not tell.
        tokens: where token ids come from.
        cpu_weight: what a block in the engine's host memory is worth, of one in its GPU's.
        disk_weight: the same of a block on disk or in a remote store.
        ask_usage: ask engines to report usage on streams whose client did not, and let that chunk through to it.
        policy: policy of this pool; `routing.policy` when absent.
        overload: what this pool does when it is saturated; the section `overload` where absent.
        prefill_tokens_per_s: believed prefill speed until enough answers were seen.
        kv_tokens: KV cache of one endpoint in tokens until the engine tells its own.
        bytes_per_token: prompt bytes a token stands for until `usage` tells.
    """

    endpoints: Annotated[list[Address], Meta(min_length=1)]
    engine: EngineKind = "auto"
    profiles: ProfileMode = "estimated"
    events: EventSettings = EventSettings()
    tokens: TokenSettings = TokenSettings()
    cpu_weight: Annotated[float, Meta(ge=0, le=1)] = 0.8
    disk_weight: Annotated[float, Meta(ge=0, le=1)] = 0.5
    ask_usage: bool = False
    policy: PolicyName | None = None
    overload: PoolOverload = PoolOverload()
    prefill_tokens_per_s: Positive = 8000.0
    kv_tokens: Count = 100_000
    bytes_per_token: Annotated[float, Meta(gt=0.1, le=64)] = 4.0
