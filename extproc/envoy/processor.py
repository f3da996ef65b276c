"""The ext_proc service on grpc.aio: one `Stream` for each request of the gateway.

The gateway keeps a stream open until its request has ended (the lifeline), so the end of the stream settles the
decision in the process that made it, however the request ended.
"""

import asyncio
import logging
from typing import Any, Final

import grpc

from extproc.envoy.contract import Decider
from extproc.envoy.copies import Copies
from extproc.envoy.counts import Counts
from extproc.envoy.decisions import Decisions
from extproc.envoy.endable import Endable
from extproc.envoy.limits import Limits
from extproc.envoy.stream import Context, Stream

__all__ = ["SERVICE", "Counts", "Limits", "Processor"]

_log = logging.getLogger(__name__)

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"


class Processor:
    """The service. One instance serves all streams of a process.

    Attributes:
        counts: what happened on its streams.
        limits: what it takes on.
        endable: its streams that may be ended.
    """

    def __init__(self, decider: Decider, limits: Limits, copies: Copies | None = None) -> None:
        """`copies` takes copies of answers; None where nobody wants any."""
        self.counts = Counts()
        self._decisions = Decisions(decider, self.counts)
        self.limits = limits
        self.endable = Endable()
        self._copies = copies
        self._idle = asyncio.Event()
        self._idle.set()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service for a gRPC server. Messages stay bytes, so constant replies are never serialised again."""
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]]
        methods = {"Process": grpc.stream_stream_rpc_method_handler(self._process)}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def idle(self) -> None:
        """Return once no stream is open."""
        await self._idle.wait()

    async def settled(self) -> None:
        """Return once every decision of an ended stream has been settled."""
        await self._decisions.drained()

    async def _process(self, _requests: Any, context: Context) -> None:
        self.counts.streams += 1
        self.counts.open += 1
        self._idle.clear()
        stream = Stream(context, self.limits, self.counts, self._decisions, self.endable, self._copies)
        try:
            await stream.run()
        except grpc.aio.InternalError:
            # The gateway went away while a reply was being written.
            _log.debug("stream ended while a reply was written")
        finally:
            stream.close()
            self.counts.open -= 1
            if not self.counts.open:
                self._idle.set()
