"""Answers of the generation routes, streamed or whole, in vLLM's JSON."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from extproc.sim.bodies import ChatBody, Sampling
from extproc.sim.refusals import engine_failed
from extproc.sim.sequence import Sequence
from extproc.sim.tokens import TOKEN_BYTES, to_ids
from extproc.sim.wire import EVENTS, Exchange

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """What tells a chat answer from a completion in JSON."""

    id_prefix: str
    whole: str
    piece: str
    chat: bool


CHAT = Shape("chatcmpl-", "chat.completion", "chat.completion.chunk", chat=True)
COMPLETION = Shape("cmpl-", "text_completion", "text_completion", chat=False)


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure in the middle of a stream: after how many tokens, and how, as `control.FailBody` has it."""

    after_tokens: int
    mode: Literal["stream", "cut", "end"]


Details = Callable[[int, bool], dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Job:
    """A generation request that was accepted.

    Attributes:
        body: as the client sent it.
        model: the name it asked for.
        request_id: the answer's id without its prefix.
        texts: the answer of each choice, known in advance; ASCII, whole tokens.
        sequences: one for each choice, in the order of `texts`.
        prompt_tokens: all prompts together, each counted once.
        details: makes `prompt_tokens_details` of `usage` from the number of cached tokens and whether it is a chat.
        prompts: each prompt's tokens, if the client asked for token ids.
    """

    body: Sampling
    model: str
    request_id: str
    texts: list[bytes]
    sequences: list[Sequence]
    prompt_tokens: int
    details: Details
    prompts: list[bytes] = field(default_factory=list)

    def prompt_ids(self, index: int) -> list[int] | None:
        """Return the token ids of the prompt of choice `index`, if they were asked for."""
        return to_ids(self.prompts[index * len(self.prompts) // len(self.texts)]) if self.prompts else None

    def answer_ids(self, index: int, start: int, stop: int) -> list[int] | None:
        """Return the token ids `start` to `stop` of an answer, if they were asked for."""
        return to_ids(self.texts[index][TOKEN_BYTES * start : TOKEN_BYTES * stop]) if self.prompts else None

    @property
    def shape(self) -> Shape:
        """Return the JSON shape of the answer."""
        return CHAT if isinstance(self.body, ChatBody) else COMPLETION

    def usage(self, produced: int, *, final: bool = True) -> dict[str, Any]:
        """Return `usage` after `produced` tokens; only the final one has details."""
        details = None
        if final:
            details = self.details(max(0, self.sequences[0].cached_tokens) if self.texts else 0, self.shape.chat)
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + produced,
            "completion_tokens": produced,
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        }


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


class WholeAnswer:
    """Collects the choices and answers once the last has finished."""

    def __init__(self, job: Job, exchange: Exchange) -> None:
        self._job = job
        self._exchange = exchange
        self._left = len(job.sequences)

    def progress(self, sequence: Sequence) -> None:
        """See `Listener.progress`; called once a choice, when it finishes."""
        del sequence
        self._left -= 1
        if self._left:
            return
        job = self._job
        produced = sum(one.produced for one in job.sequences)
        answer = {
            "id": job.shape.id_prefix + job.request_id,
            "object": job.shape.whole,
            "created": int(time.time()),
            "model": job.model,
            "choices": [self._choice(index) for index in range(len(job.sequences))],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": job.usage(produced),
            "kv_transfer_params": None,
        }
        if job.prompts and job.shape.chat:
            answer["prompt_token_ids"] = job.prompt_ids(0)
        self._exchange.send(200, msgspec.json.encode(answer))

    def _choice(self, index: int) -> dict[str, Any]:
        sequence = self._job.sequences[index]
        # An answer that was aborted is shorter than the one that was planned.
        text = self._job.texts[index][: TOKEN_BYTES * sequence.produced].decode()
        choice: dict[str, Any] = {"index": index}
        if self._job.shape.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
        else:
            choice["text"] = text
            if self._job.prompts:
                choice["prompt_token_ids"] = self._job.prompt_ids(index)
        return choice | {
            "logprobs": None,
            "finish_reason": sequence.finished,
            "stop_reason": None,
            "token_ids": self._job.answer_ids(index, 0, sequence.produced),
        }


class StreamedAnswer:
    """Sends every token as a server-sent event when it is produced.

    Headers go out at once, before the prefill, as vLLM's do: a status of 200 says nothing about the engine.
    Tokens that came up since the last wake share one write; a chat's role event comes with its first token.
    """

    def __init__(
        self, job: Job, exchange: Exchange, *, fault: Fault | None = None, on_fault: Callable[[], None]
    ) -> None:
        self._job = job
        self._exchange = exchange
        self._fault = fault
        self._on_fault = on_fault
        self._left = len(job.sequences)
        self._sent = dict.fromkeys(job.sequences, 0)
        self._index = {one: index for index, one in enumerate(job.sequences)}
        options = job.body.stream_options
        self._usage_last = bool(options and options.include_usage)
        self._usage_always = bool(options and options.include_usage and options.continuous_usage_stats)
        shape = job.shape
        model = msgspec.json.encode(job.model).decode()
        name = msgspec.json.encode(shape.id_prefix + job.request_id).decode()
        head = f'"id":{name},"object":"{shape.piece}","created":{int(time.time())},"model":{model},"choices":['
        self._head = b"data: {" + head.encode()
        self._before = b'"delta":{"content":"' if shape.chat else b'"text":"'
        self._after = b'"},"logprobs":null,' if shape.chat else b'","logprobs":null,'
        exchange.start(EVENTS)

    def progress(self, sequence: Sequence) -> None:
        """See `Listener.progress`."""
        if self._fault is not None and sequence.produced >= self._fault.after_tokens:
            self._break_off(self._fault)
            return
        job, index, sent = self._job, self._index[sequence], self._sent[sequence]
        self._sent[sequence] = sequence.produced
        text = job.texts[index]
        start = b'%s{"index":%d,' % (self._head, index)
        events: list[bytes] = []
        first = b""
        if not sent and job.prompts:
            first = b'"prompt_token_ids":%s,' % _json(job.prompt_ids(index))
        if not sent and job.shape.chat:
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            # A chat's prompt stands beside its choices, so the comma stands before it.
            ids, first = b"," + first[:-1] if first else b"", b""
            events += (start, role, ids, self._usage_now(), b"}\n\n")
        lead, start = start + first + self._before, start + self._before
        going = b'%s"finish_reason":null,"token_ids":null}]%s}\n\n' % (self._after, self._usage_now())
        # An aborted sequence ends without a token of its own.
        stop = max(sent, sequence.produced - (sequence.finished is not None))
        for token in range(sent, stop):
            said = text[TOKEN_BYTES * token : TOKEN_BYTES * (token + 1)]
            events += (lead, said, self._with_ids(going, index, token, token + 1) if job.prompts else going)
            lead = start
        if sequence.finished is not None:
            last = text[TOKEN_BYTES * stop : TOKEN_BYTES * sequence.produced]
            ending = b'"finish_reason":"%s","stop_reason":null,"token_ids":null}]' % sequence.finished.encode()
            ending = self._with_ids(ending, index, stop, sequence.produced)
            events += (lead, last, self._after, ending, self._usage_now(), b"}\n\n")
            self._left -= 1
            if not self._left:
                events += (self._final_usage(), _DONE)
        self._exchange.write(b"".join(events), last=not self._left)

    def _with_ids(self, data: bytes, index: int, start: int, stop: int) -> bytes:
        """Return a piece of an event with token ids in it, if they were asked for."""
        ids = self._job.answer_ids(index, start, stop)
        return data if ids is None else data.replace(b'"token_ids":null', b'"token_ids":' + _json(ids), 1)

    def _produced(self) -> int:
        return sum(one.produced for one in self._job.sequences)

    def _usage_now(self) -> bytes:
        if not self._usage_always:
            return b""
        return b',"usage":' + msgspec.json.encode(self._job.usage(self._produced(), final=False))

    def _final_usage(self) -> bytes:
        if not self._usage_last:
            return b""
        usage = msgspec.json.encode(self._job.usage(self._produced()))
        return b'%s],"usage":%s}\n\n' % (self._head, usage)

    def _break_off(self, fault: Fault) -> None:
        self._fault = None
        self._on_fault()
        if fault.mode == "cut":
            self._exchange.cut()
        elif fault.mode == "end":
            self._exchange.write(b"", last=True)
        else:
            error = msgspec.json.encode({"error": engine_failed().fields()})
            self._exchange.write(b"data: %s\n\n%s" % (error, _DONE), last=True)
