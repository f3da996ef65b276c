"""What is told of a conversation by its canonical segments: how it began, and the turns it had before this one."""

from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_intdigest, xxh3_128

from extproc.request.model import Request

_FIRST_MARK = 0xF8
"""Where a message's role ends: marks are bytes that UTF-8 never contains; see `request.prompt`."""
_SYSTEM = (b"system", b"developer")
_ASSISTANT = b"assistant"


def beginning(segments: Sequence[bytes]) -> bytes:
    """The system messages in front and the first message after them, which all turns of a conversation share.

    Tools, templates and documents are left out: agents load tools while a conversation goes on.

    Returns:
        Nothing when there is no message.
    """
    found = []
    for segment in segments:
        if segment[:1] == b"\xff":
            found.append(segment)
            if not any(_has_role(segment, role) for role in _SYSTEM):
                break
    return b"".join(found)


def turns_before(request: Request) -> list[bytes]:
    """The `Request.turn` of each earlier request of a conversation, the newest first.

    A request carries the whole conversation, and with it all that was asked before: what stands before each run of
    assistant messages. Reads every byte of the prompt.
    """
    return list(_turns(request))[::-1] if request.turn else []


def _turns(request: Request) -> Iterator[bytes]:
    so_far = xxh3_128(seed=xxh3_64_intdigest(request.salt))
    answered = True
    for segment in request.segments:
        answers = _has_role(segment, _ASSISTANT)
        if answers and not answered:
            yield so_far.digest()
        answered = answers
        so_far.update(segment)


def _has_role(segment: bytes, role: bytes) -> bool:
    end = 1 + len(role)
    return segment[:1] == b"\xff" and segment[1:end] == role and (len(segment) == end or segment[end] >= _FIRST_MARK)
