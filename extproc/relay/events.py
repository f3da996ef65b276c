"""Server-sent events out of a stream of bytes, whole ones only, wherever the bytes were cut."""

import re
from typing import Final

from extproc.errors import RelayError

DONE: Final = b"[DONE]"
"""What an OpenAI stream ends with."""

_LINE_END: Final = rb"(?:\r\n|\n|\r(?!\n))"
_EVENT_END: Final = re.compile(_LINE_END + _LINE_END)
_LINES: Final = re.compile(_LINE_END)
# CR LF CR LF: an end that came in pieces begins this far back.
_LONGEST_END: Final = 4
_BOM: Final = b"\xef\xbb\xbf"
"""A stream may begin with it; it is no part of the first line."""


class Splitter:
    """Takes the bytes of one stream as they come, and gives the data of each event once all of it is there.

    Line ends are those of the standard (https://html.spec.whatwg.org/multipage/server-sent-events.html): LF, CR LF or
    CR. Events without data, such as comments that keep a connection alive, are passed over.
    """

    def __init__(self, longest: int) -> None:
        """`longest` is the size of the longest event, in bytes."""
        self._longest = longest
        self._held = bytearray()
        self._looked = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that `piece` completes, in order; several lines are joined by LF.

        Raises:
            RelayError: an event is longer than allowed.
        """
        held = self._held
        held += piece
        found: list[bytes] = []
        start = 0
        while end := _EVENT_END.search(held, max(start, self._looked)):
            if data := _data(bytes(memoryview(held)[start : end.start()])):
                found.append(data)
            start = self._looked = end.end()
        del held[:start]
        self._looked = max(0, len(held) - _LONGEST_END)
        if len(held) > self._longest:
            raise RelayError(f"an engine sent an event of more than {self._longest} bytes")
        return found


def _data(event: bytes) -> bytes:
    lines = [line[5:] for line in _LINES.split(event.removeprefix(_BOM)) if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def event_of(data: bytes) -> bytes:
    """One event with one line of data."""
    return b"data: %s\n\n" % data
