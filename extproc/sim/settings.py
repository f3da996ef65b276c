"""What a simulated engine is told at start: its cache, its speed and the switches of its HTTP surface."""

from dataclasses import dataclass, field, replace

from extproc.sim.profiles import DEFAULT as DEFAULT_PROFILE
from extproc.sim.profiles import PROFILES, Profile
from extproc.sim.traits import Traits

DEFAULT_MAX_MODEL_LEN = 131_072
"""Longest sequence in tokens when none is set and the cache could hold more."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The engine core: cache and speed. Times are engine seconds.

    The defaults are one mid-size GPU: 98,304 tokens of KV cache, 20,000 prefill tokens a second, 6 ms a step.

    Attributes:
        blocks: size of the KV cache in blocks, the one reserved block included, as vLLM's `num_gpu_blocks`.
        block_size: tokens in a block.
        token_budget: most tokens computed in one step, decodes and prefill chunks together.
        max_num_seqs: most sequences in the running batch.
        max_model_len: longest sequence in tokens, prompt and answer; 0 takes what the cache can hold.
        prefill_tokens_per_s: tokens computed in a second when a step is bound by arithmetic.
        step_s: duration of a step that only reads the weights.
        per_seq_s: what each sequence of the batch adds to that.
        prefix_caching: whether full blocks are kept and found again by their hash.
        reserve_full_prompt: admit a sequence only if all its present tokens fit, not just the first chunk
            (vLLM's `scheduler_reserve_full_isl`, on by default there too).
        max_loras: adapters that may run at once (`--max-loras`); requests for more wait. 0 is no limit.
    """

    blocks: int = 6144
    block_size: int = 16
    token_budget: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 0
    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 0.006
    per_seq_s: float = 0.0001
    prefix_caching: bool = True
    reserve_full_prompt: bool = True
    max_loras: int = 0

    def __post_init__(self) -> None:
        """Refuse values no engine could run with.

        Raises:
            ValueError: naming the setting and the remedy.
        """
        counts = ("block_size", "token_budget", "max_num_seqs", "prefill_tokens_per_s")
        for name in counts:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if self.blocks < 2:
            raise ValueError(f"blocks must be at least 2 (one is reserved), got {self.blocks}")
        if self.step_s < 0 or self.per_seq_s < 0 or self.step_s + self.per_seq_s <= 0:
            raise ValueError("step_s and per_seq_s must not be negative and not both 0: a step takes time")
        if self.max_model_len > self.capacity_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit the cache of {self.capacity_tokens} tokens; "
                "raise blocks or lower max_model_len"
            )

    @property
    def capacity_tokens(self) -> int:
        """Tokens the usable blocks can hold."""
        return (self.blocks - 1) * self.block_size

    @property
    def context_tokens(self) -> int:
        """The longest sequence accepted, in tokens."""
        return self.max_model_len or min(DEFAULT_MAX_MODEL_LEN, self.capacity_tokens)


@dataclass(frozen=True, slots=True)
class KvEvents:
    """How an engine tells of its cache. TensorRT-LLM knows no ports: its events are taken out over HTTP.

    Attributes:
        port: first port that events are published on, one a rank; 0 takes free ones.
        replay_port: first port that asks for old batches are answered on; 0 takes free ones, None answers none.
        connect: ZMQ address that the engine connects to instead of listening; rank r takes the port r higher.
        topic: what published batches begin with.
        buffer: batches kept for a replay; for TensorRT-LLM, events kept until somebody takes them.
        int_hashes: vLLM's hashes as numbers of 64 bits; else all 32 bytes
            (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`).
    """

    port: int = 0
    replay_port: int | None = 0
    connect: str = ""
    topic: str = ""
    buffer: int = 10_000
    int_hashes: bool = True

    def shifted(self, ports: int) -> "KvEvents":
        """These settings with every given port higher by `ports`."""
        port = self.port + ports if self.port else 0
        return replace(self, port=port, replay_port=self.replay_port + ports if self.replay_port else self.replay_port)


