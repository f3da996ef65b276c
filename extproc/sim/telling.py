"""Where the events of an engine's caches go: into ZMQ sockets, or into a buffer that somebody empties."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from extproc.sim import encodings
from extproc.sim.block_keys import keys_of
from extproc.sim.block_log import BlockLog, Event
from extproc.sim.iterations import EventBuffer
from extproc.sim.ranks import Ranks
from extproc.sim.settings import KvEvents, SimSettings

if TYPE_CHECKING:
    from extproc.sim.publishing import Publisher


class Telling:
    """Connects the caches of all ranks of one start with where their events go.

    Attributes:
        buffer: TensorRT-LLM's events until they are taken; None for the others.
    """

    def __init__(
        self,
        settings: SimSettings,
        events: KvEvents,
        ranks: Ranks,
        publishers: "Sequence[Publisher]",
        wall: Callable[[], float],
        entropy: bytes,
    ) -> None:
        """Let the ranks tell of their caches.

        Args:
            settings: of the engine.
            events: how they are told of.
            ranks: whose.
            publishers: one a rank; none for TensorRT-LLM.
            wall: seconds since the epoch.
            entropy: 32 random bytes of this start.
        """
        self._profile = profile = settings.about
        self._wall = wall
        self._publishers = publishers
        engine = settings.engine
        self.buffer: EventBuffer | None = None
        if profile.engine == "trtllm":
            self.buffer = EventBuffer(engine.blocks - 1, engine.context_tokens, len(ranks), events.buffer)
        for rank in ranks:
            keys = keys_of(profile, entropy, int_hashes=events.int_hashes)
            tell = partial(self._tell, rank.index)
            rank.engine.watch_blocks(BlockLog(profile.engine, keys, engine.block_size, tell))

    def lose(self, batches: int, *, forget: bool) -> None:
        """Let the next `batches` of every rank be lost on the way; `forget` keeps them from being replayed too.

        TensorRT-LLM replays nothing, and its ranks share one buffer.
        """
        if self.buffer is not None:
            self.buffer.losing = batches
        for publisher in self._publishers:
            publisher.losing, publisher.forgetting = batches, forget

    def hold(self, *, back: bool) -> None:
        """Keep batches from going out, or let them go. What TensorRT-LLM tells is held anyway until it is taken."""
        for publisher in self._publishers:
            publisher.hold(back=back)

    def stop(self) -> None:
        """Close what is open."""
        for publisher in self._publishers:
            publisher.close()

    def _tell(self, rank: int, events: list[Event]) -> None:
        if self.buffer is not None:
            self.buffer.publish(events, rank)
        else:
            self._publishers[rank].publish(encodings.batch(self._profile, events, self._wall(), rank))
