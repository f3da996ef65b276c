"""SGLang: its routes, and how it reads requests and words refusals."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from extproc.sim.adapters import Adapter
from extproc.sim.bodies import ChatBody, CompletionBody, EmbeddingBody, Sampling, TokenizeBody, read
from extproc.sim.control import Control
from extproc.sim.core import Core, Endpoint
from extproc.sim.exposition_sglang import MetricsPage
from extproc.sim.generation import Generation
from extproc.sim.load_snapshot import LoadSnapshots
from extproc.sim.page import CONTENT_TYPE
from extproc.sim.ranks import Rank
from extproc.sim.refusals import Refusal, answer_too_long, bad_value
from extproc.sim.routes import TEXT, Routes, answer, constant, healthy, query
from extproc.sim.tokenizing import tokenized
from extproc.sim.wire import Exchange, Request

_Body = TypeVar("_Body", bound=Sampling)
_SLOTS = 8
"""Adapters in a batch: SGLang's default `--max-loras-per-batch`."""


class SglangChat(ChatBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    lora_path: str | None = None
    extra_key: str | None = None

    @property
    def namespace(self) -> str:
        """See `Sampling.namespace`."""
        return _namespace(self.cache_salt, self.extra_key)


class SglangCompletion(CompletionBody, kw_only=True):
    """`POST /v1/completions`."""

    lora_path: str | None = None
    extra_key: str | None = None

    @property
    def namespace(self) -> str:
        """See `Sampling.namespace`."""
        return _namespace(self.cache_salt, self.extra_key)


class LoadBody(msgspec.Struct):
    """`POST /load_lora_adapter`."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadBody(msgspec.Struct):
    """`POST /unload_lora_adapter`."""

    lora_name: str


class SglangDialect:
    """See `Dialect`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._settings = core.settings

    def chat(self, body: bytes) -> ChatBody:
        """See `Dialect.chat`."""
        return _without_ids(read(SglangChat, body))

    def completion(self, body: bytes) -> CompletionBody:
        """See `Dialect.completion`."""
        return _without_ids(read(SglangCompletion, body))

    def adapter(self, body: Sampling | EmbeddingBody) -> Adapter | None:
        """See `Dialect.adapter`: `model` is `base:adapter`, or `lora_path` names it. The base is not looked at."""
        name = (body.model or "").partition(":")[2]
        if not name and isinstance(body, SglangChat | SglangCompletion):
            name = body.lora_path or ""
        if not name:
            return None
        adapter = self._core.adapters.by_name.get(name)
        if adapter is None:
            loaded = list(self._core.adapters.by_name)
            raise bad_value(f"Got LoRA adapter that has never been loaded: {name}. All loaded adapters: {loaded}.")
        return adapter

    def admit(self, count: int) -> None:
        """See `Dialect.admit`: `--max-queued-requests` counts only what waits."""
        limit, ranks = self._settings.max_num_queued_reqs, self._core.ranks
        if limit and ranks.queued + count > limit:
            raise Refusal(503, "503", "The request queue is full.")

    def prompt_too_long(self, tokens: int, limit: int) -> Refusal:
        """See `Dialect.prompt_too_long`."""
        text = (
            f"Input length ({tokens} tokens) exceeds the maximum allowed length ({limit} tokens). Use a shorter input "
            "or enable --allow-auto-truncate."
        )
        return Refusal(400, "BadRequestError", text)

    def answer_too_long(self, asked: int, prompt_tokens: int, limit: int) -> Refusal:
        """See `Dialect.answer_too_long`."""
        return answer_too_long(asked, prompt_tokens, limit)

    def details(self, cached: int, chat: bool) -> dict[str, Any] | None:
        """See `Dialect.details`: only with `--enable-cache-report`."""
        del chat
        return {"cached_tokens": cached} if self._settings.prompt_tokens_details else None

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        """See `Dialect.error`: errors are flat."""
        return refusal.status, msgspec.json.encode({"object": "error"} | refusal.fields())


class Sglang:
    """The HTTP surface of SGLang with `--enable-metrics`.

    Attributes:
        dialect: how it reads and words.
        routes: what it answers.
    """

    def __init__(self, core: Core, control: Control, endpoints: Sequence[Endpoint]) -> None:
        """`endpoints` are the ranks' sources of events."""
        self._core = core
        self._settings = settings = core.settings
        self.dialect = SglangDialect(core)
        self._lora = bool(settings.adapters) or settings.runtime_adapters
        self._snapshots = [LoadSnapshots(rank.engine) for rank in core.ranks]
        for rank, snapshots in zip(core.ranks, self._snapshots, strict=True):
            rank.engine.steps = snapshots
        self._page = MetricsPage(core, self._snapshots)
        generation = Generation(core, control, self.dialect)
        info = constant(_server_info(core, endpoints, lora=self._lora))
        model = constant(_model_info(settings.model))
        self.routes: Routes = {
            b"/health": {b"GET": healthy},
            b"/health_generate": {b"GET": healthy},
            b"/ping": {b"GET": healthy},
            b"/ready": {b"GET": healthy},
            b"/metrics": {b"GET": self._metrics},
            b"/v1/loads": {b"GET": self._loads},
            b"/server_info": {b"GET": info},
            b"/get_server_info": {b"GET": info},
            b"/model_info": {b"GET": model},
            b"/get_model_info": {b"GET": model},
            b"/v1/models": {b"GET": self._models},
            b"/flush_cache": {b"GET": self._flush, b"POST": self._flush},
            b"/load_lora_adapter": {b"POST": self._load_adapter},
            b"/unload_lora_adapter": {b"POST": self._unload_adapter},
            b"/tokenize": {b"POST": self._tokenize},
            b"/v1/tokenize": {b"POST": self._tokenize},
            b"/v1/chat/completions": {b"POST": generation.chat},
            b"/v1/completions": {b"POST": generation.completions},
            b"/v1/embeddings": {b"POST": generation.embeddings},
        }

    def _metrics(self, request: Request, exchange: Exchange) -> None:
        del request
        exchange.send(200, self._page.render(), CONTENT_TYPE)

    def _loads(self, request: Request, exchange: Exchange) -> None:
        wanted = query(request, "dp_rank", "")
        include = set(query(request, "include", "core").split(","))
        loads = [self._load(rank, include) for rank in self._core.ranks if wanted in ("", str(rank.index))]
        whole = {
            "timestamp": time.time(),
            "version": self._settings.about.version,
            "accelerator": "sim",
            "num_accelerators": len(self._core.ranks),
            "loads": loads,
        }
        answer(exchange, whole)

    def _load(self, rank: Rank, include: set[str]) -> dict[str, Any]:
        engine, shown = self._settings.engine, self._snapshots[rank.index].loads
        load: dict[str, Any] = {
            "timestamp": shown.at,
            "dp_rank": rank.index,
            "num_running_reqs": shown.running,
            "num_waiting_reqs": shown.waiting,
            "num_waiting_uncached_tokens": shown.waiting_tokens,
            "num_used_tokens": shown.used_tokens,
            "num_total_tokens": shown.used_tokens + shown.waiting_tokens,
            "num_active_tokens": shown.used_tokens,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": engine.capacity_tokens,
            "max_running_requests": engine.max_num_seqs,
            "token_usage": shown.usage,
            "gen_throughput": shown.throughput,
            "cache_hit_rate": shown.hit_rate,
            "utilization": shown.usage,
            "total_prefill_uncached_tokens": shown.prefilled_tokens,
            "decode_moments": [shown.decode_steps],
        }
        if include & {"lora", "all"} and self._lora:
            slots = engine.max_loras or _SLOTS
            used = shown.adapters
            load["lora"] = {"slots_used": used, "slots_total": slots, "utilization": used / slots}
        if include & {"queues", "all"}:
            load["queues"] = {"waiting": shown.waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0}
        return load

    def _models(self, request: Request, exchange: Exchange) -> None:
        del request
        base = self._settings.model
        cards = [self._card(base, base, None, self._settings.engine.context_tokens)]
        cards += [self._card(one.name, one.path, base, None) for one in self._core.adapters.by_name.values()]
        answer(exchange, {"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None, longest: int | None) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": int(self._core.started), "owned_by": "sglang"}
        return card | {"root": root, "parent": parent, "max_model_len": longest}

    def _flush(self, request: Request, exchange: Exchange) -> None:
        del request
        done = self._core.ranks.reset_prefix_cache()
        text = (
            "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
            "the operation will not be performed.)\n"
        )
        exchange.send(200 if done else 400, text.encode(), TEXT)

    def _load_adapter(self, request: Request, exchange: Exchange) -> None:
        body = read(LoadBody, request.body)
        self._change(exchange, lambda: self._core.adapters.load(body.lora_name, body.lora_path))

    def _unload_adapter(self, request: Request, exchange: Exchange) -> None:
        body = read(UnloadBody, request.body)
        self._change(exchange, lambda: self._core.adapters.unload(body.lora_name))

    def _change(self, exchange: Exchange, change: Callable[[], object]) -> None:
        """Load or unload, and answer with what is loaded then; whatever is wrong is a 400."""
        reason = ""
        if not self._settings.runtime_adapters:
            reason = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        else:
            try:
                change()
            except Refusal as refusal:
                reason = str(refusal)
        loaded = {one.name: one.path for one in self._core.adapters.by_name.values()}
        result = {"success": not reason, "error_message": reason, "loaded_adapters": loaded}
        answer(exchange, result, 400 if reason else 200)

    def _tokenize(self, request: Request, exchange: Exchange) -> None:
        whole = tokenized(read(TokenizeBody, request.body), self._settings.engine.context_tokens)
        answer(exchange, {name: whole[name] for name in ("tokens", "count", "max_model_len")})


def _server_info(core: Core, endpoints: Sequence[Endpoint], *, lora: bool) -> dict[str, Any]:
    settings, engine = core.settings, core.settings.engine
    events = None
    if endpoints and settings.events is not None:
        first = endpoints[0]
        events = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": first.port,
            "topic": settings.events.topic,
            "block_size": engine.block_size,
            "dp_size": len(core.ranks),
            "replay_endpoint_port_base": first.replay_port,
            "load_endpoint_port_base": None,
            "load_topic": "load",
        }
    return {
        "model_path": settings.model,
        "served_model_name": settings.model,
        "version": settings.about.version,
        "page_size": engine.block_size,
        "context_length": engine.context_tokens,
        "max_total_num_tokens": engine.capacity_tokens,
        "max_running_requests": engine.max_num_seqs,
        "max_queued_requests": settings.max_num_queued_reqs or None,
        "dp_size": len(core.ranks),
        "enable_lora": lora,
        "max_loras_per_batch": engine.max_loras or _SLOTS,
        "enable_metrics": True,
        "enable_cache_report": settings.prompt_tokens_details,
        "kv_events": events,
    }


def _model_info(model: str) -> dict[str, Any]:
    return {
        "model_path": model,
        "tokenizer_path": model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }


def _without_ids(body: _Body) -> _Body:
    """SGLang passes over `return_token_ids`, a field of vLLM's."""
    body.return_token_ids = False
    return body


def _namespace(salt: str | None, extra: str | None) -> str:
    return "\0".join(part for part in (salt, extra) if part)
