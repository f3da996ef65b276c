"""Answers of `/v1/chat/completions` as a measuring client reads them: when content came, what it said, what it cost."""

from collections.abc import Callable

import msgspec

from extproc.sim.client import Failure

_OK = 200
_DATA = b"data:"
_DONE = b"[DONE]"


class _Said(msgspec.Struct, gc=False):
    content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Said | None = None
    message: _Said | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = 0


class Usage(msgspec.Struct, gc=False):
    """What the engine counted; `prompt_tokens_details` is absent when it does not report cached tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class _Body(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Body).decode


class Reply:
    """A `client.Receiver` for one answer.

    Events are decoded one by one only until the first with content; the rest are kept as they come and decoded
    at the end, so that reading an answer does not delay the reading of others.

    Attributes:
        code: HTTP status; 0 before there is one.
        first_byte_s: when the first piece of the body came.
        first_s: when the first piece of content came.
        text: the answer, complete after `finish`.
        usage: as reported, if it was.
    """

    def __init__(self, now: Callable[[], float], *, stream: bool) -> None:
        """`now` gives seconds; `stream` says what was asked for."""
        self.code = 0
        self.first_byte_s: float | None = None
        self.first_s: float | None = None
        self.text = ""
        self.usage: Usage | None = None
        self._now = now
        self._stream = stream
        self._received = bytearray()
        self._read = 0
        self._texts: list[str] = []
        self._done = False
        self._failure: Failure | None = None

    def status(self, code: int) -> None:
        """See `client.Receiver`."""
        self.code = code

    def body(self, data: bytes) -> None:
        """See `client.Receiver`."""
        if self.first_byte_s is None:
            self.first_byte_s = self._now()
        self._received += data
        if self._stream and self.first_s is None:
            self._read_events()
            if self._texts:
                self.first_s = self._now()

    def finish(self) -> Failure | None:
        """Read what is left of an answer that came to its end; returns what is wrong with it, if anything."""
        if self.code != _OK:
            return Failure.STATUS
        if self._stream:
            self._read_events()
        else:
            self._take(bytes(self._received))
            self.first_s = self.first_byte_s
            self._done = True
        self.text = "".join(self._texts)
        if self._failure is not None:
            return self._failure
        if not self._done:
            return Failure.NO_DONE
        return None if self.text and self.usage is not None else Failure.MALFORMED

    def _read_events(self) -> None:
        """Read the events that are complete. As engines write them: one `data:` line each, LF LF or CRLF CRLF."""
        while (end := self._received.find(b"\n", self._read)) >= 0:
            line = bytes(self._received[self._read : end]).strip()
            self._read = end + 1
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                self._done = True
            else:
                self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            body = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._failure = self._failure or Failure.MALFORMED
            return
        if bytes(body.error) not in (b"", b"null"):
            self._failure = Failure.ERROR_EVENT
        self.usage = body.usage or self.usage
        for choice in body.choices:
            said = choice.delta or choice.message
            if said is not None and said.content:
                self._texts.append(said.content)
