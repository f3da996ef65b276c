"""What clients of a demo, a benchmark or a fault test ask for: conversations as plain values, the same for one seed.

The demo's mix is what chat products and agents send, scaled down to engines with a small KV cache:

- *assistant*: one question behind a system prompt that many users share. A few prompts take most of the traffic
  (Zipf), as popular applications do.
- *session*: several turns behind such a prompt. Each turn sends the whole history again, the real answers
  included, after the time a person or a tool takes. Some clients name their session in `x-session-id`, others do
  not, and then only the growing history tells.
- *document*: a question about one of a set of long documents; several users ask about the same one.

Conversations arrive open-loop (Poisson), so a slow gateway is not spared load; the turns of one session wait for
the answer before, as clients do. Round robin is not set up to lose: nothing alternates in step with the number of
engines, all prompts fit any engine, and each engine comes to hold the popular system prompts by itself.

What decides is the size of one engine's cache against what is asked for again: with four `DEMO_ENGINE`s round robin
finds 26 to 29 % of the prompt tokens cached and keeps the engines 80 % busy. 75 % is what an unlimited cache would
find, and routing by cache comes within 4 points of it (seeds 1 and 3, Envoy and sidecar included).
"""

import itertools
import random
from collections.abc import Sequence

import msgspec

from extproc.sim.bodies import Message as EngineMessage
from extproc.sim.settings import EngineSettings
from extproc.sim.tokens import TOKEN_BYTES, answer, block_hashes, render_chat, token_count

_TEXT = """
account address after amount answer before between branch button change check client contract customer data
date delay delivery detail error event example field file first group history index input invoice item label
last limit list local message method model month name network note number option order output page part
payment period plan policy price process product query range reason record region report request result row
rule sample schema section service signal source stage state step store summary system table term test time
tool total type unit update user value version week window work year zone
"""
_WORDS = _TEXT.split()

Span = tuple[int, int]
"""Smallest and largest value, both possible; every value between is equally likely."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message of a chat, as it stands in a request body."""

    role: str
    content: str


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One request of a conversation.

    Attributes:
        question: text of the user's message.
        max_tokens: longest answer accepted, in tokens.
        stream: whether the answer is asked for as server-sent events.
        think_s: seconds between the end of the answer before and this request; 0 for the first turn.
    """

    question: str
    max_tokens: int
    stream: bool
    think_s: float = 0.0


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """Requests that build on each other; a single question is a conversation of one turn.

    Attributes:
        at_s: when the first turn is sent, in seconds from the start of the run.
        kind: `assistant`, `session`, `document` or `steady`.
        session: value of the header `x-session-id`; empty when the client sends none.
        opening: messages in front of the first question.
        turns: at least one.
    """

    at_s: float
    kind: str
    session: str
    opening: tuple[Message, ...]
    turns: tuple[Turn, ...]


class WorkloadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The knobs of the demo's mix. Lengths are in tokens of four bytes.

    Attributes:
        seconds: conversations begin within this time.
        rate: conversations that begin in a second, on average.
        session_share: share of conversations with several turns.
        document_share: share of questions about documents; what is left are single questions.
        header_share: share of sessions whose client names them in `x-session-id`.
        stream_share: share of requests that ask for a stream.
        system_prompts: number of shared system prompts.
        system_tokens: length of one.
        zipf: the n-th system prompt is used in proportion to 1 / n ** zipf.
        documents: number of documents.
        document_tokens: length of one.
        turns: turns of a session.
        question_tokens: length of a question; in a session it stands for pasted text and tool results too.
        answer_tokens: length of an answer.
        think_s: shortest and longest pause before a session's next turn.
    """

    seconds: float = 9.0
    rate: float = 22.0
    session_share: float = 0.4
    document_share: float = 0.3
    header_share: float = 0.6
    stream_share: float = 0.9
    system_prompts: int = 48
    system_tokens: Span = (400, 1200)
    zipf: float = 0.6
    documents: int = 14
    document_tokens: Span = (3000, 6000)
    turns: Span = (4, 6)
    question_tokens: Span = (80, 420)
    answer_tokens: Span = (16, 40)
    think_s: tuple[float, float] = (1.0, 2.2)


DEMO_ENGINE = EngineSettings(blocks=1921)
"""An engine of the demo: the default speed and 30,720 tokens of KV cache.

In use are about 14 documents of 4,500 tokens, 48 system prompts of 800 and 40 sessions of 2,000. A single engine holds
a sixth of that and four of them two thirds, as it is where users outnumber memory: what counts is not to keep four
copies of the same.
"""


def engine_arguments(engine: EngineSettings) -> tuple[str, ...]:
    """Return the arguments with which `warmpath sim` starts engines of this cache and prefill speed."""
    return ("--blocks", str(engine.blocks), "--prefill-tokens-per-s", str(engine.prefill_tokens_per_s))


