"""`trtllm-serve` of TensorRT-LLM: its routes, and how it reads requests and words refusals."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from extproc.sim.adapters import MISSING, Adapter
from extproc.sim.bodies import ChatBody, CompletionBody, EmbeddingBody, Sampling, read
from extproc.sim.control import Control
from extproc.sim.core import Core
from extproc.sim.exposition_trtllm import MetricsPage
from extproc.sim.generation import Generation
from extproc.sim.iterations import Iterations
from extproc.sim.page import CONTENT_TYPE
from extproc.sim.refusals import Refusal, answer_too_long, invalid
from extproc.sim.routes import Routes, answer, constant, healthy, words
from extproc.sim.tokens import padded, to_ids
from extproc.sim.wire import Exchange, Request

_BOTH = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user best_of use_beam_search top_k top_p_min min_p repetition_penalty length_penalty
    early_stopping stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens add_special_tokens response_format detokenize
    return_context_logits return_generation_logits lora_request disaggregated_params priority conversation_params
    prompt_ignore_length
"""
_CHAT_ONLY = """
    messages max_completion_tokens top_logprobs tools tool_choice reasoning_effort echo add_generation_prompt
    documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs prompt_token_ids cache_salt
"""
CHAT_FIELDS = frozenset(f"{_BOTH} {_CHAT_ONLY}".split())
COMPLETION_FIELDS = frozenset(f"{_BOTH} prompt echo suffix".split())
"""Fields of the bodies (`OpenAIBaseModel` forbids all others); salts are for chats only."""

_Body = TypeVar("_Body", bound="ChatBody | CompletionBody")


class LoraRequest(msgspec.Struct):
    """Which adapter a request runs under; there is no list of them, each request brings all of it along."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class TrtllmChat(ChatBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    lora_request: LoraRequest | None = None
    priority: float | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def token_ids(self) -> list[int] | None:
        """See `ChatBody.token_ids`."""
        return self.prompt_token_ids


class TrtllmCompletion(CompletionBody, kw_only=True):
    """`POST /v1/completions`."""

    lora_request: LoraRequest | None = None
    priority: float | None = None


class TokenizeBody(msgspec.Struct):
    """`POST /_internal/tokenize`; it knows no chats."""

    prompt: str


class TrtllmDialect:
    """See `Dialect`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def chat(self, body: bytes) -> ChatBody:
        """See `Dialect.chat`."""
        return _strict(TrtllmChat, body, CHAT_FIELDS)

    def completion(self, body: bytes) -> CompletionBody:
        """See `Dialect.completion`."""
        return _strict(TrtllmCompletion, body, COMPLETION_FIELDS)

    def adapter(self, body: Sampling | EmbeddingBody) -> Adapter | None:
        """See `Dialect.adapter`: only `lora_request` selects one, and `model` is not looked at."""
        asked = body.lora_request if isinstance(body, TrtllmChat | TrtllmCompletion) else None
        if asked is None:
            return None
        if asked.lora_path.startswith(MISSING):
            raise Refusal(400, "BadRequestError", f"lora_path ({asked.lora_path}) does not exist.")
        return Adapter(asked.lora_name, asked.lora_int_id, asked.lora_path)

    def admit(self, count: int) -> None:
        """See `Dialect.admit`: the queue has no end."""

    def prompt_too_long(self, tokens: int, limit: int) -> Refusal:
        """See `Dialect.prompt_too_long`."""
        text = f"The prompt length ({tokens}) should not exceed max_seq_len ({limit}) minus one token of the answer."
        return Refusal(400, "BadRequestError", text, code="context_length_exceeded")

    def answer_too_long(self, asked: int, prompt_tokens: int, limit: int) -> Refusal:
        """See `Dialect.answer_too_long`."""
        return answer_too_long(asked, prompt_tokens, limit)

    def details(self, cached: int, chat: bool) -> dict[str, Any] | None:
        """See `Dialect.details`: no flag is needed."""
        del chat
        return {"cached_tokens": cached}

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        """See `Dialect.error`: whatever goes wrong with a request is its own fault, and errors are flat."""
        if refusal.kind == "Bad Request":
            return 400, msgspec.json.encode({"error": str(refusal)})
        status = refusal.status if refusal.kind == "InternalServerError" else 400
        code = status if isinstance(refusal.code, int) else refusal.code
        body = {
            "object": "error",
            "message": str(refusal),
            "type": refusal.kind if status != 400 else "BadRequestError",
            "param": None,
            "code": code,
        }
        return status, msgspec.json.encode(body)


