"""The routes that make an engine work: chat, completions and embeddings."""

import base64
import struct
import time
import uuid
from collections.abc import Sequence as Items
from typing import Any

import msgspec

from extproc.sim.adapters import Adapter
from extproc.sim.answers import Job, StreamedAnswer, WholeAnswer
from extproc.sim.bodies import (
    ChatBody,
    EmbeddingBody,
    Sampling,
    check,
    empty_prompt,
    prompts_of,
    read,
)
from extproc.sim.continuing import rest, said
from extproc.sim.control import Control, FailBody, stream_fault
from extproc.sim.core import Core, Dialect
from extproc.sim.ranks import Rank
from extproc.sim.refusals import Refusal, bad_value, engine_failed, invalid
from extproc.sim.sequence import Content, Listener, Sequence
from extproc.sim.tokens import TOKEN_BYTES, Prompt, block_hashes, embedding, from_ids, padded, render, token_count
from extproc.sim.wire import Exchange, Request

_END = b"\0end"
"""The token that ends an answer; it is counted and says nothing."""


class Generation:
    """Turns request bodies into sequences, hands them to an engine core and answers with what comes of them."""

    def __init__(self, core: Core, control: Control, dialect: Dialect) -> None:
        self._core = core
        self._settings = core.settings
        self._control = control
        self._dialect = dialect
        self._context = core.settings.engine.context_tokens

    def chat(self, request: Request, exchange: Exchange) -> None:
        """`POST /v1/chat/completions`."""
        body = self._dialect.chat(request.body)
        prompt = chat_prompt(body)
        if not self._settings.about.names_media:
            prompt = Prompt(prompt.spelled)
        self._generate(body, [prompt], request, exchange)

    def completions(self, request: Request, exchange: Exchange) -> None:
        """`POST /v1/completions`."""
        body = self._dialect.completion(request.body)
        self._generate(body, [Prompt(prompt_bytes(one)) for one in prompts_of(body.prompt)], request, exchange)

    def embeddings(self, request: Request, exchange: Exchange) -> None:
        """`POST /v1/embeddings`."""
        body = read(EmbeddingBody, request.body)
        if _failed_at_once(self._control.next_failure(), exchange):
            return
        rank = self._core.ranks.pick(request)
        adapter = self._dialect.adapter(body)
        inputs = [prompt_bytes(one) for one in prompts_of(body.input)]
        for one in inputs:
            self._check_prompt(token_count(one))
        sequences = [self._sequence(Prompt(one), b"", adapter, body.cache_salt or "") for one in inputs]
        for sequence in sequences:
            sequence.end_reason = "stop"
        self._dialect.admit(len(sequences))
        model = body.model or self._settings.model
        listener = _EmbeddingAnswer(body, model, _request_id(request), inputs, self._settings.embedding_dims, exchange)
        self._submit(rank, sequences, listener, exchange)

    def _generate(self, body: Sampling, prompts: list[Prompt], request: Request, exchange: Exchange) -> None:
        failure = self._control.next_failure()
        if _failed_at_once(failure, exchange):
            return
        rank = self._core.ranks.pick(request)
        adapter = self._dialect.adapter(body)
        check(body)
        texts: list[bytes] = []
        sequences: list[Sequence] = []
        empty = failure is not None and failure.mode == "empty"
        for prompt in prompts:
            origin, seed = prompt.spelled, (body.seed or 0) + self._control.traits.text_seed
            begun = said(origin, seed=seed) if _may_continue(body) else 0
            length, reason = self._answer_length(body, prompt, begun)
            if empty:
                length, reason = 1, "stop"
            for choice in range(body.n or 1):
                text = _END if empty else rest(origin, begun, length, choice=choice, seed=seed)
                texts.append(b"" if empty else text)
                sequence = self._sequence(prompt, text, adapter, body.namespace)
                sequence.end_reason, sequence.streamed = reason, bool(body.stream)
                sequences.append(sequence)
        self._dialect.admit(len(sequences))
        job = Job(
            body=body,
            model=body.model or self._settings.model,
            request_id=_request_id(request),
            texts=texts,
            sequences=sequences,
            prompt_tokens=sum(token_count(one.data) for one in prompts),
            details=self._dialect.details,
            prompts=[one.data for one in prompts] if body.return_token_ids else [],
        )
        listener: Listener = WholeAnswer(job, exchange)
        if body.stream:
            fault = stream_fault(failure)
            listener = StreamedAnswer(job, exchange, fault=fault, on_fault=lambda: _drop(rank, sequences))
        stats = rank.engine.stats
        for sequence in sequences:
            stats.max_tokens.observe(body.longest or sequence.answer_tokens)
            stats.choices.observe(body.n or 1)
        self._submit(rank, sequences, listener, exchange)

    def _answer_length(self, body: Sampling, prompt: Prompt, begun: int) -> tuple[int, str]:
        """Return how many tokens the answer has and why it ends; the last `begun` tokens of the prompt are of it.

        Raises:
            Refusal: 400, prompt or answer exceed the context.
        """
        prompt_tokens = token_count(prompt.data)
        self._check_prompt(prompt_tokens)
        room = self._context - prompt_tokens
        longest = room if body.longest is None else body.longest
        if longest > room:
            raise self._dialect.answer_too_long(longest, prompt_tokens, self._context)
        asked = prompt.data[: len(prompt.data) - begun * TOKEN_BYTES]
        whole = self._control.traits.natural_tokens(self._settings.answer_tokens, asked)
        natural = max(whole - begun, body.min_tokens, 1)
        if body.ignore_eos or longest <= natural:
            return longest, "length"
        return natural, "stop"

    def _check_prompt(self, tokens: int) -> None:
        if not tokens:
            raise empty_prompt()
        if tokens >= self._context:
            raise self._dialect.prompt_too_long(tokens, self._context)

    def _sequence(self, prompt: Prompt, text: bytes, adapter: Adapter | None, salt: str) -> Sequence:
        namespace = "" if adapter is None else adapter.namespace
        size = self._settings.engine.block_size
        hashes = block_hashes(prompt.spelled + text, size, adapter=namespace, salt=salt)
        sequence = Sequence(token_count(prompt.data), token_count(text), hashes)
        sequence.adapter = "" if adapter is None else adapter.name
        if self._core.telling is not None:
            sequence.content = Content(prompt.data + text, adapter, salt, prompt.media)
        return sequence

    def _submit(self, rank: Rank, sequences: Items[Sequence], listener: Listener, exchange: Exchange) -> None:
        exchange.on_disconnect = lambda: _drop(rank, sequences)
        for sequence in sequences:
            sequence.listener = listener
        rank.pacer.submit(sequences)


