"""Readers of recorded traces: the format is told from the first line, whatever the file is called."""

import re
from array import array
from collections.abc import Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
from xxhash import xxh3_64_intdigest

from extproc.errors import TraceError
from extproc.replay.agents import dynamo, miniswe, session_files
from extproc.replay.arrivals import spread
from extproc.replay.lines import UNREADABLE, bad_json, check_times, first_line, numbered, refused
from extproc.replay.logs import openai_log
from extproc.replay.prompts import Prompt, grown
from extproc.replay.rows import Row, Trace

__all__ = ["azure", "dynamo", "load", "miniswe", "mooncake", "openai_log"]

MOONCAKE_BLOCK = 512
"""Tokens of a block of the Mooncake traces, as their publication states."""

MOONCAKE_TICK_S = 3.0
"""The Mooncake recorder wrote down arrivals every three seconds, about ten at a time."""

AZURE_BLOCK = 64
"""Tokens of a block where a trace knows lengths alone; any size would do, since nothing is shared."""

_LONGEST = 10_000_000  # tokens; a prompt beyond any model's context is a mistake in the file

_Count = Annotated[int, msgspec.Meta(ge=0)]
_AZURE_HEADER = re.compile(rb"TIMESTAMP,ContextTokens,GeneratedTokens", re.IGNORECASE)
_AZURE_REMEDY = "write time, prompt tokens and generated tokens, as in 2023-11-16 18:17:03.97,4808,10"


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=_LONGEST)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=_LONGEST)]
    hash_ids: list[_Count]


class _Probe(msgspec.Struct, gc=False):
    """The fields that tell the formats apart; absent ones are empty."""

    hash_ids: Any = None
    event: Any = None
    session_id: Any = None
    input: Any = None
    output: Any = None
    body: Any = None
    request: Any = None
    messages: Any = None
    prompt: Any = None


