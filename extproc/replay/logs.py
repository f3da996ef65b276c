"""Reader of logs of OpenAI requests: bodies as clients sent them, read by the parser that reads live traffic."""

from array import array
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from extproc.replay.agents import TEXT_BLOCK, TEXT_TOKEN_BYTES, THINK_S, think_time
from extproc.replay.arrivals import TOKEN_S, seeded
from extproc.replay.lines import UNREADABLE, bad_json, check_times, numbered, refused
from extproc.replay.rows import Row, Trace
from extproc.request.blocks import chain
from extproc.request.model import Request, RouteKind
from extproc.request.shapes import parse

_REMEDY = "write the body of an OpenAI request, or an object with it under body, beside timestamp, path and response"
_MOST_ANSWERS = 1024  # to one request; each is a sequence of its own on the engine
_NOT_SENT = msgspec.Raw(b"")
_WITHOUT_ANSWER = frozenset({RouteKind.EMBEDDING, RouteKind.RERANK, RouteKind.SCORE})
# Unix times in ms, us and ns begin here; all four ranges are years of this century.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a log leaves open.

    Attributes:
        output_tokens: length of an answer whose row knows neither its length nor a limit.
        rate: requests a second, on average, when the log has no times.
        think_s: bounds of a think time, in seconds.
        token_s: seconds that an answer is taken to have lasted for each of its tokens.
    """

    output_tokens: int = 256
    rate: float = 10.0
    think_s: tuple[float, float] = THINK_S
    token_s: float = TOKEN_S


class _Line(msgspec.Struct, gc=False):
    at_s: float | None = None
    timestamp: float | str | None = None
    path: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    body: msgspec.Raw = _NOT_SENT
    request: msgspec.Raw = _NOT_SENT
    output_tokens: Annotated[int, msgspec.Meta(le=2**63 - 1)] | None = None
    response: Any = None


class _Shape(msgspec.Struct, gc=False):
    """The fields of a body that tell its API."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    instructions: Any = None
    previous_response_id: Any = None
    max_output_tokens: Any = None
    system: Any = None


class _Entry(msgspec.Struct, gc=False):
    clock: str
    when: float
    request: Request
    output_tokens: int
    answer: str
    response: str


def openai_log(path: str | Path, *, seed: int = 0, settings: LogSettings | None = None) -> Trace:
    """Read a log of OpenAI requests.

    A line is a body, or an object with the body under `body` or `request` (as JSON or as a text of it) and, as far
    as known, `at_s` (seconds) or `timestamp` (Unix time in s, ms, us or ns, or ISO 8601), `path` or `url`,
    `headers`, `output_tokens` and `response` (its text, or the answer's body). Prompts are hashed as the router hashes
    them, in blocks of 256 bytes that count as 64 tokens; what an engine stored of an earlier response is in no body and
    counts for nothing. A turn whose predecessor is in the log waits for its answer.

    Args:
        path: JSON lines.
        seed: decides the arrivals (a Poisson process) when the log has no times.
        settings: what else the log leaves open.

    Raises:
        TraceError: a line is broken, its prompt cannot be read, or some lines have a time and others have none.
    """
    path, settings = Path(path), settings or LogSettings()
    decode = msgspec.json.Decoder(_Line).decode
    entries: list[_Entry] = []
    times: list[tuple[int, float]] = []
    for number, text in numbered(path):
        try:
            entries.append(_entry(path, number, text, decode(text), settings))
        except UNREADABLE as error:
            raise bad_json(path, number, error, _REMEDY) from error
        if entries[-1].clock != entries[0].clock:
            found = f"the time is {entries[-1].clock} and in the first line it is {entries[0].clock}"
            raise refused(path, number, found, "write all times alike, or none")
        times.append((number, entries[-1].when))
    check_times(path, times)
    if entries and entries[0].clock == "missing":
        rng, at_s = seeded("openai_log", seed), 0.0
        for entry in entries:
            entry.when = at_s
            at_s += rng.expovariate(settings.rate)
    entries.sort(key=lambda entry: entry.when)
    return Trace(path.name, TEXT_BLOCK, _rows(entries, settings))


