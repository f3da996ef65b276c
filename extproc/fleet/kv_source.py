"""KV events of one rank over ZMQ: from the sockets through their order into the rank's profile."""

from collections.abc import Iterable, Iterator
from typing import Final

from extproc.engines.kv_decode import decoding
from extproc.engines.kv_layout import Layout
from extproc.errors import EngineError
from extproc.fleet.kv_address import place, replay_place
from extproc.fleet.kv_order import Action, Apply, Ask, Begin, Forget, Order, Phase
from extproc.fleet.kv_profile import Counts, Engine, Profile
from extproc.fleet.kv_zmq import Sockets
from extproc.state.endpoint import Source

_AT_A_TIME: Final = 256
"""Messages that are fetched before the next source has its turn."""
_TICK_S: Final = 0.2
"""Pause between two looks at what is overdue, and at new connections while nothing comes."""


class ZmqSource:
    """One rank of one endpoint.

    Attributes:
        profiles: its profile, by rank.
    """

    def __init__(self, endpoint: str, source: Source, host: str, sockets: Sockets, counts: Counts, now: float) -> None:
        """Subscribe.

        Args:
            endpoint: endpoint id.
            source: where the events are.
            host: IP address of the engine.
            sockets: opens sockets.
            counts: what happens is counted here.
            now: monotonic time, seconds.

        Raises:
            EngineError: the source cannot be subscribed to.
        """
        self._replay = replay_place(source.replay, host) if source.replay else ""
        self._profile = Profile(endpoint, source.rank, counts, now)
        self.profiles = {source.rank: self._profile}
        self._counts = counts
        self._layout = Layout()
        self._order = Order(replay=bool(source.replay), tally=counts.streams, room=sockets.waiting)
        self._stream = sockets.subscribe(place(source.endpoint, host), source.topic)
        self._first = self._order.begin(now)
        self._tick_at = now

    @property
    def in_step(self) -> bool:
        """Nothing is missing as far as is known, and all that came is taken in."""
        return self._order.phase is Phase.IN_STEP and not self._stream.has_more

    def doubt(self) -> None:
        """What is known may be old; numbers will tell."""

    def restart(self, engine: Engine, now: float) -> None:
        """The engine is another one: know nothing, and ask for its events from the beginning."""
        self._counts.restart += 1
        self._profile.forget(engine)
        self._first = self._order.begin(now)

    def steps(self, engine: Engine, now: float, wall: float) -> Iterator[None]:
        """Take in what came, in steps of about 1 ms.

        Args:
            engine: what is known of the engine.
            now: monotonic time, seconds.
            wall: present time, seconds since the epoch.
        """
        first, self._first = self._first, []
        yield from self._do(first, engine, now, wall)
        if not self._order.is_asking:
            self._stream.hang_up()
        for answer in self._stream.answers(_AT_A_TIME):
            if answer is None:
                actions = self._order.replay_ended(now)
            else:
                actions = self._order.replayed(answer.seq, answer.payload, now)
            yield from self._do(actions, engine, now, wall)
        frames, due = self._stream.frames(_AT_A_TIME), now >= self._tick_at
        if (frames or due) and self._stream.reconnected():
            yield from self._do(self._order.reconnected(now), engine, now, wall)
        for frame in frames:
            yield from self._do(self._order.live(frame.seq, frame.payload, now), engine, now, wall)
        if due:
            self._tick_at = now + _TICK_S
            yield from self._do(self._order.tick(now), engine, now, wall)
            self._counts.malformed += self._stream.malformed
            self._stream.malformed = 0

    def _do(self, actions: Iterable[Action], engine: Engine, now: float, wall: float) -> Iterator[None]:
        for action in actions:
            match action:
                case Apply():
                    try:
                        batch = yield from decoding(action.payload, self._layout)
                    except EngineError:
                        self._profile.lose(engine, now)
                        continue
                    yield from self._profile.apply(batch, wall)
                case Begin():
                    self._layout = Layout()
                    self._profile.begin(engine, from_start=action.from_start)
                case Forget():
                    if action.why == "gap":
                        self._counts.gap += 1
                    else:
                        self._counts.restart += 1
                    self._profile.forget(engine)
                case Ask():
                    try:
                        self._stream.ask(self._replay, action.start)
                    except EngineError:
                        # It is asked again when no answer comes.
                        self._counts.malformed += 1

    def close(self) -> None:
        """Close the sockets."""
        self._order.end()
        self._stream.close()
