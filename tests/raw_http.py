"""HTTP/1.1 on a raw socket, for servers that have to break its rules."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping

import msgspec


class Received(msgspec.Struct):
    """One request that came in.

    Attributes:
        path: with its query.
        headers: names in lower case.
        body: as it came.
        sent: bytes of the answer's body sent so far.
        tokens: tokens sent so far.
        left: the client closed the connection before the answer's end.
        done: nothing more happens with it.
    """

    path: str
    headers: dict[str, str]
    body: bytes
    sent: int = 0
    tokens: int = 0
    left: bool = False
    done: bool = False


async def read_request(reader: asyncio.StreamReader) -> Received | None:
    """The next request of a connection, whole; None at its end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    path = first.split(" ")[1]
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Received(path, headers, await _read_chunks(reader))
    return Received(path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return bytes(body)


def write_head(writer: asyncio.StreamWriter, status: int, headers: Mapping[str, str]) -> None:
    """Write the status line and the headers."""
    lines = [f"HTTP/1.1 {status} Told", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode())


def reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Make the close of the connection a reset."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
