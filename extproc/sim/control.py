"""Misbehaviour on demand: what `/sim/*` can make an engine do, for tests of what stands in front of it."""

from collections.abc import Callable
from random import Random
from typing import Literal

import msgspec

from extproc.sim.answers import Fault
from extproc.sim.bodies import read
from extproc.sim.core import Core
from extproc.sim.refusals import bad_value
from extproc.sim.traits import Mode, Traits
from extproc.sim.wire import Exchange, Request


class FreezeBody(msgspec.Struct):
    """`POST /sim/freeze`: stop the engine only, or every answer of the HTTP server."""

    frozen: bool = True
    scope: Literal["engine", "http"] = "engine"


class FailBody(msgspec.Struct):
    """`POST /sim/fail`: how the next `count` generation requests fail.

    `status` answers with that status, `reset` resets the connection at once; `stream`, `cut` and `end` do it after
    `after_tokens` tokens of a stream, with vLLM's error event, by a reset, or as if the answer were whole, but without
    a reason and `[DONE]`. `empty` ends the answer with its first token, which says nothing.
    """

    count: int = 1
    mode: Mode = "status"
    status: int = 500
    after_tokens: int = 1


class SlowBody(msgspec.Struct):
    """`POST /sim/slow`: how many times longer a step lasts; 1 is healthy."""

    factor: float = 1.0


class RestartBody(msgspec.Struct):
    """`POST /sim/restart`: wall seconds for which connections are refused before the engine is back, empty."""

    down_s: float = 0.0


class EventsBody(msgspec.Struct):
    """`POST /sim/kv_events`: what becomes of the next batches of KV events.

    `drop` batches are lost on the way, though they can be replayed, unless `forget` says otherwise; `hold` keeps
    batches back until it is taken off.
    """

    drop: int = 0
    forget: bool = False
    hold: bool = False


class Control:
    """The state of an engine's faults; lives as long as the endpoint, restarts included.

    Attributes:
        traits: how the engine is at present.
    """

    def __init__(
        self, restart: Callable[[float], None], traits: Traits | None = None, draw: Callable[[], float] | None = None
    ) -> None:
        """`restart` is called with seconds to stay down; `draw` gives numbers of [0, 1), its own when None."""
        self.traits = traits or Traits()
        self._draw = draw or Random().random
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
        if self._failing.count > 0:
            self._failing.count -= 1
            return self._failing
        mode = self.traits.failing(self._draw)
        if mode is None:
            return None
        return FailBody(mode=mode, status=self.traits.fail_status, after_tokens=self.traits.after_tokens)

    def handle(self, request: Request, exchange: Exchange, core: Core) -> bool:
        """Answer a route under `/sim/`; False if there is none of that name.

        Raises:
            Refusal: the body is not of the route's shape.
        """
        body = request.body or b"{}"
        match request.path:
            case b"/sim/freeze":
                self._freeze(read(FreezeBody, body), core)
            case b"/sim/fail":
                self._failing = read(FailBody, body)
            case b"/sim/slow":
                factor = read(SlowBody, body).factor
                for rank in core.ranks:
                    rank.engine.slowdown = factor
            case b"/sim/traits":
                self._change(_checked(read(Traits, body)), core)
            case b"/sim/kv_events":
                _disturb(read(EventsBody, body), core)
            case b"/sim/reset_prefix_cache":
                exchange.send(200, msgspec.json.encode({"success": core.ranks.reset_prefix_cache()}))
                return True
            case b"/sim/restart":
                down_s = read(RestartBody, body).down_s
                exchange.send(200, b"{}")
                self._restart(down_s)
                return True
            case b"/sim/state":
                exchange.send(200, msgspec.json.encode(self._state(core)))
                return True
            case _:
                return False
        exchange.send(200, b"{}")
        return True

    def apply(self, core: Core) -> None:
        """Give the engine its speed."""
        for rank in core.ranks:
            rank.engine.prefill_factor = self.traits.prefill_factor
            rank.engine.decode_factor = self.traits.decode_factor

    def _change(self, traits: Traits, core: Core) -> None:
        self.traits = traits
        self.apply(core)

    def _freeze(self, body: FreezeBody, core: Core) -> None:
        if body.scope == "engine":
            (core.ranks.freeze if body.frozen else core.ranks.thaw)()
        elif body.frozen:
            self._hung = self._hung or []
        else:
            held, self._hung = self._hung or [], None
            for serve in held:
                serve()

    def _state(self, core: Core) -> dict[str, float | int]:
        engines = [rank.engine for rank in core.ranks]
        stats = [engine.stats for engine in engines]
        return {
            "engine_s": core.ranks.first.pacer.now(),
            "steps": sum(one.steps for one in stats),
            "busy_s": sum(one.busy_s for one in stats),
            "live": core.ranks.live,
            "held": len(self._hung or ()),
            "blocks_free": sum(engine.pool.free for engine in engines),
            "blocks_cached": sum(engine.pool.cached for engine in engines),
            "preemptions": sum(one.preemptions for one in stats),
            "prompt_tokens": sum(one.prompt_tokens for one in stats),
            "prompt_tokens_cached": sum(one.prompt_tokens_cached for one in stats),
        }


def _disturb(body: EventsBody, core: Core) -> None:
    """Raises Refusal, 400, when the engine tells of no events."""
    if core.telling is None:
        raise bad_value("this engine tells of no KV events; start it with --kv-events")
    core.telling.lose(body.drop, forget=body.forget)
    core.telling.hold(back=body.hold)


def _checked(traits: Traits) -> Traits:
    """Raises Refusal, 400, for what no engine can be."""
    try:
        traits.check()
    except ValueError as error:
        raise bad_value(str(error)) from error
    return traits


def stream_fault(failure: FailBody | None) -> Fault | None:
    """Return the fault that `failure` puts into a stream, if it is of that kind."""
    if failure is None or failure.mode not in ("stream", "cut", "end"):
        return None
    return Fault(max(1, failure.after_tokens), failure.mode)
