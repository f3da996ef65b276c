"""KV events that are taken out by each call (TensorRT-LLM's `POST /kv_cache_events`): who calls them, and what is lost.

Only one process of the fleet may call: what one reads, no other can. So it is done under a valid lease alone, never on
the strength of an old one. There is no replay. An answer that does not go on where the last one ended shows that events
were lost, to a full buffer or to another caller, and the profile begins anew, as for one that joins late; ids that
begin again show another life of the engine.
"""

from collections.abc import Iterator
from typing import Final, Literal

import aiohttp

from extproc.engines.kv_layout import Layout
from extproc.engines.kv_trtllm import MAX_ANSWER_BYTES, Drained, decoding
from extproc.errors import EngineError
from extproc.fleet.kv_profile import Counts, Engine, Profile
from extproc.fleet.kv_tally import Losses

BUSY_S: Final = 0.1
"""Pause after an answer with events."""
IDLE_S: Final = 0.5
"""Pause after one without: as long as that a new block may stay unknown."""
FAILED_S: Final = 2.0
_MOST_RANKS: Final = 256


async def drain(session: aiohttp.ClientSession, destination: str, path: str) -> bytes:
    """Take the events out once.

    Raises:
        EngineError: the engine does not answer, or not with events.
    """
    try:
        async with session.post(f"http://{destination}{path}", allow_redirects=False) as response:
            if response.status != 200:
                raise EngineError(f"KV events of {destination}: HTTP status {response.status}", "status")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    response.close()
                    break
            return bytes(body)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(f"KV events of {destination}: {type(error).__name__}", "unreachable") from error


def verdict(last: int | None, drained: Drained) -> Literal["next", "first", "gap", "restart"]:
    """How an answer goes on from the one before.

    Args:
        last: id of the last event before; None when there was none.
        drained: the answer, of the same rank.
    """
    if last is None:
        return "first"
    if drained.first <= last:
        return "restart"
    return "gap" if drained.missing or drained.first > last + 1 else "next"


class DrainSource:
    """All ranks of one endpoint.

    Attributes:
        in_step: events were had, and the last call did not fail.
        profiles: by rank.
        due_at: when to call next, monotonic seconds.
    """

    def __init__(self, endpoint: str, counts: Counts) -> None:
        """Know nothing; what happens is counted in `counts`."""
        self.in_step = False
        self.profiles: dict[int, Profile] = {}
        self.due_at = 0.0
        self._endpoint = endpoint
        self._counts = counts
        self._layout = Layout()
        self._last: dict[int, int] = {}
        self._losses: dict[int, Losses] = {}
        self._answers: list[bytes] = []

    def answered(self, answer: bytes | None, now: float) -> None:
        """A call came back, with events or without; None when it failed."""
        self.in_step = answer is not None
        self.due_at = now + (FAILED_S if answer is None else BUSY_S if len(answer) > 2 else IDLE_S)
        if answer is not None and len(answer) > 2:
            self._answers.append(answer)

    def doubt(self) -> None:
        """What is known may be old: the next answer tells."""
        self.in_step = False

    def restart(self, engine: Engine, now: float) -> None:  # noqa: ARG002 - see `ZmqSource`
        """The engine is another one: know nothing."""
        self._counts.restart += 1
        self._last.clear()
        self._answers.clear()
        self._layout = Layout()
        for profile in self.profiles.values():
            profile.forget(engine)

    def steps(self, engine: Engine, now: float, wall: float) -> Iterator[None]:
        """Take in what came, in steps of about 1 ms. See `ZmqSource`."""
        answers, self._answers = self._answers, []
        for answer in answers:
            try:
                found = yield from decoding(answer, self._layout)
            except EngineError:
                self._last.clear()
                self._layout = Layout()
                for profile in self.profiles.values():
                    profile.lose(engine, now)
                continue
            yield
            for drained in found[:_MOST_RANKS]:
                yield from self._take(drained, engine, now, wall)

    def _take(self, drained: Drained, engine: Engine, now: float, wall: float) -> Iterator[None]:
        rank = drained.batch.rank
        profile = self.profiles.get(rank)
        if profile is None:
            profile = self.profiles[rank] = Profile(self._endpoint, rank, self._counts, now)
            self._losses[rank] = Losses()
        how = verdict(self._last.get(rank), drained)
        if how in {"gap", "restart"}:
            profile.forget(engine)
            if self._losses[rank].too_often(now):
                self._counts.streams.senseless += 1
                profile.pause(now)
            if how == "gap":
                self._counts.gap += 1
                self._counts.streams.gaps += 1
            else:
                self._counts.restart += 1
        self._last[rank] = drained.last
        if how != "next":
            profile.begin(engine, from_start=drained.first == 0 and not drained.missing)
        if not drained.missing:
            yield from profile.apply(drained.batch, wall)

    def close(self) -> None:
        """Nothing to close."""
