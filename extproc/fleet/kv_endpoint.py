"""All sources of KV events of one endpoint: opened and closed as its state says, read, and told of."""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, Protocol

import aiohttp

from extproc.clock import Clock
from extproc.config import EventSettings, ProfileMode
from extproc.errors import EngineError
from extproc.fleet.kv_address import check
from extproc.fleet.kv_chain import Chain
from extproc.fleet.kv_drain import DrainSource, drain
from extproc.fleet.kv_profile import Counts, Engine, Profile
from extproc.fleet.kv_source import ZmqSource
from extproc.fleet.kv_telling import Telling
from extproc.fleet.kv_zmq import Sockets
from extproc.state.endpoint import EndpointState, Source
from extproc.telemetry.kv_metrics import ProfileView

_MOST_RANKS: Final = 256
_RETRY_S: Final = 10.0
"""Pause after a source could not be opened."""

_log = logging.getLogger(__name__)


class _Reading(Protocol):
    """`ZmqSource` or `DrainSource`."""

    @property
    def profiles(self) -> Mapping[int, Profile]: ...

    @property
    def in_step(self) -> bool: ...

    def restart(self, engine: Engine, now: float) -> None: ...

    def doubt(self) -> None: ...

    def steps(self, engine: Engine, now: float, wall: float) -> Iterator[None]: ...

    def close(self) -> None: ...


class Wanted(NamedTuple):
    """What a pool wants of its endpoints' events.

    Attributes:
        mode: mode of its profiles.
        settings: where its engines publish, as configured.
    """

    mode: ProfileMode
    settings: EventSettings


