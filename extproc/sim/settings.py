"""What a simulated engine is told at start: its cache, its speed and the switches of its HTTP surface."""

from dataclasses import dataclass, field

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
class SimSettings:
    """One simulated engine: the core and its HTTP surface.

    Attributes:
        engine: cache and speed.
        model: the served model's name.
        adapters: names of adapters that are served too, each with its own namespace in the prefix cache.
        time_factor: engine seconds that pass in one wall second.
        answer_tokens: where an answer ends by itself (`finish_reason` "stop") unless `max_tokens` comes first
            or `ignore_eos` is set.
        max_num_queued_reqs: live sequences beyond which requests get 503; 0 is no limit, as in vLLM.
        prompt_tokens_details: whether `usage` reports cached tokens (`--enable-prompt-tokens-details`).
        server_load_tracking: whether `/load` counts (`--enable-server-load-tracking`).
        embedding_dims: length of the vectors of `/v1/embeddings`.
        max_body_bytes: larger request bodies get 413.
        keep_alive_s: wall seconds after which an idle connection is closed; uvicorn's default.
        control: whether the routes under `/sim/` exist, which make the engine misbehave on demand.
    """

    engine: EngineSettings = field(default_factory=EngineSettings)
    model: str = "sim"
    adapters: tuple[str, ...] = ()
    time_factor: float = 1.0
    answer_tokens: int = 256
    max_num_queued_reqs: int = 0
    prompt_tokens_details: bool = True
    server_load_tracking: bool = False
    embedding_dims: int = 128
    max_body_bytes: int = 64 << 20
    keep_alive_s: float = 5.0
    control: bool = False

    def __post_init__(self) -> None:
        """Refuse a clock that stands still and answers of no tokens.

        Raises:
            ValueError: naming the setting.
        """
        if self.time_factor <= 0:
            raise ValueError(f"time_factor must be greater than 0, got {self.time_factor}")
        if self.answer_tokens < 1:
            raise ValueError(f"answer_tokens must be at least 1, got {self.answer_tokens}")