def chat_prompt(body: ChatBody) -> Prompt:
    """Return the tokens of a chat's prompt, its media named beside them.

    Raises:
        Refusal: 400, there are no messages, or token ids that are none.
    """
    if body.token_ids is not None:
        return Prompt(prompt_bytes(body.token_ids))
    if not body.messages:
        raise bad_value("messages must not be empty", "messages", 0)
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_value("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return render(
        body.messages,
        body.tools,
        generation_prompt=body.add_generation_prompt,
        open_ended=body.continue_final_message,
    )


def _may_continue(body: Sampling) -> bool:
    """Whether the prompt may hold the beginning of the answer: a chat says so, a completion never does."""
    return not isinstance(body, ChatBody) or body.continue_final_message or body.token_ids is not None


class _EmbeddingAnswer:
    """Answers with the vectors once every input is through its prefill."""

    def __init__(
        self,
        body: EmbeddingBody,
        model: str,
        request_id: str,
        inputs: list[bytes],
        dims: int,
        exchange: Exchange,
    ) -> None:
        self._body = body
        self._model = model
        self._request_id = request_id
        self._inputs = inputs
        self._dims = dims
        self._exchange = exchange
        self._left = len(inputs)

    def progress(self, sequence: Sequence) -> None:
        """See `Listener.progress`."""
        del sequence
        self._left -= 1
        if self._left:
            return
        tokens = sum(map(token_count, self._inputs))
        rows = [
            {"index": index, "object": "embedding", "embedding": self._vector(one)}
            for index, one in enumerate(self._inputs)
        ]
        answer_body: dict[str, Any] = {
            "id": f"embd-{self._request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": rows,
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }
        self._exchange.send(200, msgspec.json.encode(answer_body))

    def _vector(self, data: bytes) -> list[float] | str:
        values = embedding(data, self._dims)
        if self._body.encoding_format == "base64":
            return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        return values


def prompt_bytes(prompt: str | list[int]) -> bytes:
    """Return the tokens of one prompt.

    Raises:
        Refusal: 400, ids that are none.
    """
    if isinstance(prompt, str):
        return padded(prompt.encode())
    try:
        return from_ids(prompt)
    except ValueError as error:
        raise invalid(f"1 validation error:\n  {error}") from error


def _drop(rank: Rank, sequences: Items[Sequence]) -> None:
    for sequence in sequences:
        rank.pacer.abort(sequence)


def _request_id(request: Request) -> str:
    given = request.headers.get(b"x-request-id")
    return given.decode("latin-1") if given else uuid.uuid4().hex


def _failed_at_once(failure: FailBody | None, exchange: Exchange) -> bool:
    """Let a request fail before it reaches the engine, if its turn has come; return whether it did."""
    if failure is None or failure.mode not in ("reset", "status"):
        return False
    if failure.mode == "reset":
        exchange.cut()
        return True
    refusal: Refusal = engine_failed(failure.status)
    raise refusal
