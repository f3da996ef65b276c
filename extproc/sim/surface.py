"""The HTTP surface of one engine: finds the route, and answers refusals in the engine's own words."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from extproc.sim.adapters import Adapters
from extproc.sim.control import Control
from extproc.sim.core import Core, Endpoint
from extproc.sim.pacer import Pacer, Schedule
from extproc.sim.ranks import Ranks
from extproc.sim.refusals import Refusal
from extproc.sim.settings import SimSettings
from extproc.sim.sglang import Sglang
from extproc.sim.telling import Telling
from extproc.sim.trtllm import Trtllm
from extproc.sim.vllm import Vllm
from extproc.sim.wire import Exchange, Request

if TYPE_CHECKING:
    from extproc.sim.publishing import Publisher


class Surface:
    """Serves one engine from its start to its end; a restart makes a new one."""

    def __init__(
        self,
        settings: SimSettings,
        control: Control,
        clock: Callable[[], float],
        schedule: Schedule,
        publishers: "Sequence[Publisher]" = (),
        endpoints: Sequence[Endpoint] = (),
    ) -> None:
        """Start the engine, with an empty cache.

        Args:
            settings: what it is.
            control: its faults.
            clock: monotonic seconds.
            schedule: calls back later.
            publishers: sockets for the events of each rank, if they go out over ZMQ.
            endpoints: where those sockets are, for engines that tell of it.
        """
        self._settings = settings
        self._control = control
        ranks = Ranks(settings, clock, schedule)
        telling = None
        if settings.events is not None:
            telling = Telling(settings, settings.events, ranks, publishers, time.time, os.urandom(32))
        adapters = Adapters(settings.model, settings.adapters)
        self.core = core = Core(settings, ranks, adapters, time.time(), telling)
        control.apply(core)
        self._engine: Vllm | Trtllm | Sglang
        if settings.about.engine == "trtllm":
            self._engine = Trtllm(core, control)
        elif settings.about.engine == "sglang":
            self._engine = Sglang(core, control, endpoints)
        else:
            self._engine = Vllm(core, control, endpoints)

    @property
    def pacer(self) -> Pacer:
        """The first rank's."""
        return self.core.ranks.first.pacer

    def stop(self) -> None:
        """Stop the engine and close its sockets."""
        self.core.ranks.stop()
        if self.core.telling is not None:
            self.core.telling.stop()

    def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer `request`; the errors are the engine's."""
        if not exchange.open:
            return  # the client left while the server was frozen
        path = request.path
        try:
            if self._settings.control and path.startswith(b"/sim/"):
                if not self._control.handle(request, exchange, self.core):
                    exchange.send(404, b'{"detail":"Not Found"}')
                return
            if self._control.holds(lambda: self.handle(request, exchange)):
                return
            methods = self._engine.routes.get(path)
            if methods is None:
                exchange.send(404, b'{"detail":"Not Found"}')
            elif request.method not in methods:
                allowed = (b"allow", b", ".join(methods))
                exchange.send(405, b'{"detail":"Method Not Allowed"}', headers=(allowed,))
            else:
                methods[request.method](request, exchange)
        except Refusal as refusal:
            exchange.send(*self._engine.dialect.error(refusal))
