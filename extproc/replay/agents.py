"""Readers of recorded agent sessions: turns that wait for the answer before, whose histories only grow."""

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from extproc.errors import TraceError
from extproc.replay.arrivals import TOKEN_S, interleaved, seeded
from extproc.replay.lines import UNREADABLE, bad_json, check_times, numbered, refused
from extproc.replay.prompts import turn_id
from extproc.replay.rows import Row, Trace
from extproc.request.blocks import chain

TEXT_TOKEN_BYTES = 4
"""Bytes of text that stand for one token where a trace has texts and no token counts."""

TEXT_BLOCK = 64
"""Tokens of a block of such traces."""

THINK_S = (0.1, 30.0)
"""Shortest and longest think time taken from a recording, in seconds: a session laid aside overnight ends a replay."""


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording of agent sessions leaves open.

    Attributes:
        spread_s: sessions begin evenly over this time, in an order that the seed decides; they were recorded one
            after another.
        think_s: bounds of a think time, in seconds.
        token_s: seconds that the recorded engine is taken to have spent on one token of an answer; the rest of the
            time between two requests is think time.
    """

    spread_s: float = 20.0
    think_s: tuple[float, float] = THINK_S
    token_s: float = TOKEN_S


class _AgentLine(msgspec.Struct, gc=False):
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    input: str
    output: str
    session_id: str


class _Replay(msgspec.Struct, gc=False):
    trace_block_size: Annotated[int, msgspec.Meta(ge=1)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    input_sequence_hashes: list[Annotated[int, msgspec.Meta(ge=0)]]


class _Served(msgspec.Struct, gc=False):
    request_received_ms: float
    total_time_ms: float
    output_tokens: int
    replay: _Replay


class _Context(msgspec.Struct, gc=False):
    session_id: str = ""


class _Event(msgspec.Struct, gc=False):
    event_type: str
    request: _Served | None = None
    agent_context: _Context = msgspec.field(default_factory=_Context)


class _EventLine(msgspec.Struct, gc=False):
    event: _Event


def think_time(gap_s: float, bounds: tuple[float, float]) -> float:
    """Return the think time that `gap_s` seconds between an answer and the next request stand for, within bounds."""
    return min(max(gap_s, bounds[0]), bounds[1])


def session_files(path: Path) -> Sequence[Path]:
    """Return the file itself, or the `.jsonl` and `.jsonl.gz` files of a folder in the order of their names.

    Raises:
        TraceError: a folder has no such file.
    """
    if not path.is_dir():
        return (path,)
    if files := sorted((*path.glob("*.jsonl"), *path.glob("*.jsonl.gz"))):
        return files
    raise TraceError(f"{path}: the folder has no file that ends in .jsonl or .jsonl.gz; name a trace")


def miniswe(path: str | Path, *, seed: int = 0, settings: AgentSettings | None = None) -> Trace:
    """Read sessions of a coding agent: `timestamp` in us, `input`, `output`, `session_id`.

    A line may stand anywhere in its file; time decides. The sessions run at once, each turn after the answer before
    it. An input is the whole prompt: in these recordings it grows by what the tools say, and leaves the answers
    out. The recorded id is the session id that the client sends.

    Args:
        path: one file, or a folder of them.
        seed: decides the order in which the sessions begin.
        settings: what else the recording leaves open.

    Raises:
        TraceError: a line is broken, or there is no file.
    """
    path, settings = Path(path), settings or AgentSettings()
    decode = msgspec.json.Decoder(_AgentLine).decode
    sessions: dict[str, list[_AgentLine]] = {}
    for file in session_files(path):
        for number, text in numbered(file):
            try:
                line = decode(text)
            except UNREADABLE as error:
                remedy = "a turn has timestamp (us), input, output and session_id"
                raise bad_json(file, number, error, remedy) from error
            sessions.setdefault(line.session_id, []).append(line)
    order = sorted(sessions)
    seeded("miniswe", seed).shuffle(order)
    talks = [
        _turns(session, sessions[session], settings.spread_s * place / len(order), settings)
        for place, session in enumerate(order)
    ]
    return Trace(path.name, TEXT_BLOCK, interleaved(talks, settings.token_s))


def _turns(session: str, lines: list[_AgentLine], start_s: float, settings: AgentSettings) -> list[Row]:
    lines.sort(key=lambda line: line.timestamp)
    rows: list[Row] = []
    turn = b""
    for number, line in enumerate(lines):
        prompt, answer = line.input.encode(), line.output.encode()
        at_s = start_s
        if number:
            gap_s = (line.timestamp - lines[number - 1].timestamp) / 1e6
            at_s = think_time(gap_s - rows[-1].output_tokens * settings.token_s, settings.think_s)
        blocks = array("Q", chain((prompt, answer), b"", TEXT_BLOCK * TEXT_TOKEN_BYTES))
        full = len(prompt) // (TEXT_BLOCK * TEXT_TOKEN_BYTES)
        follows, turn = turn, turn_id(session, number)
        rows.append(
            Row(
                at_s=at_s,
                after=-1,
                prompt_tokens=max(1, len(prompt) // TEXT_TOKEN_BYTES),
                output_tokens=max(1, len(answer) // TEXT_TOKEN_BYTES),
                blocks=blocks[:full],
                answer_blocks=blocks[full:],
                session=session,
                turn=turn,
                follows=follows,
            )
        )
    return rows


def dynamo(path: str | Path, *, think_s: tuple[float, float] = THINK_S) -> Trace:
    """Read a request trace that Dynamo recorded: `event.request` of its `request_end` events.

    Hashes are taken over as they are: chained, 64 bits. The requests of one session wait for one another; the time
    between the end of one and the arrival of the next is think time.

    Args:
        path: JSON lines, other events among them.
        think_s: bounds of a think time, in seconds.

    Raises:
        TraceError: a line is broken, hashes do not fit lengths, or two block sizes are mixed.
    """
    path = Path(path)
    decode = msgspec.json.Decoder(_EventLine).decode
    sessions: dict[str, list[_Served]] = {}
    times: list[tuple[int, float]] = []
    size = 0
    for number, text in numbered(path):
        try:
            event = decode(text).event
        except UNREADABLE as error:
            raise bad_json(path, number, error, "a line has an event as Dynamo writes it") from error
        if (served := event.request) is None or event.event_type != "request_end":
            continue
        replay, hashes = served.replay, served.replay.input_sequence_hashes
        size = size or replay.trace_block_size
        full = replay.input_length // size
        if replay.trace_block_size != size:
            raise refused(path, number, f"blocks of {replay.trace_block_size} and {size} tokens", "split the file")
        if not full <= len(hashes) <= full + 1 or max(hashes, default=0) >> 64:
            found = f"input_sequence_hashes do not fit {replay.input_length} tokens in blocks of {size}"
            raise refused(path, number, found, "one hash of at most 64 bits stands for each block")
        # Without a session id there is nothing to wait for: each request is a conversation of its own.
        sessions.setdefault(event.agent_context.session_id or f"\0{number}", []).append(served)
        times.append((number, served.request_received_ms / 1000))
    check_times(path, times)
    return Trace(path.name, size or TEXT_BLOCK, interleaved(_served(sessions, size, think_s)))


def _served(sessions: Mapping[str, list[_Served]], size: int, think_s: tuple[float, float]) -> list[list[Row]]:
    start_ms = min((one.request_received_ms for lines in sessions.values() for one in lines), default=0.0)
    talks: list[list[Row]] = []
    for session, lines in sessions.items():
        lines.sort(key=lambda one: one.request_received_ms)
        rows: list[Row] = []
        for number, one in enumerate(lines):
            at_s = (one.request_received_ms - start_ms) / 1000
            if number:
                ended_ms = lines[number - 1].request_received_ms + lines[number - 1].total_time_ms
                at_s = think_time((one.request_received_ms - ended_ms) / 1000, think_s)
            tokens = one.replay.input_length
            rows.append(
                Row(
                    at_s=at_s,
                    after=-1,
                    prompt_tokens=tokens,
                    output_tokens=max(1, one.output_tokens),
                    blocks=array("Q", one.replay.input_sequence_hashes[: tokens // size]),
                    session="" if session.startswith("\0") else session,
                    turn=turn_id(session, number),
                    follows=turn_id(session, number - 1) if number else b"",
                )
            )
        talks.append(rows)
    return talks
