"""Decisions that outlive their streams: each one made is settled exactly once, whatever becomes of its request."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from extproc.envoy.contract import Call, Decider, Decision
from extproc.envoy.counts import Counts

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Decisions:
    """Runs a `Decider` in tasks of its own, and holds on to them until they are done."""

    def __init__(self, decider: Decider, counts: Counts) -> None:
        self._decider = decider
        self._counts = counts
        self._background: set[asyncio.Task[Any]] = set()

    def decide(self, call: Call) -> asyncio.Task[Decision]:
        """Start a decision. It survives the cancellation of its stream, or its charge would have no owner."""
        return self._keep(self._decider.decide(call))

    def settle(self, decision: Decision, served: str) -> None:
        """Give a decision back, in the background: its stream is gone."""
        self._keep(self._settle(decision, served))

    def served(self, decision: Decision, served: str) -> None:
        """Tell who answers, in the background: the answer does not wait for it."""
        self._keep(self._decider.served(decision, served))

    def abandon(self, pending: asyncio.Task[Decision]) -> None:
        """Settle a decision as soon as it is known; its stream is gone."""
        self._counts.abandoned += 1
        self._keep(self._settle_pending(pending))

    async def _settle_pending(self, pending: asyncio.Task[Decision]) -> None:
        try:
            decision = await pending
        except Exception as error:  # noqa: BLE001  # whatever it was, nobody waits for it any more
            _log.debug("abandoned decision failed: %s", type(error).__name__)
            return
        await self._settle(decision, "")

    async def _settle(self, decision: Decision, served: str) -> None:
        try:
            await self._decider.settle(decision, served)
        except Exception:  # noqa: BLE001  # `settle` promised not to raise; a stream's end must not depend on it
            _log.exception("a decision could not be settled")
        self._counts.settled += 1

    def _keep(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def drained(self) -> None:
        """Return once nothing is being decided or settled."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