def load(path: str | Path, *, limit: int | None = None, seed: int = 0) -> Trace:
    """Read a trace of any known format, plain or gzip.

    Known are Mooncake rows, OpenAI request logs, agent sessions (a file or a folder of them), Dynamo request
    traces and the arrivals and lengths that Azure published.

    Args:
        path: the file, or the folder of agent sessions.
        limit: how many requests to take from the beginning of the trace; None for all.
        seed: decides what a recording leaves open, such as when agent sessions begin.

    Raises:
        TraceError: the file cannot be read, is of no known format, or a line is broken.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise TraceError(f"{path}: a limit of {limit} requests leaves nothing to replay; take 1 or more")
    trace = _read(path, seed)
    if not trace.rows:
        raise TraceError(f"{path}: there is no request in it; a trace has one request a line")
    return trace if limit is None else Trace(trace.name, trace.block_tokens, trace.rows[:limit])


def _read(path: Path, seed: int) -> Trace:
    number, line = first_line(session_files(path)[0])
    if _AZURE_HEADER.fullmatch(line):
        return azure(path)
    try:
        probe = msgspec.json.decode(line, type=_Probe)
    except UNREADABLE as error:
        known = "an object of one request a line, or the header TIMESTAMP,ContextTokens,GeneratedTokens"
        raise refused(path, number, "this is no known format of traces", f"write {known}") from error
    if probe.session_id is not None and isinstance(probe.input, str) and isinstance(probe.output, str):
        return miniswe(path, seed=seed)
    if path.is_dir():
        raise TraceError(f"{path}: a folder may hold agent sessions only; name one file of it")
    if probe.hash_ids is not None:
        return mooncake(path)
    if probe.event is not None:
        return dynamo(path)
    if any(field is not None for field in (probe.body, probe.request, probe.messages, probe.prompt, probe.input)):
        return openai_log(path, seed=seed)
    fields = "hash_ids, event, messages, prompt, input, body or request"
    raise refused(path, number, "the object has no field that tells its format", f"one of {fields} must be in it")


def mooncake(path: str | Path, *, block_tokens: int = MOONCAKE_BLOCK, tick_s: float = MOONCAKE_TICK_S) -> Trace:
    """Read Mooncake rows: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

    An id names a block and all blocks in front of it. It becomes a 64-bit hash by mixing, the same for the same
    id in any file. The id of a last block that is not full is dropped: no engine shares such a block.

    Args:
        path: JSON lines.
        block_tokens: tokens that one id stands for.
        tick_s: requests with equal timestamps are spread over the time until the next timestamp, at most this
            long; 0 leaves them where they are.

    Raises:
        TraceError: a line is broken, or its number of ids does not fit its length.
    """
    path = Path(path)
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    remedy = "a row has timestamp (ms), input_length (1 or more), output_length and hash_ids (numbers of 0 or more)"
    lines: list[_MooncakeLine] = []
    times: list[tuple[int, float]] = []
    for number, text in numbered(path):
        try:
            line = decode(text)
        except UNREADABLE as error:
            raise bad_json(path, number, error, remedy) from error
        full = line.input_length // block_tokens
        if not full <= len(line.hash_ids) <= full + 1:
            found = f"{len(line.hash_ids)} hash_ids do not fit {line.input_length} tokens in blocks of {block_tokens}"
            raise refused(path, number, found, "one id stands for each block, the last one may be partial")
        lines.append(line)
        times.append((number, line.timestamp / 1000))
    check_times(path, times)
    lines.sort(key=lambda line: line.timestamp)
    arrivals = spread([line.timestamp / 1000 for line in lines], tick_s)
    mixed: dict[int, int] = {}
    return Trace(
        path.name,
        block_tokens,
        [
            Row(
                at_s=at_s - arrivals[0],
                after=-1,
                prompt_tokens=line.input_length,
                output_tokens=max(1, line.output_length),
                blocks=_mixed(line.hash_ids[: line.input_length // block_tokens], mixed),
            )
            for line, at_s in zip(lines, arrivals, strict=True)
        ],
    )


def _mixed(ids: Sequence[int], known: dict[int, int]) -> "array[int]":
    blocks = array("Q")
    for one in ids:
        value = known.get(one)
        if value is None:
            value = known[one] = xxh3_64_intdigest(b"%d" % one)
        blocks.append(value)
    return blocks


def azure(path: str | Path) -> Trace:
    """Read arrivals and lengths as Azure published them: `TIMESTAMP,ContextTokens,GeneratedTokens`.

    Nothing is known of what prompts share, so no two share anything.

    Args:
        path: comma-separated values; the first line is the header.

    Raises:
        TraceError: a line is broken.
    """
    path = Path(path)
    lines: list[tuple[datetime, int, int]] = []
    times: list[tuple[int, float]] = []
    for number, text in numbered(path):
        if _AZURE_HEADER.fullmatch(text):
            continue
        try:
            when, prompt, generated = text.decode().split(",")
            line = datetime.fromisoformat(when), int(prompt), int(generated)
        except ValueError as error:
            raise refused(path, number, "the line has other than a time and two lengths", _AZURE_REMEDY) from error
        if lines and (lines[0][0].tzinfo is None) != (line[0].tzinfo is None):
            raise refused(path, number, "some times have a zone and others have none", "write all times alike")
        if not all(0 <= length <= _LONGEST for length in line[1:]):
            raise refused(path, number, f"a length is negative or over {_LONGEST}", _AZURE_REMEDY)
        lines.append(line)
        times.append((number, (line[0] - lines[0][0]).total_seconds()))
    check_times(path, times)
    lines.sort(key=itemgetter(0))
    return Trace(path.name, AZURE_BLOCK, [_azure_row(path.name, n, line, lines[0][0]) for n, line in enumerate(lines)])


def _azure_row(name: str, index: int, line: tuple[datetime, int, int], start: datetime) -> Row:
    when, tokens, generated = line[0], max(1, line[1]), max(1, line[2])
    prompt = grown(Prompt(), tokens, f"{name}\0{index}".encode(), AZURE_BLOCK)
    return Row((when - start).total_seconds(), -1, tokens, generated, prompt.blocks)
