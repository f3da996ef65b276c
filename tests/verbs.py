"""Every verb of the store once, for tests of what a deployment lets through."""

import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from extproc.errors import StoreError
from extproc.govern.quotas import Claim, Correction, Draw, Take
from extproc.state.document_store import Document
from extproc.state.redis import RedisStore
from extproc.state.values import Candidate, Move, Reserve, Settle

POOL: Final = "p"
_LEASE_MS: Final = 15_000


async def every_verb(store: RedisStore, pool: str = POOL) -> dict[str, StoreError]:
    """Call each verb with arguments that reach what it does; what failed, by the verb's name."""
    charge = secrets.token_hex(8)
    ask = Reserve(
        pool, charge, "r1", (Candidate("a", 1.0, 100.0, 1000.0), Candidate("b", 2.0, 100.0, 1000.0)), pin_key="s"
    )
    quota, claim = Draw(pool, "b", "tokens", "minute", 100.0, 1.0, 1.0), Claim(pool, "k", charge, _LEASE_MS)
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "ping": lambda: store.ping(pool),
        "report": lambda: store.report(pool),
        "heartbeat": lambda: store.heartbeat(pool, "r1", _LEASE_MS),
        "reserve": lambda: store.reserve(ask),
        "move": lambda: store.move(Move(pool, charge, "r1", "b", 100.0, 1000.0)),
        "pin": lambda: store.pin(pool, "s", "b", 60_000),
        "pinned": lambda: store.pinned(pool, "s"),
        "loads": lambda: store.loads(pool),
        "settle": lambda: store.settle(Settle(pool, charge, "r1", refund=True)),
        "settle early": lambda: store.settle(Settle(pool, charge + "-early", "r1")),
        "release": lambda: store.release(pool, "r1"),
        "put_states": lambda: store.put_states(pool, {"a": b"x", "b": b"y"}),
        "states": lambda: store.states(pool),
        "drop_states": lambda: store.drop_states(pool, ["b"]),
        "hold": lambda: store.hold(pool, "work", "h1", ["a", "b"], _LEASE_MS),
        "append": lambda: store.append(pool, b"x", 100),
        "read": lambda: store.read(pool, "0", 0),
        "read on": lambda: store.read(pool, "9999999999999-0", 1),
        "put_snapshot": lambda: store.put_snapshot(pool, "whole", "1-1", [b"x", b"y"]),
        "snapshots": lambda: store.snapshots(pool),
        "snapshot": lambda: store.snapshot(pool, "whole"),
        "take": lambda: store.take(Take([quota])),
        "correct": lambda: store.correct(Correction(1.0, [quota])),
        "claim": lambda: store.claim(claim),
        "unclaim": lambda: store.unclaim(claim),
        "put_document": lambda: store.put_document(pool, "d", Document(1, b"x")),
        "documents": lambda: store.documents(pool),
        "drop_document": lambda: store.drop_document(pool, "d"),
        "put_part": lambda: store.put_part(pool, "e", "r1", b"x", _LEASE_MS),
        "parts": lambda: store.parts(pool, "e"),
        "record": lambda: store.record(pool, "a", b"x", 100, _LEASE_MS),
        "record for good": lambda: store.record(pool, "b", b"x", 100, 0),
        "records": lambda: store.records(pool, "a", 10),
        "drop_snapshots": lambda: store.drop_snapshots(pool, ["whole"]),
    }
    failed = {}
    for name, step in steps.items():
        try:
            await step()
        except StoreError as error:
            failed[name] = error
    return failed
