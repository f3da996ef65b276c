"""One streamed answer as its client sees it, put together from what one or several engines sent. No I/O.

The client sees one `id`, one opening with the role, one `finish_reason`, one `usage`, whoever wrote which part.
"""

from typing import Any, Final, Literal

import msgspec

from extproc.errors import OverloadedError
from extproc.relay.asked import Asked
from extproc.relay.events import DONE, event_of
from extproc.relay.limits import Room
from extproc.relay.resuming import Received, Sending

Death = Literal["cut", "stalled", "error", "aborted", "failed", "refused", "unfit"]
"""How an engine was found lost: its connection broke or ended early, no byte came for too long, it sent an error event,
it said that it aborted, or it answered with an error; a continuation can also be refused (4xx), or bring what cannot be
joined on."""

_GONE: Final = frozenset({"abort", "aborted", "error"})
"""Values of `finish_reason` by which engines say that they were stopped (vLLM and SGLang)."""
_SERVER_ERROR: Final = 500
_HEAD: Final = ("id", "object", "created", "model", "system_fingerprint")
_REASONING: Final = {"reasoning", "reasoning_content"}
_TOOLS: Final = {"tool_calls", "function_call"}
_Json = dict[str, Any]

_object = msgspec.json.Decoder(dict[str, Any]).decode


_ID_BYTES = 36
"""A token id in a list: a reference, and a number of its own."""


class Lost(Exception):  # noqa: N818 -- what became of an engine, not a fault of ours
    """The engine that was answering is lost."""

    def __init__(self, death: Death) -> None:
        super().__init__(death)
        self.death: Death = death


