"""Calls of every API, for the tests of this folder."""

import json
from typing import Any

from hypothesis import strategies as st

from extproc.request.model import Request
from extproc.request.shapes import parse
from extproc.request.volatile import BUILTIN, Rules

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
EMBEDDING = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
RERANK = "/v1/rerank"
SCORE = "/v1/score"
PATHS = [
    *(CHAT, f"{CHAT}/batch", COMPLETION, EMBEDDING, RESPONSES, MESSAGES),
    *("/rerank", RERANK, "/v2/rerank", "/score", SCORE),
]

FIELDS = [
    *("model", "stream", "n", "max_tokens", "max_completion_tokens", "priority", "cache_salt", "session_id"),
    *("conversation", "prompt_cache_key", "messages", "prompt_token_ids", "tools", "documents", "chat_template"),
    *("chat_template_kwargs", "mm_processor_kwargs", "reasoning_effort", "prompt", "input", "role", "content"),
    *("type", "text", "tool_calls", "function", "arguments", "name", "image_url", "reasoning", "audio", "id"),
    *("system", "instructions", "query", "text_1", "text_2", "queries", "items", "source", "data", "output", "summary"),
    *("lora_request", "lora_name", "metadata", "user_id", "user", "thinking", "output_config", "input_schema", "url"),
    *("previous_response_id", "request_id", "extra_key", "truncate_prompt_tokens", "add_special_tokens", "item_first"),
]
KINDS = ["text", "image", "image_url", "input_image", "document", "tool_use", "tool_result", "thinking", "message"]
KINDS += ["function_call", "function_call_output", "custom_tool_call", "reasoning", "web_search_call", "input_audio"]
SCALAR = (
    st.sampled_from(KINDS)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(codec=None), max_size=6)
)
JSON = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


def call(path: str = CHAT, headers: dict[str, str] | None = None, volatile: Rules = BUILTIN, /, **body: Any) -> Request:
    """Parse a body given as keywords."""
    return parse(path, headers or {}, json.dumps(body).encode(), volatile)
