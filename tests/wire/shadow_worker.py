"""One worker in a process of its own, which can be frozen and killed: it has every answer copied, and keeps none.

Run as `python -m tests.wire.shadow_worker SOCKET buffered|duplex`; it says `ready` once it listens.
"""

import asyncio
import sys
from typing import cast

from extproc.clock import SystemClock
from extproc.config_gateway import BodyMode
from extproc.envoy.contract import CAPTURE_HEADER
from extproc.envoy.copies import Copies
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server
from tests.wire.shadow_parts import MIB, Desk


async def main(address: str, body_mode: BodyMode) -> None:
    """Serve until killed."""
    desk, health = Desk(headers={CAPTURE_HEADER: "1"}), Health()
    processor = Processor(desk, Limits(body_mode=body_mode), Copies(SystemClock()))
    server = make_server([processor.handler(), health.handler()], max_body_bytes=64 * MIB)
    bind(server, address)
    await server.start()
    health.set_ready(True)
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], cast(BodyMode, sys.argv[2])))