class Answer:
    """Takes the events of each engine in turn, and gives those for the client.

    Attributes:
        received: what was received, of the first choice.
        sent: whether anything was given for the client.
        complete: whether nothing more is to come from an engine.
    """

    def __init__(self, asked: Asked, longest: int, memory: Room) -> None:
        """An answer that is kept no more, for its own length or that of all, cannot be continued.

        Args:
            asked: the request.
            longest: how many bytes of text and token ids are kept.
            memory: what all requests may hold together.
        """
        self.received = Received()
        self.sent = False
        self.complete = False
        self._asked = asked
        self._room = longest
        self._memory = memory
        self._kept = 0
        self._head: _Json = {}
        self._said_role = False
        self._finished: set[int] = set()
        self._sending: Sending | None = None
        self._again = ""
        self._before = 0
        self._by_events = 0
        self._prompt_tokens: int | None = None
        self._usage: _Json | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice has its `finish_reason`."""
        return len(self._finished) >= max(1, self._asked.choices)

    @property
    def too_long(self) -> bool:
        """Whether more was received than is kept."""
        return self._room < 0

    def release(self) -> None:
        """Nothing of it is kept any more."""
        self._memory.give(self._kept)
        self._kept = 0

    def _keeps(self, size: int) -> bool:
        """Make room for so many bytes more; False when there is none, from then on."""
        if self._room >= 0:
            self._room -= size
        if self._room < 0:
            return False
        try:
            self._memory.take(size)
        except OverloadedError:
            self._room = -1
            return False
        self._kept += size
        return True

    def begin(self, sending: Sending) -> None:
        """The next events come from another engine, asked by `sending`."""
        self._sending = sending
        self._again = ""
        self._before = 0 if sending.form == "whole" else self.received.tokens
        self._by_events = 0
        self._usage = None
        if sending.form == "whole":
            self.received = Received()
        elif sending.form == "text":
            self.received.ids = None

    def take(self, data: bytes) -> list[bytes]:
        """Take the data of one event; returns events for the client.

        Raises:
            Lost: the event says that the engine is lost, or is none that can be joined to what was sent.
        """
        if data == DONE:
            self.complete = self.finished
            if not self.complete:
                raise Lost("cut")
            return []
        try:
            event = _object(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise Lost("error") from None
        if event.get("error"):
            return self._failed(event)
        usage, choices = event.pop("usage", None), event.get("choices")
        if isinstance(usage, dict):
            self._note_usage(usage)
        if not isinstance(choices, list) or not choices:
            return []
        self._note_head(event)
        self._note_prompt(event)
        kept = [choice for choice in choices if isinstance(choice, dict) and self._take_choice(choice)]
        if not kept:
            return []
        event = {**event, **self._head, "choices": kept}
        if self._asked.usage_always and (now := self._usage_now(final=False)):
            event["usage"] = now
        self.sent = True
        return [event_of(msgspec.json.encode(event))]

    def close(self) -> list[bytes]:
        """What is left to send when no more comes from an engine: the finish reason, usage and the end."""
        events: list[_Json] = []
        if not self.finished:
            # The engine was lost between the last token that was allowed and saying so.
            delta: _Json = {"delta": {}} if self._asked.api == "chat" else {"text": ""}
            choice = {"index": 0, **delta, "logprobs": None, "finish_reason": "length", "stop_reason": None}
            events.append({**self._head, "choices": [choice]})
        if self._asked.usage and (told := self._usage_now(final=True)):
            events.append({**self._head, "choices": [], "usage": told})
        return [*(event_of(msgspec.json.encode(event)) for event in events), event_of(DONE)]

    def _failed(self, event: _Json) -> list[bytes]:
        """An error of the request itself is the client's to see; any other one is the end of the engine."""
        error = event["error"]
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and code < _SERVER_ERROR and not self._continues:
            self.sent = self.complete = True
            self._finished.update(range(self._asked.choices))
            self._asked = msgspec.structs.replace(self._asked, usage=False)
            return [event_of(msgspec.json.encode(event))]
        raise Lost("error")

    @property
    def _continues(self) -> bool:
        return self._sending is not None and self._sending.form != "whole"

    def _note_head(self, event: _Json) -> None:
        """Every event bears the name that the first one bore."""
        if not self._head:
            self._head = {name: event[name] for name in _HEAD if name in event}

    def _note_prompt(self, event: _Json) -> None:
        """Token ids of the prompt stand beside the choices of a chat, and in the choice of a completion."""
        ids = event.get("prompt_token_ids") if self._asked.ids else event.pop("prompt_token_ids", None)
        self._keep_prompt(ids)
        if self._continues or self._said_role:
            event.pop("prompt_token_ids", None)

    def _keep_prompt(self, ids: Any) -> None:
        if isinstance(ids, list) and not self._continues:
            self.received.prompt_ids = ids if self._keeps(_ID_BYTES * len(ids)) else None

    def _take_choice(self, choice: _Json) -> bool:
        """Note one choice and make it one of this answer; False when nothing of it is for the client.

        Raises:
            Lost: the engine aborted it, or it holds what cannot be joined on.
        """
        reason = choice.get("finish_reason")
        if isinstance(reason, list | dict):
            raise Lost("error")
        if reason in _GONE:
            raise Lost("aborted")
        prompt_ids = choice.get("prompt_token_ids") if self._asked.ids else choice.pop("prompt_token_ids", None)
        self._keep_prompt(prompt_ids)
        if self._continues:
            choice.pop("prompt_token_ids", None)
        ids = choice.get("token_ids") if self._asked.ids else choice.pop("token_ids", None)
        delta = self._delta_of(choice)
        text = self._text_of(choice)
        self._note_tokens(text, ids)
        if choice.get("finish_reason") is not None:
            index = choice.get("index", 0)
            self._finished.add(index if isinstance(index, int) else 0)
            return True
        return bool(text or delta)

    def _delta_of(self, choice: _Json) -> _Json:
        """What a chat's event adds beside its text; empty for completions.

        A continuation by token ids is a completion, whose text becomes a chat's here.
        """
        if self._asked.api == "completion":
            return {}
        if "delta" not in choice:
            choice["delta"] = {"content": choice.pop("text", "")}
        delta = choice["delta"]
        if not isinstance(delta, dict):
            raise Lost("error")
        if self._said_role:
            delta.pop("role", None)
        elif "role" in delta:
            self._said_role = True
        more = {name: value for name, value in delta.items() if name != "content" and value}
        if beyond := more.keys() - {"role"}:
            if self._continues:
                raise Lost("unfit")
            self.received.beyond = "tools" if beyond & _TOOLS else "reasoning" if beyond & _REASONING else "extras"
        return more

    def _text_of(self, choice: _Json) -> str:
        """The text of a choice, without what the client has of it already."""
        holder, name = (choice, "text") if self._asked.api == "completion" else (choice["delta"], "content")
        text = holder.get(name)
        if not isinstance(text, str):
            return ""
        if self._again:
            known = _common(text, self._again)
            # Once it differs, it is another continuation: nothing more of it is what was sent.
            self._again = self._again[known:] if known == len(text) else ""
            text = holder[name] = text[known:]
        return text

    def _note_tokens(self, text: str, ids: Any) -> None:
        """Keep what was received as far as there is room, and count tokens: by usage, else by ids, else by events."""
        received = self.received
        if isinstance(ids, list):
            self._by_events += len(ids)
            if received.ids is not None and self._keeps(_ID_BYTES * len(ids)):
                received.ids += ids
        elif text:
            self._by_events += 1
            received.ids = None
        if text and self._keeps(len(text)):
            received.parts.append(text)
        self._count()

    def _note_usage(self, usage: _Json) -> None:
        self._usage = usage
        prompt = usage.get("prompt_tokens")
        if not isinstance(prompt, int):
            pass
        elif self._prompt_tokens is None or not self._continues:
            # A continuation's prompt is the client's and what was generated before.
            self._prompt_tokens = max(0, prompt - self._before)
        else:
            self._note_trimmed(self._prompt_tokens + self._before - prompt)
        self._count()

    def _note_trimmed(self, missing: int) -> None:
        """So many tokens are missing from the prompt of a continuation: a template took white space off its end."""
        if missing > 0 and self._sending and self._sending.trimmed and not self._by_events and not self._again:
            self._again = self._sending.trimmed
            self._before -= missing

    def _count(self) -> None:
        told = (self._usage or {}).get("completion_tokens")
        self.received.tokens = self._before + (told if isinstance(told, int) else self._by_events)

    def _usage_now(self, *, final: bool) -> _Json | None:
        """The client's prompt once, and every token that was generated for it; None while nobody told of the prompt.

        An answer of one engine has that engine's own usage. Of one that was continued nobody knows which prompt tokens
        were cached, so no details are told.
        """
        if not self._continues and self._usage is not None:
            return self._usage
        prompt = self._prompt_tokens
        if prompt is None and self.received.prompt_ids is not None:
            prompt = len(self.received.prompt_ids)
        if prompt is None:
            return None
        usage: _Json = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.received.tokens,
            "completion_tokens": self.received.tokens,
        }
        return usage | {"prompt_tokens_details": None} if final else usage


def _common(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)
