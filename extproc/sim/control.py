"""Misbehaviour on demand: what `/sim/*` can make an engine do, for tests of what stands in front of it."""

from collections.abc import Callable
from typing import Literal

import msgspec

from extproc.sim.answers import Fault
from extproc.sim.bodies import read
from extproc.sim.pacer import Pacer
from extproc.sim.wire import Exchange, Request


class FreezeBody(msgspec.Struct):
    """`POST /sim/freeze`: stop the engine only, or every answer of the HTTP server."""

    frozen: bool = True
    scope: Literal["engine", "http"] = "engine"


class FailBody(msgspec.Struct):
    """`POST /sim/fail`: how the next `count` generation requests fail.

    `status` answers with that status, `reset` resets the connection at once; `stream` and `cut` do it after
    `after_tokens` tokens of a stream, with vLLM's error event or by a reset.
    """

    count: int = 1
    mode: Literal["status", "reset", "stream", "cut"] = "status"
    status: int = 500
    after_tokens: int = 1


class SlowBody(msgspec.Struct):
    """`POST /sim/slow`: how many times longer a step lasts; 1 is healthy."""

    factor: float = 1.0


class RestartBody(msgspec.Struct):
    """`POST /sim/restart`: wall seconds for which connections are refused before the engine is back, empty."""

    down_s: float = 0.0


class Control:
    """The state of an engine's faults; lives as long as the endpoint, restarts included."""

    def __init__(self, restart: Callable[[float], None]) -> None:
        self._restart = restart
        self._failing = FailBody(count=0)
        self._hung: list[Callable[[], None]] | None = None

    def holds(self, serve: Callable[[], None]) -> bool:
        """While HTTP is frozen, keep `serve` for later and return True."""
        if self._hung is None:
            return False
        self._hung.append(serve)
        return True

    def next_failure(self) -> FailBody | None:
        """Return how the generation request at hand fails; None if it does not."""
        if self._failing.count <= 0:
            return None
        self._failing.count -= 1
        return self._failing

    def handle(self, request: Request, exchange: Exchange, pacer: Pacer) -> bool:
        """Answer a route under `/sim/`; False if there is none of that name.

        Raises:
            Refusal: the body is not of the route's shape.
        """
        body = request.body or b"{}"
        match request.path:
            case b"/sim/freeze":
                self._freeze(read(FreezeBody, body), pacer)
            case b"/sim/fail":
                self._failing = read(FailBody, body)
            case b"/sim/slow":
                pacer.engine.slowdown = read(SlowBody, body).factor
            case b"/sim/reset_prefix_cache":
                exchange.send(200, msgspec.json.encode({"success": pacer.engine.reset_prefix_cache()}))
                return True
            case b"/sim/restart":
                down_s = read(RestartBody, body).down_s
                exchange.send(200, b"{}")
                self._restart(down_s)
                return True
            case b"/sim/state":
                exchange.send(200, msgspec.json.encode(self._state(pacer)))
                return True
            case _:
                return False
        exchange.send(200, b"{}")
        return True

    def _freeze(self, body: FreezeBody, pacer: Pacer) -> None:
        if body.scope == "engine":
            (pacer.freeze if body.frozen else pacer.thaw)()
        elif body.frozen:
            self._hung = self._hung or []
        else:
            held, self._hung = self._hung or [], None
            for serve in held:
                serve()

    def _state(self, pacer: Pacer) -> dict[str, float | int]:
        engine, stats = pacer.engine, pacer.engine.stats
        return {
            "engine_s": pacer.now(),
            "steps": stats.steps,
            "busy_s": stats.busy_s,
            "live": engine.live,
            "held": len(self._hung or ()),
            "blocks_free": engine.pool.free,
            "blocks_cached": engine.pool.cached,
            "preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "prompt_tokens_cached": stats.prompt_tokens_cached,
        }


def stream_fault(failure: FailBody | None) -> Fault | None:
    """Return the fault that `failure` puts into a stream, if it is of that kind."""
    if failure is None or failure.mode not in ("stream", "cut"):
        return None
    return Fault(max(1, failure.after_tokens), cut=failure.mode == "cut")
