"""vLLM: its routes, and how it reads requests and words refusals."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from extproc.sim.adapters import Adapter
from extproc.sim.bodies import ChatBody, CompletionBody, EmbeddingBody, Sampling, TokenizeBody, prompts_of, read
from extproc.sim.control import Control
from extproc.sim.core import Core, Endpoint
from extproc.sim.exposition import CONTENT_TYPE, MetricsPage
from extproc.sim.generation import Generation, chat_prompt, prompt_bytes
from extproc.sim.refusals import Refusal, answer_too_long, busy, invalid, prompt_too_long, unknown_model
from extproc.sim.routes import TEXT, Routes, answer, constant, healthy, query
from extproc.sim.settings import SimSettings
from extproc.sim.tokenizing import features, tokenized
from extproc.sim.tokens import to_ids
from extproc.sim.wire import Exchange, Request

SleepLevel = Literal[0, 1, 2]


class LoadBody(msgspec.Struct):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


class VllmDialect:
    """See `Dialect`."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._settings = core.settings

    def chat(self, body: bytes) -> ChatBody:
        """See `Dialect.chat`."""
        return read(ChatBody, body)

    def completion(self, body: bytes) -> CompletionBody:
        """See `Dialect.completion`."""
        return read(CompletionBody, body)

    def adapter(self, body: Sampling | EmbeddingBody) -> Adapter | None:
        """See `Dialect.adapter`: the model's name is the adapter's."""
        return self.named(body.model)

    def named(self, model: str | None) -> Adapter | None:
        """Return the adapter that `model` names, None for the base model.

        Raises:
            Refusal: 404, the model is not served.
        """
        if model is None or model == self._settings.model:
            return None
        loaded = self._core.adapters.by_name
        if model not in loaded:
            names_all = self._settings.about.admin_json
            raise unknown_model(model, (self._settings.model, *loaded) if names_all else ())
        return loaded[model]

    def admit(self, count: int) -> None:
        """See `Dialect.admit`: `--max-num-queued-reqs` counts what runs too."""
        limit, ranks = self._settings.max_num_queued_reqs, self._core.ranks
        if limit and ranks.live + count > limit:
            ranks.first.engine.stats.rejected += 1
            raise busy()

    def prompt_too_long(self, tokens: int, limit: int) -> Refusal:
        """See `Dialect.prompt_too_long`."""
        return prompt_too_long(tokens, limit)

    def answer_too_long(self, asked: int, prompt_tokens: int, limit: int) -> Refusal:
        """See `Dialect.answer_too_long`."""
        return answer_too_long(asked, prompt_tokens, limit)

    def details(self, cached: int, chat: bool) -> dict[str, Any] | None:
        """See `Dialect.details`; newer versions tell more."""
        if not self._settings.prompt_tokens_details:
            return None
        if not self._settings.about.admin_json:
            return {"cached_tokens": cached}
        return {"cached_tokens": cached, "created_cache_tokens": 0 if chat else None, "multimodal_tokens": None}

    def error(self, refusal: Refusal) -> tuple[int, bytes]:
        """See `Dialect.error`."""
        return refusal.status, refusal.body()


