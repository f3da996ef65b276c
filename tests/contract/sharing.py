"""What tests of shared work on a real server have in common: holders, lost answers, time."""

import itertools
from collections.abc import Collection
from typing import Any

import msgspec

import redis
from extproc.state.keys import Keys
from extproc.state.redis import RedisStore
from extproc.state.scripts import load
from tests.contract.conftest import PATIENT_MS

NAMES = [f"10.0.0.{number}:8000" for number in range(12)]

_serial = itertools.count()


class Shared:
    """Holders on a real server, under a prefix of their own."""

    def __init__(self, port: int) -> None:
        self.prefix = f"hold{next(_serial)}"
        keys = Keys(self.prefix).pool("p")
        self.holders, self.holdings = keys.holders("scrape"), keys.holdings("scrape")
        # Typed loosely: redis-py's stubs cannot tell bytes from decoded replies.
        self.raw: Any = redis.Redis(port=port)
        self.store = RedisStore(f"redis://127.0.0.1:{port}/0", PATIENT_MS, self.prefix)

    async def close(self) -> None:
        """Forget the keys, and disconnect."""
        self.raw.delete(self.holders, self.holdings)
        await self.store.close()
        self.raw.close()

    def unheard(self, holder: str, names: Collection[str], lease_ms: int) -> None:
        """A call that is carried out, and whose answer nobody gets."""
        ask = msgspec.msgpack.encode((holder, lease_ms, list(names), ()))
        self.raw.eval(load("hold").text, 2, self.holders, self.holdings, ask)

    def age(self, seconds: float) -> None:
        """Make all leases `seconds` older."""
        for holder in self.raw.zrange(self.holders, 0, -1):
            self.raw.zincrby(self.holders, -seconds * 1000, holder)
        if table := self.raw.get(self.holdings):
            holders, names, heirs, ends = msgspec.msgpack.decode(table)
            aged = {name: end - int(seconds * 1000) for name, end in dict(ends).items()}
            self.raw.set(self.holdings, msgspec.msgpack.encode((holders, names, heirs, aged)), keepttl=True)
