"""The least that an ext_proc server on grpc.aio can do: `python -m tests.bench.echo --socket PATH`.

Every message is parsed with upb and answered with a constant that changes nothing; the stream stays open until the
gateway ends it. Access-log streams are read and dropped, so that Envoy runs with the same configuration as before
the sidecar. Server options, event loop and health service are the sidecar's own.
"""

import argparse
import asyncio
import sys
from typing import Any

import grpc
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.envoy import access_log, processor, server
from extproc.envoy.exchange import Action
from extproc.envoy.health import Health
from extproc.envoy.replies import CONSTANT

_MAX_BODY = 32 << 20
_REPLIES = {
    "request_headers": CONSTANT[Action.FORWARD_HEADERS],
    "request_body": CONSTANT[Action.FORWARD_BODY],
    "request_trailers": CONSTANT[Action.FORWARD_TRAILERS],
    "response_headers": CONSTANT[Action.FORWARD_RESPONSE_HEADERS],
}


async def _process(_requests: Any, context: Any) -> None:
    while isinstance(raw := await context.read(), bytes):
        await context.write(_REPLIES[pb.ProcessingRequest.FromString(raw).WhichOneof("request")])


async def _drop(_requests: Any, context: Any) -> None:
    while isinstance(await context.read(), bytes):
        pass


def _handlers() -> list[grpc.GenericRpcHandler]:
    generic = grpc.method_handlers_generic_handler
    stream = grpc.stream_stream_rpc_method_handler
    return [
        generic(processor.SERVICE, {"Process": stream(_process)}),
        generic(access_log.SERVICE, {"StreamAccessLogs": grpc.stream_unary_rpc_method_handler(_drop)}),
    ]


async def _serve(socket: str) -> None:
    health = Health()
    serving = server.make_server([*_handlers(), health.handler()], max_body_bytes=_MAX_BODY)
    server.bind(serving, f"unix:{socket}")
    await serving.start()
    health.set_ready(True)
    sys.stdout.write(f'["{socket}"]\n')
    sys.stdout.flush()
    await serving.wait_for_termination()


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--socket", required=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parser.parse_args().socket))


if __name__ == "__main__":
    main()
