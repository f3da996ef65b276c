"""A TCP connection through this process, which can be cut."""

import asyncio
import contextlib

from tests.ports import free_port


class Wire:
    """Forwards one TCP port to another, and can be cut: connections break, and new ones are refused."""

    def __init__(self, to: int) -> None:
        self.port = free_port()
        self._to = to
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def mend(self) -> None:
        """Forward, from now on."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", self.port)

    async def cut(self) -> None:
        """Break everything."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writers.clear()
        self._tasks.clear()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(back)
        for each in (self._copy(reader, back), self._copy(there, writer)):
            self._tasks.add(asyncio.create_task(each))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
            writer.transport.abort()