class Vllm:
    """The HTTP surface of a vLLM of the profile's version.

    Attributes:
        dialect: how it reads and words.
        routes: what it answers.
    """

    def __init__(self, core: Core, control: Control, endpoints: Sequence[Endpoint]) -> None:
        """`endpoints` are the ranks' sources of events."""
        self._core = core
        self._settings = settings = core.settings
        self._profile = profile = settings.about
        self._page = MetricsPage(core)
        self._sleep: SleepLevel | None = None
        self.dialect = VllmDialect(core)
        self._generation = generation = Generation(core, control, self.dialect)
        if settings.adapters or settings.runtime_adapters:
            for rank in core.ranks:
                rank.engine.counts_adapters = True
        self.routes: Routes = {
            b"/health": {b"GET": healthy},
            b"/ping": {b"GET": healthy, b"POST": healthy},
            b"/version": {b"GET": constant({"version": profile.version})},
            b"/load": {b"GET": self._load},
            b"/metrics": {b"GET": self._metrics},
            b"/v1/models": {b"GET": self._models},
            b"/tokenize": {b"POST": self._tokenize},
            b"/v1/chat/completions": {b"POST": generation.chat},
            b"/v1/completions": {b"POST": generation.completions},
            b"/v1/embeddings": {b"POST": generation.embeddings},
        }
        if profile.event_sources:
            self.routes[b"/kv_event_sources"] = {b"GET": constant(_sources(settings, endpoints))}
        if profile.render != "absent":
            self.routes[b"/v1/chat/completions/render"] = {b"POST": self._render_chat}
            self.routes[b"/v1/completions/render"] = {b"POST": self._render_completion}
        if settings.runtime_adapters:
            self.routes[b"/v1/load_lora_adapter"] = {b"POST": self._load_adapter}
            self.routes[b"/v1/unload_lora_adapter"] = {b"POST": self._unload_adapter}
        if settings.dev_mode:
            self.routes[b"/sleep"] = {b"POST": self._sleep_now}
            self.routes[b"/wake_up"] = {b"POST": self._wake_up}
            self.routes[b"/is_sleeping"] = {b"GET": self._is_sleeping}
            self.routes[b"/reset_prefix_cache"] = {b"POST": self._reset}

    def _load(self, request: Request, exchange: Exchange) -> None:
        del request
        load = self._core.ranks.live if self._settings.server_load_tracking else 0
        exchange.send(200, b'{"server_load":%d}' % load)

    def _metrics(self, request: Request, exchange: Exchange) -> None:
        del request
        exchange.send(200, self._page.render(self._sleep), CONTENT_TYPE)

    def _models(self, request: Request, exchange: Exchange) -> None:
        del request
        base = self._settings.model
        cards = [self._card(base, base, None, self._settings.engine.context_tokens)]
        cards += [self._card(one.name, one.path, base, None) for one in self._core.adapters.by_name.values()]
        answer(exchange, {"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None, longest: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(self._core.started),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": longest,
            "permission": [],
        }

    def _tokenize(self, request: Request, exchange: Exchange) -> None:
        body = read(TokenizeBody, request.body)
        self.dialect.named(body.model)
        answer(exchange, tokenized(body, self._settings.engine.context_tokens))

    def _render_chat(self, request: Request, exchange: Exchange) -> None:
        self._check_render()
        body = self.dialect.chat(request.body)
        self.dialect.named(body.model)
        prompt = chat_prompt(body)
        tensors = body.mm_payload != "none" and body.return_mm_kwargs is not False
        rendered = self._rendered(body, prompt.data, "chatcmpl-render")
        answer(exchange, {**rendered, "features": features(prompt.media, tensors=tensors)})

    def _render_completion(self, request: Request, exchange: Exchange) -> None:
        self._check_render()
        body = self.dialect.completion(request.body)
        self.dialect.named(body.model)
        prompts = [prompt_bytes(one) for one in prompts_of(body.prompt)]
        answer(exchange, [self._rendered(body, one, f"cmpl-render-{n}") for n, one in enumerate(prompts)])

    def _check_render(self) -> None:
        if self._profile.render == "switched" and not self._settings.scale_out:
            text = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            raise Refusal(403, "PermissionDeniedError", text)

    def _rendered(self, body: Sampling, prompt: bytes, name: str) -> dict[str, Any]:
        return {
            "request_id": name,
            "token_ids": to_ids(prompt),
            "token_offsets": None,
            "features": None,
            "sampling_params": {"n": body.n, "max_tokens": body.longest, "seed": body.seed},
            "model": body.model or self._settings.model,
            "stream": bool(body.stream),
            "stream_options": None,
            "cache_salt": body.cache_salt,
            "priority": 0,
        }

    def _load_adapter(self, request: Request, exchange: Exchange) -> None:
        body = read(LoadBody, request.body)
        self._core.adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
        exchange.send(200, f"Success: LoRA adapter '{body.lora_name}' added successfully.".encode(), TEXT)

    def _unload_adapter(self, request: Request, exchange: Exchange) -> None:
        body = read(UnloadBody, request.body)
        self._core.adapters.unload(body.lora_name)
        exchange.send(200, f"Success: LoRA adapter '{body.lora_name}' removed successfully.".encode(), TEXT)

    def _sleep_now(self, request: Request, exchange: Exchange) -> None:
        """Stop. What runs is aborted, or goes on after waking (`mode=keep`); new requests are taken and hang."""
        level, ranks = query(request, "level", "1"), self._core.ranks
        if level not in ("0", "1", "2"):
            raise invalid("1 validation error:\n  level must be 0, 1 or 2")
        if query(request, "mode", "abort") != "keep":
            ranks.drop_all()
        ranks.freeze()
        self._sleep = 0 if level == "0" else 1 if level == "1" else 2
        if self._sleep:
            ranks.reset_prefix_cache()
        self._admin(exchange, {"status": "sleeping", "level": self._sleep})

    def _wake_up(self, request: Request, exchange: Exchange) -> None:
        tags = [tag for tag in query(request, "tags", "").split(",") if tag]
        self._sleep = None
        self._core.ranks.thaw()
        self._admin(exchange, {"status": "awake", "tags": tags or None})

    def _is_sleeping(self, request: Request, exchange: Exchange) -> None:
        del request
        answer(exchange, {"is_sleeping": self._sleep is not None})

    def _reset(self, request: Request, exchange: Exchange) -> None:
        del request
        self._admin(exchange, {"success": self._core.ranks.reset_prefix_cache()})

    def _admin(self, exchange: Exchange, value: dict[str, Any]) -> None:
        if self._profile.admin_json:
            answer(exchange, value)
        else:
            exchange.send(200, b"", b"")


def _sources(settings: SimSettings, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return vLLM's configuration of events by rank; empty when there are none."""
    events = settings.events
    if events is None:
        return {}
    return {
        str(rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint.address,
            "replay_endpoint": None if endpoint.replay_port is None else f"tcp://*:{endpoint.replay_port}",
            "buffer_steps": events.buffer,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": events.topic,
        }
        for rank, endpoint in enumerate(endpoints)
    }
