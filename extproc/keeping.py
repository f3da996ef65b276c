"""Sees that conversations keep their version when weights change, whatever becomes of the store: all workers know them.

Each worker remembers which conversations it sent where. When weights change it looks which of them would go elsewhere
now, and tells all workers of those: they are few, and told once. Whatever else arrives began later, and goes by the
weights, with the store or without it. What was told is told again now and then while a conversation goes on.

Not all workers see new weights at the same moment: what begins in the first second still goes by those before.
"""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Final

from extproc import versions
from extproc.clock import Clock
from extproc.config import Config
from extproc.errors import StoreError
from extproc.joining import in_slices
from extproc.rollout.split import Choice, Split, chosen
from extproc.state.feed import MOST_KEPT, Kept
from extproc.state.knowledge import PoolKnowledge
from extproc.surroundings import Publisher, Surroundings
from extproc.versions import Around

LOOK_S: Final = 0.05
"""Until the others know, conversations are found by their pins."""
FRESH_S: Final = 1.0
"""Workers look at rollouts four times a second. Until all have seen new weights, what begins goes by those before."""
_AGAIN_S: Final = 0.5
"""How soon a store that does not answer is asked again whether it does."""
_AGAIN: Final = 0.25
"""Part of a pin's life after which all are told again of a conversation that goes on."""


def used(choice: Choice, known: PoolKnowledge, config: Config, now: float) -> Kept | None:
    """Remember where a turn went; returns what the other workers should be told.

    What a tester asked for, and what is served elsewhere only while its pool has no endpoint, says nothing of where a
    conversation belongs.

    Args:
        choice: the version that serves the turn.
        known: what is known of its pool.
        config: current configuration.
        now: when it was decided, by this worker's clock.
    """
    if choice.why not in {"weight", "running"} or not versions.is_conversation(choice):
        return None
    conversations = known.conversations
    conversations.used(choice.digest, now)
    if choice.why != "running" or not _due(choice.digest, known, config, now):
        return None
    conversations.told(choice.digest, now)
    return Kept(choice.digest)


class Keeping:
    """Tells the others of this worker's conversations when weights change, and knows when all surely saw the change.

    Args:
        around: has the versions, and what is known; its `fresh` is answered here.
        publisher: tells the others.
        clock: that of the decisions.
    """

    def __init__(self, around: Surroundings, publisher: Publisher, clock: Clock) -> None:
        self._around = around
        self._publisher = publisher
        self._clock = clock
        self._seen: Mapping[str, Split] = {}
        self._changes: dict[str, Split] = {}
        self._fresh: dict[str, float] = {}
        around.fresh = self.fresh

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    def fresh(self, model: str) -> bool:
        """See `Surroundings.fresh`."""
        self._notice()
        return model in self._fresh

    def _notice(self) -> None:
        splits = self._around.fleet.splits
        if splits is self._seen:
            return
        until = self._clock.monotonic() + FRESH_S
        for name, split in splits.items():
            before = self._seen.get(name)
            if split != before:
                self._changes[name] = split
            if before is None or split.weights != before.weights:
                self._fresh[name] = until
        self._seen = splits

    async def look(self) -> None:
        """Tell what follows from a change of the weights, if there was one."""
        self._notice()
        changes, self._changes = self._changes, {}
        around = Around(self._around.fleet, self._around.knowledge, self._around.config)
        for split in changes.values():
            await in_slices(self._changed(split, around))
        if any(until <= self._clock.monotonic() for until in self._fresh.values()):
            await self._settle()

    async def _settle(self) -> None:
        """Weights that changed long enough ago hold for all. While the store is away some may not have seen them."""
        now = self._clock.monotonic()
        try:
            await self._around.store.ping()
        except StoreError:
            self._fresh = {name: max(until, now + _AGAIN_S) for name, until in self._fresh.items()}
            return
        self._fresh = {name: until for name, until in self._fresh.items() if until > now}

    def _changed(self, split: Split, around: Around) -> Iterator[None]:
        """Go through the conversations of one model, 4 us each: 0.3 s for as many as are remembered."""
        now = self._clock.monotonic()
        for version, pool in split.pools.items():
            conversations = around.knowledge[pool].conversations
            if not any(weights.get(version, 0.0) > 0.0 for weights in (split.weights, *split.earlier)):
                # Out of use: whoever comes back here one day begins anew.
                conversations.forget()
                continue
            kept = []
            for digest in conversations.own(now - versions.life_s(around.config)):
                due = _due(digest, around.knowledge[pool], around.config, now)
                if due and _is_kept(digest, split, pool, around, now):
                    kept.append(digest)
                yield
            for at in range(0, len(kept), MOST_KEPT):
                told = b"".join(kept[at : at + MOST_KEPT])
                conversations.told(told, now)
                self._publisher.publish(pool, Kept(told))


def _is_kept(digest: bytes, split: Split, pool: str, around: Around, now: float) -> bool:
    """Whether a conversation runs in this pool although the weights of now would put it in another one."""
    choice = chosen(split, digest, "session")
    return choice.pool != pool and versions.remembered(choice, around, now)[1] == pool


def _due(digest: bytes, known: PoolKnowledge, config: Config, now: float) -> bool:
    """Whether it is long ago that all were told of a conversation."""
    return known.conversations.told_at(digest) < now - _AGAIN * config.routing.session.ttl_s