class KvEndpoint:
    """One endpoint whose events this keeper reads.

    Attributes:
        state: as it was last seen.
    """

    def __init__(
        self,
        pool: str,
        endpoint: str,
        state: EndpointState,
        wanted: Wanted,
        sockets: Sockets,
        counts: Counts,
        clock: Clock,
    ) -> None:
        """Open its sources.

        Args:
            pool: pool name.
            endpoint: endpoint id.
            state: its state.
            wanted: what its pool wants.
            sockets: opens sockets.
            counts: what happens is counted here.
            clock: time.
        """
        self._pool = pool
        self._endpoint = endpoint
        self._wanted = wanted
        self._sockets = sockets
        self._counts = counts
        self._clock = clock
        self._readings: dict[Source, _Reading] = {}
        self._failed: set[Source] = set()
        self._retry_at = 0.0
        self._shut: list[Telling] = []
        self._calls: dict[Source, asyncio.Task[bytes]] = {}
        self._going: Iterator[None] | None = None
        self._see(state)

    def see(self, state: EndpointState, wanted: Wanted) -> None:
        """Open and close sources as a newer state says; those of another host, or other settings, are others."""
        before, self._wanted = self._wanted, wanted
        if state is self.state and wanted == before and not self._failed:
            return
        if _host(state) != _host(self.state) or wanted.settings != before.settings:
            for source in list(self._readings):
                self._close(source)
        self._see(state)

    def _see(self, state: EndpointState) -> None:
        self.state = state
        ranks = max(1, state.ranks, len(state.sources))
        copies = state.kind == "vllm"
        self._engine = Engine(self._wanted.mode, state.started_at, state.block_tokens, state.kv_blocks // ranks, copies)
        for source in self._readings.keys() - set(state.sources):
            self._close(source, others=len(state.sources) > 0)
        now = self._clock.monotonic()
        if now >= self._retry_at:
            self._failed.clear()
        for source in state.sources:
            if source not in self._readings and source not in self._failed:
                self._open(source, now)

    def _open(self, source: Source, now: float) -> None:
        try:
            reading = self._reading(source, now)
            if reading is not None:
                self._readings[source] = reading
        except EngineError as error:
            self._failed.add(source)
            self._retry_at = now + _RETRY_S
            self._shut_rank(source.rank)
            _log.warning(
                "an engine's KV events cannot be read: its profile stays estimated",
                extra={"pool": self._pool, "endpoint": self._endpoint, "rank": source.rank, "error": str(error)},
            )

    def _reading(self, source: Source, now: float) -> _Reading | None:
        """Open a source; None for one of a way that only newer keepers know. Raises EngineError when it cannot be."""
        if not 0 <= source.rank < _MOST_RANKS:
            raise EngineError(f"rank {source.rank} is beyond the {_MOST_RANKS} data-parallel ranks that are read")
        if source.way in {"drain", "zmq"}:
            check(source, _host(self.state), self._wanted.settings)
        if source.way == "drain":
            return DrainSource(self._endpoint, self._counts)
        if source.way == "zmq":
            return ZmqSource(self._endpoint, source, _host(self.state), self._sockets, self._counts, now)
        return None

    def _close(self, source: Source, *, others: bool = False) -> None:
        """Close a source; `others` says that the engine has other ranks, and this one no more."""
        reading = self._readings.pop(source)
        reading.close()
        if call := self._calls.pop(source, None):
            call.cancel()
        for rank in reading.profiles:
            self._shut_rank(rank, self.state.block_tokens if others else 0)

    def _shut_rank(self, rank: int, block_tokens: int = 0) -> None:
        """Have the workers use the estimated profile, also in place of what another keeper told.

        An endpoint's profile is precise while those of all its ranks are. So a rank that is no more has one with
        nothing in it, of blocks of this size.
        """
        chain = Chain()
        shut = Telling(self._endpoint, rank, chain)
        if block_tokens:
            chain.begin(from_start=True, block_tokens=block_tokens)
            shut.begin(self.state.started_at)
        else:
            shut.end(self.state.started_at)
        self._shut.append(shut)

    def drain(self, session: aiohttp.ClientSession, *, allowed: bool) -> None:
        """Pass on what calls brought, and call again where it is time, if this keeper is the one who may."""
        now = self._clock.monotonic()
        for source, reading in self._readings.items():
            if not isinstance(reading, DrainSource):
                continue
            call = self._calls.get(source)
            if call is not None and call.done():
                del self._calls[source]
                reading.answered(_answer(call), now)
                call = None
            if call is None and allowed and now >= reading.due_at:
                called = drain(session, self.state.destination, source.endpoint)
                self._calls[source] = asyncio.create_task(called, name=f"drain {self.state.destination}")

    @property
    def is_behind(self) -> bool:
        """The last turn ended before all was taken in."""
        return self._going is not None

    def turn(self, most_s: float) -> Iterator[None]:
        """Take in what came, in steps of about 1 ms, for about `most_s` seconds; the next turn goes on from there.

        An engine that tells very much would hold up what the others tell otherwise.
        """
        if self._going is None:
            self._going = self._steps()
        until = time.perf_counter() + most_s
        for _ in self._going:
            yield
            if time.perf_counter() >= until:
                return
        self._going = None

    def _steps(self) -> Iterator[None]:
        for source, reading in list(self._readings.items()):
            now = self._clock.monotonic()
            for _ in reading.steps(self._engine, now, self._clock.wall()):
                yield
                if self._readings.get(source) is not reading:  # closed since the last turn
                    break
            if self._readings.get(source) is not reading:
                continue
            for profile in reading.profiles.values():
                if not profile.settle(self._engine, now, in_step=reading.in_step):
                    reading.restart(self._engine, now)
            yield

    def tellings(self) -> list[Telling]:
        """What is to be told; profiles that ended first."""
        self._shut = [each for each in self._shut if each.is_due]
        return [*self._shut, *(profile.telling for profile in self._profiles())]

    def tell_anew(self) -> None:
        """Tell everything again, because it may have been lost, or another keeper may have told its own."""
        for profile in self._profiles():
            if profile.telling.is_open:
                profile.telling.begin(self.state.started_at)
            else:
                profile.telling.end(self.state.started_at)
        for source in self._failed:
            self._shut_rank(source.rank)

    def put_aside(self) -> None:
        """Have workers use the estimated profile until what came while this keeper stood still is taken in."""
        now = self._clock.monotonic()
        for reading in self._readings.values():
            reading.doubt()
        for profile in self._profiles():
            profile.put_aside(self._engine, now)

    def view(self) -> ProfileView:
        """How it stands, for metrics."""
        profiles = list(self._profiles())
        return ProfileView(
            in_step=bool(profiles) and all(reading.in_step for reading in self._readings.values()),
            used=bool(profiles) and all(profile.telling.is_open for profile in profiles),
            partial=any(profile.is_partial for profile in profiles),
            blocks=sum(profile.chain.count for profile in profiles),
            lag_s=max((profile.lag_s for profile in profiles), default=0.0),
        )

    async def close(self) -> list[Telling]:
        """Stop reading; returns what is still to be told, unless the endpoint is another keeper's now."""
        calls = list(self._calls.values())
        for source in list(self._readings):
            self._close(source)
        if calls:
            await asyncio.wait(calls)
        return self._shut

    def _profiles(self) -> Iterator[Profile]:
        for reading in self._readings.values():
            yield from reading.profiles.values()


def _answer(call: asyncio.Task[bytes]) -> bytes | None:
    """What a call brought; None when the engine did not answer it."""
    try:
        return call.result()
    except (EngineError, asyncio.CancelledError):
        return None


def _host(state: EndpointState) -> str:
    return state.destination.rpartition(":")[0].removeprefix("[").removesuffix("]")