@dataclass(frozen=True, slots=True)
class SimSettings:
    """One simulated engine: the core and its HTTP surface.

    Attributes:
        engine: cache and speed.
        profile: which engine and version it passes for, a name of `PROFILES`.
        model: the served model's name.
        adapters: names of adapters that are served too, each with its own namespace in the prefix cache.
        runtime_adapters: whether adapters can be loaded and unloaded (`VLLM_ALLOW_RUNTIME_LORA_UPDATING`; SGLang's
            `--enable-lora`).
        dp_ranks: data-parallel ranks behind the one HTTP port, each with a batch and a cache of its own.
        kv_events: whether and how the engine tells of its cache; True takes free ports.
        dev_mode: whether vLLM has `/sleep`, `/wake_up`, `/is_sleeping` and `/reset_prefix_cache`.
        scale_out: whether vLLM 0.33 renders prompts (`--enable-scale-out`).
        time_factor: engine seconds that pass in one wall second.
        answer_tokens: where an answer ends by itself (`finish_reason` "stop") unless `max_tokens` comes first
            or `ignore_eos` is set.
        max_num_queued_reqs: live sequences (SGLang: waiting ones) beyond which requests get 503; 0 is no limit, as
            in vLLM.
        prompt_tokens_details: whether `usage` reports cached tokens (`--enable-prompt-tokens-details`; SGLang's
            `--enable-cache-report`). TensorRT-LLM always does.
        server_load_tracking: whether `/load` counts (`--enable-server-load-tracking`).
        embedding_dims: length of the vectors of `/v1/embeddings`.
        max_body_bytes: larger request bodies get 413.
        keep_alive_s: wall seconds after which an idle connection is closed; uvicorn's default.
        control: whether the routes under `/sim/` exist, which make the engine misbehave on demand.
        traits: what tells it from its like, as a new version of a model may.
    """

    engine: EngineSettings = field(default_factory=EngineSettings)
    profile: str = DEFAULT_PROFILE
    model: str = "sim"
    adapters: tuple[str, ...] = ()
    runtime_adapters: bool = False
    dp_ranks: int = 1
    kv_events: KvEvents | bool = False
    dev_mode: bool = False
    scale_out: bool = False
    time_factor: float = 1.0
    answer_tokens: int = 256
    max_num_queued_reqs: int = 0
    prompt_tokens_details: bool = True
    server_load_tracking: bool = False
    embedding_dims: int = 128
    max_body_bytes: int = 64 << 20
    keep_alive_s: float = 5.0
    control: bool = False
    traits: Traits = field(default_factory=Traits)

    def __post_init__(self) -> None:
        """Refuse a clock that stands still, answers of no tokens, and what the profile does not have.

        Raises:
            ValueError: naming the setting.
        """
        if self.profile not in PROFILES:
            raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {self.profile!r}")
        if self.dp_ranks < 1:
            raise ValueError(f"dp_ranks must be at least 1, got {self.dp_ranks}")
        if self.max_num_queued_reqs and not self.about.admission_limit:
            raise ValueError(f"max_num_queued_reqs is unknown to {self.profile}; leave it at 0")
        if self.time_factor <= 0:
            raise ValueError(f"time_factor must be greater than 0, got {self.time_factor}")
        if self.answer_tokens < 1:
            raise ValueError(f"answer_tokens must be at least 1, got {self.answer_tokens}")
        self.traits.check()

    @property
    def about(self) -> Profile:
        """What the profile stands for."""
        return PROFILES[self.profile]

    @property
    def events(self) -> KvEvents | None:
        """How events are told of; None if they are not."""
        if isinstance(self.kv_events, KvEvents):
            return self.kv_events
        return KvEvents() if self.kv_events else None

    @property
    def publishes(self) -> bool:
        """Whether events go out over ZMQ."""
        return self.events is not None and self.about.engine != "trtllm"
