"""The HTTP surface of one engine: vLLM's routes over a `Pacer`."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from extproc.sim.bodies import TokenizeBody, read
from extproc.sim.control import Control
from extproc.sim.engine import Engine
from extproc.sim.exposition import CONTENT_TYPE, MetricsPage
from extproc.sim.generation import Generation
from extproc.sim.pacer import Pacer, Schedule
from extproc.sim.refusals import Refusal, invalid
from extproc.sim.settings import SimSettings
from extproc.sim.tokens import TOKEN_BYTES, padded, render_chat, to_ids
from extproc.sim.wire import Exchange, Request

VERSION = b"0.33.0"

Route = Callable[[Request, Exchange], None]


class Surface:
    """Serves one engine from its start to its end; a restart makes a new one."""

    def __init__(self, settings: SimSettings, control: Control, clock: Callable[[], float], schedule: Schedule) -> None:
        self._settings = settings
        self._control = control
        self._started = time.time()
        self._page = MetricsPage(settings, self._started)
        self.pacer = Pacer(Engine(settings.engine), clock, schedule, settings.time_factor)
        self._generation = generation = Generation(settings, control, self.pacer)
        self._routes: dict[bytes, dict[bytes, Route]] = {
            b"/health": {b"GET": _healthy},
            b"/ping": {b"GET": _healthy, b"POST": _healthy},
            b"/version": {b"GET": _version},
            b"/load": {b"GET": self._load},
            b"/metrics": {b"GET": self._metrics},
            b"/v1/models": {b"GET": self._models},
            b"/tokenize": {b"POST": self._tokenize},
            b"/v1/chat/completions": {b"POST": generation.chat},
            b"/v1/completions": {b"POST": generation.completions},
            b"/v1/embeddings": {b"POST": generation.embeddings},
        }

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer `request`; the errors are vLLM's."""
        if not exchange.open:
            return  # the client left while the server was frozen
        path = request.path
        try:
            if self._settings.control and path.startswith(b"/sim/"):
                if not self._control.handle(request, exchange, self.pacer):
                    exchange.send(404, b'{"detail":"Not Found"}')
                return
            if self._control.holds(lambda: self.handle(request, exchange)):
                return
            methods = self._routes.get(path)
            if methods is None:
                exchange.send(404, b'{"detail":"Not Found"}')
            elif request.method not in methods:
                allowed = (b"allow", b", ".join(methods))
                exchange.send(405, b'{"detail":"Method Not Allowed"}', headers=(allowed,))
            else:
                methods[request.method](request, exchange)
        except Refusal as refusal:
            exchange.send(refusal.status, refusal.body())

    def _load(self, request: Request, exchange: Exchange) -> None:
        del request
        load = self.pacer.engine.live if self._settings.server_load_tracking else 0
        exchange.send(200, b'{"server_load":%d}' % load)

    def _metrics(self, request: Request, exchange: Exchange) -> None:
        del request
        exchange.send(200, self._page.render(self.pacer.engine.stats), CONTENT_TYPE)

    def _models(self, request: Request, exchange: Exchange) -> None:
        del request
        base = self._settings.model
        cards = [self._card(base, base, None, self._settings.engine.context_tokens)]
        cards += [self._card(name, f"/adapters/{name}", base, None) for name in self._settings.adapters]
        exchange.send(200, msgspec.json.encode({"object": "list", "data": cards}))

    def _card(self, name: str, root: str, parent: str | None, longest: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": longest,
            "permission": [],
        }

    def _tokenize(self, request: Request, exchange: Exchange) -> None:
        body = read(TokenizeBody, request.body)
        self._generation.adapter_of(body.model)
        if body.messages is not None:
            data = render_chat(body.messages, body.tools, generation_prompt=body.add_generation_prompt)
        elif body.prompt is not None:
            data = padded(body.prompt.encode())
        else:
            raise invalid("1 validation error:\n  Field required: prompt or messages")
        ids, strings = to_ids(data), None
        if body.return_token_strs:
            starts = range(0, len(data), TOKEN_BYTES)
            strings = [data[start : start + TOKEN_BYTES].decode("utf-8", "replace") for start in starts]
        answer = {
            "count": len(ids),
            "max_model_len": self._settings.engine.context_tokens,
            "tokens": ids,
            "token_strs": strings,
        }
        exchange.send(200, msgspec.json.encode(answer))


def _healthy(request: Request, exchange: Exchange) -> None:
    del request
    exchange.send(200, b"", b"")


def _version(request: Request, exchange: Exchange) -> None:
    del request
    exchange.send(200, b'{"version":"%s"}' % VERSION)
