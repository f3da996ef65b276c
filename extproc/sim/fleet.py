"""Many simulated engines in one event loop, each on its own port."""

import asyncio
import time
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from extproc.sim.control import Control
from extproc.sim.core import Endpoint
from extproc.sim.settings import KvEvents, SimSettings
from extproc.sim.surface import Surface
from extproc.sim.wire import Connection, Exchange, Request

if TYPE_CHECKING:
    import zmq

    from extproc.sim.publishing import Publisher, Sockets

    Context = zmq.Context[zmq.Socket[bytes]]

_LAST_PORT = 65_535


class SimEndpoint:
    """One simulated engine and the address it listens on. The address outlives restarts.

    Attributes:
        port: of its HTTP server.
        context: ZMQ's, which an engine that publishes its events needs before it is started.
    """

    def __init__(self, settings: SimSettings, host: str, port: int) -> None:
        self._settings = settings
        self.context: Context | None = None
        self._sockets: Sockets | None = None
        self._host = host
        self.port = port
        self._control = Control(self._restart_soon, settings.traits)
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._surface: Surface | None = None

    @property
    def address(self) -> str:
        """`host:port`, with the port that was found free if 0 was asked for."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self.port}"

    @property
    def surface(self) -> Surface:
        """The engine that serves at present.

        Raises:
            RuntimeError: the endpoint was not started.
        """
        if self._surface is None:
            raise RuntimeError("the endpoint is not started; await start() first")
        return self._surface

    async def start(self) -> None:
        """Listen, with an empty engine.

        Raises:
            OSError: the port is taken.
        """
        loop, settings = asyncio.get_running_loop(), self._settings
        publishers = await self._open_sockets()
        self._surface = surface = Surface(
            settings, self._control, time.monotonic, loop.call_later, publishers, self.event_endpoints
        )
        try:
            self._listener = await loop.create_server(self._connection, self._host, self.port, reuse_address=True)
        except OSError:
            surface.stop()
            raise
        self.port = self._listener.sockets[0].getsockname()[1]

    @property
    def event_endpoints(self) -> list[Endpoint]:
        """Where the events of each rank are to be had over ZMQ, known after the start; none if they are not."""
        return [] if self._sockets is None else [self._sockets.endpoint(n) for n in range(self._settings.dp_ranks)]

    def where(self) -> dict[str, str | list[str]]:
        """Return where everything of this engine is to be found, by name."""
        found: dict[str, str | list[str]] = {"address": self.address}
        endpoints = self.event_endpoints
        if endpoints:
            found["kv_events"] = [one.address for one in endpoints]
        if replays := [f"tcp://*:{one.replay_port}" for one in endpoints if one.replay_port is not None]:
            found["kv_replay"] = replays
        return found

    async def _open_sockets(self) -> "list[Publisher]":
        """Open what events go out by, on the ports of the first start.

        Raises:
            OSError: a port is taken.
        """
        settings = self._settings
        if self.context is None or settings.events is None:
            return []
        if self._sockets is None:
            # Not at the top: an engine that tells of no events does without ZMQ, which takes 0.08 s to import.
            from extproc.sim.publishing import Sockets

            self._sockets = Sockets(self.context, settings.events, self._host, settings.dp_ranks)
        publishers = await self._sockets.open()
        for publisher in publishers:
            publisher.start(replay_topic=settings.about.replay_topic)
        return publishers

    async def stop(self) -> None:
        """Refuse connections, close those that are open, stop the engine."""
        if self._restarting is not None:
            self._restarting.cancel()
            self._restarting = None
        await self._go_down()

    async def _go_down(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        connections = tuple(self._connections)
        for connection in connections:
            connection.end()
        for connection in connections:
            await connection.lost.wait()
        if listener is not None:
            await listener.wait_closed()
        self.surface.stop()

    def _connection(self) -> Connection:
        settings = self._settings
        return Connection(self._serve, self._connections, settings.max_body_bytes, settings.keep_alive_s)

    def _serve(self, request: Request, exchange: Exchange) -> None:
        self.surface.handle(request, exchange)

    def _restart_soon(self, down_s: float) -> None:
        if self._restarting is None:
            self._restarting = asyncio.get_running_loop().create_task(self._restart(down_s))

    async def _restart(self, down_s: float) -> None:
        await self._go_down()
        await asyncio.sleep(down_s)
        await self.start()
        self._restarting = None


class SimFleet:
    """Simulated engines for a test or a demo: `async with SimFleet(engines=4) as fleet: fleet.addresses`.

    Args:
        engines: how many.
        settings: what each of them is.
        host: address to listen on.
        port: 0 takes free ports; else the first of consecutive ones.
    """

    def __init__(
        self, engines: int = 1, settings: SimSettings | None = None, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """Make the engines. Raises ValueError for no engines, or ports that do not exist."""
        if engines < 1:
            raise ValueError(f"{engines} engines: at least one is needed")
        if not 0 <= port <= port + engines - 1 <= _LAST_PORT:
            raise ValueError(f"port {port} for {engines} engines: ports end at {_LAST_PORT}; 0 takes free ones")
        settings = settings or SimSettings()
        self._publishes = settings.publishes
        self._context: Context | None = None
        self.endpoints = [SimEndpoint(_nth(settings, n), host, port + n if port else 0) for n in range(engines)]

    @property
    def addresses(self) -> list[str]:
        """`host:port` of every engine."""
        return [endpoint.address for endpoint in self.endpoints]

    async def start(self) -> None:
        """Start every engine; if one cannot listen, none is left running.

        Raises:
            OSError: a port is taken.
        """
        if self._publishes:
            import zmq

            self._context = zmq.Context()
        started: list[SimEndpoint] = []
        try:
            for endpoint in self.endpoints:
                endpoint.context = self._context
                await endpoint.start()
                started.append(endpoint)
        except OSError:
            for endpoint in started:
                await endpoint.stop()
            self._close_context()
            raise

    async def stop(self) -> None:
        """Stop every engine."""
        for endpoint in self.endpoints:
            await endpoint.stop()
        self._close_context()

    def _close_context(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _nth(settings: SimSettings, number: int) -> SimSettings:
    """Return the settings of one engine of a fleet: ports of events follow each other, ranks first."""
    if not isinstance(settings.kv_events, KvEvents):
        return settings
    return replace(settings, kv_events=settings.kv_events.shifted(number * settings.dp_ranks))
