"""What TensorRT-LLM needs changed in a body: it refuses every field that its own schema has not.

`trtllm-serve` reads bodies of chats and completions with pydantic's `extra="forbid"` (its `serve/openai_protocol.py`),
where vLLM and SGLang pass over what they do not know.
"""

from typing import Final

HINTS: Final = frozenset(
    {
        # vLLM: names, sessions, transfer of KV blocks, what is reported beside the answer.
        *("request_id", "session_id", "vllm_xargs", "kv_transfer_params", "ec_transfer_params", "stream_interval"),
        *("return_token_ids", "return_tokens_as_token_ids", "return_prompt_text", "return_token_offsets"),
        *("routed_experts_prompt_start", "mm_payload", "return_mm_kwargs"),
        # SGLang: the same.
        *("rid", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "custom_labels", "ngram_corpus_id"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "return_hidden_states", "return_routed_experts"),
        *("routed_experts_start_len", "return_cached_tokens_details", "return_prompt_token_ids", "return_meta_info"),
        # OpenAI: bookkeeping, of which Warmpath itself takes session ids.
        *("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        "conversation",
    }
)
"""Fields of vLLM 0.33, SGLang 0.5.23 and OpenAI that TensorRT-LLM's chat and completion schemas lack, and without which
the model generates the same. Fields that change the answer (`structured_outputs`, `bad_words`, `regex`,
`prompt_logprobs`, …) are not among them: TensorRT-LLM's own 400 is better than an answer to another question."""

_SCALE: Final = 10.0
"""vLLM priority at which half of the way from the middle to the end of the scale is gone: 10 gives 0.25, -10 0.75."""


def priority(of_vllm: int) -> float:
    """TensorRT-LLM's priority (0 to 1, higher first, usually 0.5) for vLLM's (any integer, lower first, usually 0).

    `0.5 - p / (2 (|p| + 10))`: 0 is 0.5, 1 is 0.45, -1 is 0.55, 10 is 0.25, and no integer reaches 0 or 1. It falls
    strictly while floats can tell the results apart, which is beyond a hundred million.
    """
    return 0.5 - of_vllm / (2.0 * (abs(of_vllm) + _SCALE))
