"""Steady requests in the background of a test, for as long as the test needs them, and what became of each."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from extproc.sim import load
from extproc.sim.load import LoadSettings, Outcome
from extproc.sim.workload import Conversation, Message, Turn, text
from tests.acceptance.phases import said
from tests.acceptance.state.front import Front
from tests.waiting import until

_SLICE_S = 0.5
_OPENINGS = 24
_SHOWN = 20


class Traffic:
    """Use as an async context manager: requests flow within the block; on exit the last are awaited, none may fail.

    Half of the questions are streamed, all stand behind one of a few shared system prompts, some are of a session.

    Attributes:
        outcomes: what became of the requests that ended.
    """

    def __init__(self, fronts: Sequence[Front], rate: float, sessions: int = 20) -> None:
        """So many requests a second, spread over the gateways."""
        self.outcomes: list[Outcome] = []
        self._urls = itertools.cycle([front.url for front in fronts])
        self._rate = rate
        self._sessions = sessions
        self._rng = random.Random(5)
        self._openings = [Message("system", text(self._rng, 500)) for _ in range(_OPENINGS)]
        self._slices: list[asyncio.Task[load.Run]] = []
        self._numbers = itertools.count()
        self._sending: asyncio.Task[None] | None = None
        self._began_s = 0.0

    @property
    def failed(self) -> list[Outcome]:
        """Requests that were not answered as they should be."""
        return [one for one in self.outcomes if one.failure is not None]

    async def answered(self, more: int) -> None:
        """Wait until so many more requests were answered."""
        wanted = len(self.outcomes) - len(self.failed) + more
        await until(lambda: len(self.outcomes) - len(self.failed) >= wanted)

    async def __aenter__(self) -> Self:
        self._began_s = asyncio.get_running_loop().time()
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send no more and wait for what is out. Raises AssertionError when any request failed."""
        assert self._sending is not None
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        await asyncio.gather(*self._slices)
        assert not self.failed, (
            f"{len(self.failed)} of {len(self.outcomes)}:\n{said(self.failed[:_SHOWN], self._began_s)}"
        )

    async def _send(self) -> None:
        while True:
            conversations = [self._question(n / self._rate) for n in range(round(self._rate * _SLICE_S))]
            settings = LoadSettings(timeout_s=30.0, limit_s=60.0)
            sending = load.run(next(self._urls), conversations, settings, self.outcomes.append)
            self._slices.append(asyncio.create_task(sending))
            await asyncio.sleep(_SLICE_S)

    def _question(self, at_s: float) -> Conversation:
        number = next(self._numbers)
        session = f"steady-{number % self._sessions}" if number % 3 == 0 else ""
        turn = Turn(text(self._rng, 60), 16, stream=number % 2 == 0, think_s=0.0)
        return Conversation(at_s, "steady", session, (self._rng.choice(self._openings),), (turn,))
