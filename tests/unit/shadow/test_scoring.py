"""Comparing beside an event loop."""

import asyncio
import threading
from collections.abc import Callable

from extproc.request.model import RouteKind
from extproc.shadow.answer import Answer, Collector, unreached
from extproc.shadow.scoring import Scorer
from tests.unit.shadow.parts import SETTINGS, SSE, chat, sse, text


def collected(words: str) -> Collector:
    """An answer that is over."""
    collector = Collector(RouteKind.CHAT, streamed=True, asked=0.0)
    collector.began(200, SSE, 0.1)
    collector.chunk(sse([chat({"content": words}, "stop")]), 0.2)
    collector.over(0.3, complete=True)
    return collector


async def test_two_answers_are_read_and_compared() -> None:
    """The shadow's may be an answer already, of an engine that was not reached."""
    scorer = Scorer()
    scored = await scorer.score(collected("kitten"), collected("sitten"), SETTINGS)
    assert scored is not None
    assert (scored.primary.text, scored.shadow.text) == ("kitten", "sitten")
    assert (scored.comparison.outcome, scored.comparison.differs_at) == ("compared", 0)
    failed = await scorer.score(collected("kitten"), unreached(1.0), SETTINGS)
    assert failed is not None
    assert failed.comparison.outcome == "shadow_failed"
    scorer.close()


class Waiting(Collector):
    """An answer that takes until it is let go to be read."""

    def __init__(self) -> None:
        super().__init__(RouteKind.CHAT, streamed=True, asked=0.0)
        self.go = threading.Event()
        self.thread = ""

    def answer(self, rest: Callable[[], None] = lambda: None) -> Answer:
        """Wait, then give one."""
        self.go.wait(10)
        self.thread = threading.current_thread().name
        rest()
        return text("a")


async def test_no_more_wait_than_may_and_the_loop_goes_on() -> None:
    """A comparison holds up neither the loop nor memory: beyond the bound it is dropped."""
    scorer, slow = Scorer(most_waiting=2), Waiting()
    first = asyncio.create_task(scorer.score(slow, slow, SETTINGS))
    second = asyncio.create_task(scorer.score(collected("a"), collected("a"), SETTINGS))
    await asyncio.sleep(0)
    assert await scorer.score(collected("a"), collected("a"), SETTINGS) is None
    assert not first.done()
    slow.go.set()
    assert None not in await asyncio.gather(first, second)
    assert slow.thread.startswith("shadow")
    assert await scorer.score(collected("a"), collected("a"), SETTINGS) is not None
    scorer.close()
