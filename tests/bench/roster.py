"""Tells an Envoy its endpoints and does nothing else: `python -m tests.bench.roster --socket PATH ADDRESS...`.

The keeper's discovery service in a process of its own, so that nothing is scraped beside a measurement.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from extproc.envoy import server
from extproc.envoy.discovery import Discovery, Member, Roster


async def _serve(socket: str, addresses: Sequence[str]) -> None:
    roster = Roster()
    roster.replace({"main": [Member(address) for address in addresses]})
    serving = server.make_server([Discovery(roster).handler()], max_body_bytes=0)
    server.bind(serving, f"unix:{socket}")
    await serving.start()
    sys.stdout.write(json.dumps([socket]) + "\n")
    sys.stdout.flush()
    await serving.wait_for_termination()


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--socket", required=True)
    parser.add_argument("addresses", nargs="+", metavar="ADDRESS")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.socket, arguments.addresses))


if __name__ == "__main__":
    main()
