"""The least HTTP/2 client: one request over a cleartext connection, by prior knowledge."""

import asyncio
from collections.abc import Mapping

import h2.connection
import h2.events

_READ = 65_536


async def post(address: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """Send one POST; status and body of the answer. Raises ConnectionError when the stream does not end well."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connection = h2.connection.H2Connection()
    connection.initiate_connection()
    pseudo = {":method": "POST", ":scheme": "http", ":authority": address, ":path": path}
    connection.send_headers(1, [*pseudo.items(), *headers.items()])
    connection.send_data(1, body, end_stream=True)
    status, answer = 0, bytearray()
    try:
        while True:
            writer.write(connection.data_to_send())
            data = await reader.read(_READ)
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    status = int(dict(event.headers or ())[b":status"])
                elif isinstance(event, h2.events.DataReceived):
                    answer += event.data or b""
                elif isinstance(event, h2.events.StreamEnded):
                    return status, bytes(answer)
                elif isinstance(event, h2.events.StreamReset):
                    raise ConnectionError("the stream was reset")
            if not data:
                raise ConnectionError("the connection ended before the answer")
    finally:
        writer.close()
        await writer.wait_closed()
