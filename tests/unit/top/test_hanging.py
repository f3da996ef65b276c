"""A child process that runs but answers nobody."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from extproc import hanging
from extproc.processes import Child
from tests.ports import free_port
from tests.waiting import until, until_async

SERVER = (
    "import http.server, sys\n"
    "at = ('127.0.0.1', int(sys.argv[1]))\n"
    "http.server.HTTPServer(at, http.server.SimpleHTTPRequestHandler).serve_forever()\n"
)


@contextlib.asynccontextmanager
async def watched(code: str, address: str) -> AsyncIterator[Child]:
    """A child that runs this code, and is asked at this address."""
    child = Child("server", [sys.executable, "-c", code, address.rpartition(":")[2]], sink=lambda _name, _line: None)
    await child.start()
    watching = asyncio.create_task(hanging.watch(child, lambda: hanging.silent_at(address, "/", patience_s=0.5)))
    try:
        yield child
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await child.stop(0.0)


async def listens(address: str) -> bool:
    """Whether somebody takes connections there."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        return True
    return False


async def test_a_child_that_hangs_is_ended_and_one_that_answers_is_not() -> None:
    """It is killed, frozen as it is, when it was silent several times; before, nothing happens to it."""
    address = f"127.0.0.1:{free_port()}"
    async with watched(SERVER, address) as child:
        await until_async(lambda: listens(address))
        assert not await hanging.silent_at(address, "/")
        await asyncio.sleep(5.0)
        assert child.running
        child.send(signal.SIGSTOP)
        await until(lambda: not child.running)
        assert child.code == -signal.SIGKILL


async def test_a_child_that_takes_no_connections_is_left_alone() -> None:
    """It starts, or drains: nobody waits for it."""
    async with watched("import time; time.sleep(60)", f"127.0.0.1:{free_port()}") as child:
        await asyncio.sleep(5.0)
        assert child.running


async def test_silence_is_a_connection_without_an_answer(tmp_path: Path) -> None:
    """No socket and no listener are none; one that accepts and says nothing, or hangs up, is."""
    assert not await hanging.silent_at(f"unix:{tmp_path / 'none.sock'}", "/")
    assert not await hanging.silent_at(f"127.0.0.1:{free_port()}", "/")
    path = tmp_path / "mute.sock"
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_unix_server(lambda _reader, writer: held.append(writer), path)
    assert await hanging.silent_at(f"unix:{path}", "/", patience_s=0.2)
    for writer in held:
        writer.close()
    server.close()
    await server.wait_closed()
    server = await asyncio.start_unix_server(lambda _reader, writer: writer.close(), path)
    assert await hanging.silent_at(f"unix:{path}", "/")
    server.close()
    await server.wait_closed()
