"""One stream's end of `contract.Line`: its decision may wait for long, and must hear when the client leaves."""

import contextlib
from collections.abc import Callable

import grpc

from extproc.envoy import replies


class StreamLine:
    """Implements `contract.Line` for one decision."""

    __slots__ = ("_context", "_left", "_tell")

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._context = context
        self._left = False
        self._tell: Callable[[], None] | None = None

    async def hold(self, longest_s: float) -> None:
        """See `Line.hold`."""
        # A gateway that is gone ends the stream, which is told elsewhere.
        with contextlib.suppress(grpc.aio.BaseError):
            await self._context.write(replies.patience(longest_s))

    def when_left(self, tell: Callable[[], None]) -> None:
        """See `Line.when_left`."""
        if self._left:
            tell()
        self._tell = tell

    def leave(self) -> None:
        """The client is gone, or the gateway is."""
        self._left = True
        if self._tell is not None:
            self._tell()