def mixed(settings: WorkloadSettings, seed: int) -> list[Conversation]:
    """Return the demo's mix, in the order of arrival; equal for equal arguments."""
    rng = random.Random(seed)
    systems = [
        Message("system", text(rng, rng.randint(*settings.system_tokens))) for _ in range(settings.system_prompts)
    ]
    weights = list(itertools.accumulate(1 / n**settings.zipf for n in range(1, settings.system_prompts + 1)))
    documents = [text(rng, rng.randint(*settings.document_tokens)) for _ in range(settings.documents)]
    conversations: list[Conversation] = []
    at_s = rng.expovariate(settings.rate)
    while at_s < settings.seconds:
        draw = rng.random()
        if draw < settings.document_share:
            opening: tuple[Message, ...] = (Message("system", "Answer from this document.\n" + rng.choice(documents)),)
            kind, count = "document", 1
        else:
            opening = tuple(rng.choices(systems, cum_weights=weights))
            single = draw >= settings.document_share + settings.session_share
            kind, count = ("assistant", 1) if single else ("session", rng.randint(*settings.turns))
        named = kind == "session" and rng.random() < settings.header_share
        session = f"{seed}-{len(conversations)}" if named else ""
        turns = tuple(_turn(rng, settings, first=not n) for n in range(count))
        conversations.append(Conversation(at_s, kind, session, opening, turns))
        at_s += rng.expovariate(settings.rate)
    return conversations


def steady(
    rate: float,
    seconds: float,
    seed: int,
    *,
    stream_share: float = 0.5,
    prompt_tokens: int = 400,
    max_tokens: int = 16,
    sessions: int = 0,
) -> list[Conversation]:
    """Return single questions at a constant rate, one every `1 / rate` seconds, for tests that inject faults.

    Args:
        rate: requests a second.
        seconds: time between the first request and the end.
        seed: equal seeds give equal requests.
        stream_share: share of requests that ask for a stream.
        prompt_tokens: length of a question; no two are alike.
        max_tokens: longest answer.
        sessions: requests take the session ids of so many sessions in turn; 0 sends no session id.
    """
    rng = random.Random(seed)
    conversations: list[Conversation] = []
    for n in range(int(rate * seconds)):
        session = f"{seed}-{n % sessions}" if sessions else ""
        turn = Turn(text(rng, prompt_tokens), max_tokens, stream=rng.random() < stream_share)
        conversations.append(Conversation(n / rate, "steady", session, (), (turn,)))
    return conversations


def messages(conversation: Conversation, answers: Sequence[str]) -> list[Message]:
    """Return what the client sends next, once it has the answers to the `len(answers)` turns before.

    The history only grows: what one turn sends is the beginning of what the next one sends. An answer that never
    came is an empty text and stays out, as a client would leave it out.
    """
    history = list(conversation.opening)
    for turn, said in zip(conversation.turns, answers, strict=False):
        history.append(Message("user", turn.question))
        if said:
            history.append(Message("assistant", said))
    history.append(Message("user", conversation.turns[len(answers)].question))
    return history


def requests(conversations: Sequence[Conversation]) -> int:
    """Return the number of requests of a workload."""
    return sum(len(conversation.turns) for conversation in conversations)


def ideal_cached_share(conversations: Sequence[Conversation], block_size: int) -> float:
    """Return the share of prompt tokens that one simulated engine with an unlimited cache would find cached.

    Nothing can do better; the order of requests does not matter, for each block is computed once.

    Args:
        conversations: the workload.
        block_size: tokens of a cache block.
    """
    seen: set[int] = set()
    prompt_tokens = cached = 0
    for conversation in conversations:
        answers: list[str] = []
        for turn in conversation.turns:
            history = messages(conversation, answers)
            prompt = render_chat([EngineMessage(one.role, one.content) for one in history])
            blocks = block_hashes(prompt, block_size)
            known = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
            prompt_tokens += token_count(prompt)
            # An engine computes the last token in any case, or it would have nothing to answer from.
            cached += min(known, (token_count(prompt) - 1) // block_size) * block_size
            seen.update(blocks)
            answers.append(answer(prompt, turn.max_tokens).decode())
    return cached / prompt_tokens if prompt_tokens else 0.0


def text(rng: random.Random, tokens: int) -> str:
    """Return words of exactly `tokens` tokens."""
    size = tokens * TOKEN_BYTES
    shortest = min(map(len, _WORDS)) + 1
    return " ".join(rng.choices(_WORDS, k=size // shortest + 1))[:size]


def _turn(rng: random.Random, settings: WorkloadSettings, *, first: bool) -> Turn:
    return Turn(
        question=text(rng, rng.randint(*settings.question_tokens)),
        max_tokens=rng.randint(*settings.answer_tokens),
        stream=rng.random() < settings.stream_share,
        think_s=0.0 if first else rng.uniform(*settings.think_s),
    )