class Trtllm:
    """The HTTP surface of `trtllm-serve` with `return_perf_metrics` and `enable_iter_perf_stats`.

    Attributes:
        dialect: how it reads and words.
        routes: what it answers.
    """

    def __init__(self, core: Core, control: Control) -> None:
        self._core = core
        settings = core.settings
        self.dialect = TrtllmDialect(core)
        self._iterations = [Iterations(rank.engine, rank.index, len(core.ranks)) for rank in core.ranks]
        for rank, iterations in zip(core.ranks, self._iterations, strict=True):
            rank.engine.steps = iterations
        self._page = MetricsPage(core, self._iterations)
        generation = Generation(core, control, self.dialect)
        card = {"id": settings.model, "object": "model", "created": int(core.started), "owned_by": "tensorrt_llm"}
        self.routes: Routes = {
            b"/health": {b"GET": healthy},
            b"/health_generate": {b"GET": words(b"Generation health check OK")},
            b"/version": {b"GET": constant({"version": settings.about.version})},
            b"/v1/models": {b"GET": constant({"object": "list", "data": [card]})},
            b"/server_info": {b"GET": constant(_server_info(core))},
            b"/metrics": {b"GET": self._take_iterations},
            b"/prometheus/metrics": {b"GET": self._metrics},
            b"/kv_cache_events": {b"POST": self._take_events},
            b"/_internal/tokenize": {b"POST": self._tokenize},
            b"/v1/chat/completions": {b"POST": generation.chat},
            b"/v1/completions": {b"POST": generation.completions},
        }

    def _take_iterations(self, request: Request, exchange: Exchange) -> None:
        del request
        answer(exchange, [record for iterations in self._iterations for record in iterations.take()])

    def _take_events(self, request: Request, exchange: Exchange) -> None:
        del request
        buffer = None if self._core.telling is None else self._core.telling.buffer
        answer(exchange, [] if buffer is None else buffer.take())

    def _metrics(self, request: Request, exchange: Exchange) -> None:
        del request
        exchange.send(200, self._page.render(), CONTENT_TYPE)

    def _tokenize(self, request: Request, exchange: Exchange) -> None:
        ids = to_ids(padded(read(TokenizeBody, request.body).prompt.encode()))
        answer(exchange, {"count": len(ids), "tokens": ids})


def _server_info(core: Core) -> Mapping[str, Any]:
    engine = core.settings.engine
    return {
        "disaggregated_params": {},
        "render_fingerprint": {},
        "max_batch_size": engine.max_num_seqs,
        "kv_cache_hash_algo": "v1_block_key",
        "tokens_per_block": engine.block_size,
        "startup_metrics": {},
    }


def _strict(kind: type[_Body], body: bytes, known: frozenset[str]) -> _Body:
    """Return `body` as a `kind`.

    Raises:
        Refusal: 400, it is of another shape, has a field that is not known, or a priority beyond 0 to 1.
    """
    fields = read(dict[str, Any], body)
    if unknown := sorted(fields.keys() - known):
        errors = [
            {"type": "extra_forbidden", "loc": ("body", name), "msg": "Extra inputs are not permitted"}
            for name in unknown
        ]
        raise invalid(str(errors))
    priority = fields.get("priority")
    if isinstance(priority, int | float) and not 0 <= priority <= 1:
        raise invalid("1 validation error:\n  priority must be from 0 to 1")
    return read(kind, body)
