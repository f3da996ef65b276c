"""Answers as engines send them, and comparisons of them, for the tests beside this file."""

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from extproc.request.model import RouteKind
from extproc.shadow.answer import Answer, Collector
from extproc.shadow.compare import Comparison, Settings, Side
from extproc.shadow.refusals import compiled
from extproc.shadow.result import Result

SSE = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}
SETTINGS = Settings(key=b"secret", refusals=compiled((), "refusals"))


def sse(events: Iterable[Any], *, done: bool = True) -> bytes:
    """A stream of events of OpenAI's kind."""
    body = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
    return body + (b"data: [DONE]\n\n" if done else b"")


def typed(events: Iterable[Any]) -> bytes:
    """A stream of events that bear their type, without an end of its own."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)


def chat(delta: Any, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    """An event of a chat."""
    return {"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def read(
    kind: RouteKind, body: bytes, headers: dict[str, str], cuts: Sequence[int] = (), *, complete: bool = True
) -> Answer:
    """An answer that comes in pieces, one each second from the second on, and is over half a second after the last."""
    collector = Collector(kind, "event-stream" in headers.get("content-type", ""), 0.0)
    collector.began(200, headers, 1.0)
    now = 1.0
    at = [0, *sorted({min(cut, len(body)) for cut in cuts}), len(body)]
    for start, end in itertools.pairwise(at):
        now += 1.0
        collector.chunk(body[start:end], now)
    collector.over(now + 0.5, complete=complete)
    return collector.answer()


def text(words: str, **more: Any) -> Answer:
    """A whole answer with this text."""
    return msgspec.structs.replace(
        Answer(status=200, flaw="", text=words, finish="stop", choices=1, tokens=len(words.split())), **more
    )


def result(name: str, similarity: float = 0.5, at: float = 1000.0, **more: Any) -> Result:
    """A result of model `m` whose answers are not the same, unless `similarity` is 1."""
    side = Side(status=200, finish="stop", tokens=10, characters=40, ttft_s=0.1, tpot_s=0.02, duration_s=1.0)
    comparison = Comparison(
        outcome="compared",
        primary=side,
        shadow=side,
        exact=similarity == 1.0,
        similarity=similarity,
        differs_at=None if similarity == 1.0 else 3,
        characters_ratio=1.0,
        tokens_ratio=1.0,
        same_finish=True,
        same_tools=True,
    )
    known = Result(id=name, at=at, model="m", primary="v1", shadow="v2", api="chat", streamed=True, compared=comparison)
    return msgspec.structs.replace(known, **more)
