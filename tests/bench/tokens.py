"""Token ids of a conversation of 32,000 tokens: new, its next turn, and the same again, from a tokenizer's folder."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from extproc.clock import SystemClock
from extproc.config import Config
from extproc.request.shapes import parse
from extproc.telemetry.metrics import Metrics
from extproc.tokens.tokenizing import Engines, Tokenizing
from tests.bench.report import Check, Findings, Row, Scale, middle

_PATH = "/v1/chat/completions"
_TURNS = 31
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
_BUDGET_MS = 50
"""`tokens.budget_ms` as configurations have it that do not say."""


def bench(scale: Scale) -> Findings:
    """Times a request waits for its ids, and how long the event loop stands still meanwhile."""
    findings = Findings(
        f"token ids of a conversation of 32,000 tokens in {_TURNS} turns, local tokenizer, one at a time"
    )
    with TemporaryDirectory(prefix="bench-") as folder:
        _write_tokenizer(Path(folder))
        findings.rows += asyncio.run(_measure(folder, scale.pick(31, 5)))
    for row in findings.rows:
        if row["what"] != "new":
            findings.checks.append(Check(f"{row['what']}: wait", float(row["middle_ms"]), _BUDGET_MS, "ms"))
    findings.notes.append("a byte-level BPE of 8,192 tokens trained on English; the template is ChatML")
    findings.notes.append(
        "cpu_ms: of the whole process; loop_ms: the longest that the event loop was late in a request, in the middle"
    )
    return findings


async def _measure(folder: str, rounds: int) -> list[Row]:
    pool = {"endpoints": ["127.0.0.1:1"], "profiles": "precise", "tokens": {"tokenizer": folder, "budget_ms": 10_000}}
    room = Tokenizing(Engines(lambda _: []), Metrics().tokens, SystemClock(), "bench")
    await room.apply(msgspec.convert({"models": {"m": {"pool": "p"}}, "pools": {"p": pool}}, Config))
    await _ask(room, _body(0, 1))
    rows: list[Row] = []
    kinds: dict[str, Callable[[int], bytes]] = {
        "new": lambda number: _body(number, _TURNS),
        "its next turn": lambda number: _body(number, _TURNS + 1),
        "the same again": lambda number: _body(number, _TURNS + 1),
    }
    for what, body in kinds.items():
        asked = [await _ask(room, body(number)) for number in range(1, rounds + 1)]
        waits = [each.waited_ms for each in asked]
        rows.append(
            {
                "what": what,
                "tokens": asked[-1].tokens,
                "middle_ms": middle(waits),
                "least_ms": min(waits),
                "cpu_ms": middle([each.cpu_ms for each in asked]),
                "loop_ms": middle([each.late_ms for each in asked]),
            }
        )
    await room.close()
    return rows


class _Asked(NamedTuple):
    """One request: its ids, how long it waited, the CPU time of the process, and how late the loop was at most."""

    tokens: int
    waited_ms: float
    cpu_ms: float
    late_ms: float


async def _ask(room: Tokenizing, body: bytes) -> _Asked:
    request, late = parse(_PATH, {}, body), [0.0]
    watching = asyncio.create_task(_watch(late))
    await asyncio.sleep(0)
    began, cpu = time.perf_counter(), time.process_time()
    prompt = await room.of("p", _PATH, body, request)
    waited, used = time.perf_counter() - began, time.process_time() - cpu
    watching.cancel()
    return _Asked(len(prompt.ids) if prompt else 0, 1000 * waited, 1000 * used, 1000 * late[0])


async def _watch(late: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        late[0] = max(late[0], time.perf_counter() - began - 0.001)


def _body(number: int, turns: int) -> bytes:
    """A conversation with words of its own from its first message on."""
    text = _english()
    messages = [{"role": "system", "content": f"Conversation {number}. {text[:6000]}"}]
    for turn in range(turns):
        at = 6000 + 97 * number + turn * 4000
        messages.append({"role": "user", "content": f"{number} {text[at : at + 2400]}"})
        messages.append({"role": "assistant", "content": f"{number} {text[at + 2400 : at + 4000]}"})
    return json.dumps({"model": "m", "messages": [*messages, {"role": "user", "content": "Go on."}]}).encode()


def _english() -> str:
    return "\n".join(topics.topics.values())


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = itertools.chain.from_iterable(text.splitlines() for text in topics.topics.values())
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