def _entry(path: Path, number: int, text: bytes, line: _Line, settings: LogSettings) -> _Entry:
    body: bytes = bytes(line.body) or bytes(line.request) or text
    if body.startswith(b'"'):
        body = msgspec.json.decode(body, type=str).encode()
    headers = {name.lower(): value for name, value in line.headers.items()}
    request = parse(line.path or line.url or _path_of(body), headers, body)
    if request.flaw or request.kind is RouteKind.OTHER:
        raise refused(path, number, f"no prompt can be read ({request.flaw or 'path is no known API'})", _REMEDY)
    if request.n > _MOST_ANSWERS:
        raise refused(path, number, f"{request.n} answers to one request", f"write an n of {_MOST_ANSWERS} or less")
    answer, generated = _answer(line.response, request.n)
    if line.output_tokens is not None:
        generated = line.output_tokens
    elif request.kind in _WITHOUT_ANSWER:
        generated = 1
    elif generated is None:
        generated = settings.output_tokens if request.max_tokens is None else request.max_tokens
    try:
        clock, when = _time(line)
    except (ValueError, OverflowError) as error:
        raise refused(path, number, "its time cannot be read", "write Unix time or ISO 8601") from error
    response = line.response.get("id") if isinstance(line.response, dict) else None
    known = response if isinstance(response, str) else request.response
    return _Entry(clock, when, request, max(1, generated), answer, known)


def _path_of(body: bytes) -> str:
    shape = msgspec.json.decode(body, type=_Shape)
    if shape.messages is not None:
        # Anthropic's API alone has the system prompt beside the messages.
        return "/v1/chat/completions" if shape.system is None else "/v1/messages"
    if shape.prompt is not None:
        return "/v1/completions"
    if shape.input is None:
        return ""
    asked = (shape.instructions, shape.previous_response_id, shape.max_output_tokens)
    items = isinstance(shape.input, list) and any(isinstance(item, dict) for item in shape.input)
    return "/v1/responses" if items or any(field is not None for field in asked) else "/v1/embeddings"


def _time(line: _Line) -> tuple[str, float]:
    if line.at_s is not None:
        return "at_s", line.at_s
    if isinstance(line.timestamp, str):
        when = datetime.fromisoformat(line.timestamp)
        return "a timestamp", (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if line.timestamp is None:
        return "missing", 0.0
    unit = next((unit for least, unit in _UNITS if line.timestamp >= least), 1.0)
    return "a timestamp", line.timestamp / unit


def _answer(response: object, n: int) -> tuple[str, int | None]:
    """Return the first answer's text, empty when unknown, and the tokens of one of `n` answers, None when unknown."""
    text: object = response
    tokens: object = None
    if isinstance(response, dict):
        usage = response.get("usage")
        if isinstance(usage, dict):
            tokens = usage.get("completion_tokens", usage.get("output_tokens"))
        choices = response.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        message = choice.get("message")
        text = message.get("content") if isinstance(message, dict) else choice.get("text")
    known = text if isinstance(text, str) else ""
    if isinstance(tokens, int):
        return known, tokens // n  # usage counts all answers together
    return known, len(known.encode()) // TEXT_TOKEN_BYTES if known else None


def _rows(entries: list[_Entry], settings: LogSettings) -> list[Row]:
    rows: list[Row] = []
    turns: dict[bytes, int] = {}
    responses: dict[str, int] = {}
    for index, entry in enumerate(entries):
        request = entry.request
        # Neither map holds an empty key, which is what a request that continues nothing asks for.
        after = turns.get(request.follows, responses.get(request.previous_response, -1))
        at_s = entry.when - entries[0].when
        if after >= 0:
            waited_s = entry.when - entries[after].when - entries[after].output_tokens * settings.token_s
            at_s = think_time(waited_s, settings.think_s)
        blocks, answer_blocks = _blocks(request, entry.answer)
        rows.append(
            Row(
                at_s=at_s,
                after=after,
                prompt_tokens=max(1, request.prompt_bytes // TEXT_TOKEN_BYTES),
                output_tokens=entry.output_tokens,
                blocks=blocks,
                answer_blocks=answer_blocks,
                session=request.session,
                turn=request.turn,
                follows=request.follows,
                max_tokens=request.max_tokens,
                n=request.n,
                stream=request.stream,
            )
        )
        if request.turn:
            turns[request.turn] = index
        if entry.response:
            responses[entry.response] = index
    return rows


def _blocks(request: Request, answer: str) -> tuple["array[int]", "array[int]"]:
    said: tuple[bytes, ...] = ()
    if answer and request.kind is RouteKind.CHAT:
        message = {"messages": [{"role": "assistant", "content": answer}]}
        said = parse("/v1/chat/completions", {}, msgspec.json.encode(message)).segments
    elif answer and request.kind is RouteKind.COMPLETION:
        said = (answer.encode(),)
    size = TEXT_BLOCK * TEXT_TOKEN_BYTES
    blocks = array("Q", chain((*request.segments, *said), request.salt, size))
    full = request.prompt_bytes // size
    return blocks[:full], blocks[full:]
