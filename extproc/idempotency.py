"""Idempotency keys: while a request runs, no other one with the same key of the same tenant does.

No answers are kept: once the first request has ended, however it did, the key may run again.
"""

import asyncio
from typing import Final

from extproc.clock import Clock
from extproc.config import Config
from extproc.envoy.contract import Call
from extproc.errors import DuplicateRequestError, StoreError
from extproc.govern.quotas import Claim
from extproc.quota_limits import secret_of
from extproc.request.session import clean_id, pin_key
from extproc.surroundings import Surroundings

HEADER: Final = "idempotency-key"
"""Request header with a client's key for one piece of work (IETF draft httpapi-idempotency-key-header)."""
_LATE: Final = 10_000
"""Keys that wait to be given up while the store is gone; more of them end with their leases."""
_AGAIN_S: Final = 1.0


class Idempotency:
    """The keys of one worker's requests."""

    def __init__(self, around: Surroundings, clock: Clock) -> None:
        self._around = around
        self._clock = clock
        self._claims: dict[str, Claim] = {}
        self._late: dict[str, tuple[Claim, float]] = {}
        self._mending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    def concerns(config: Config, call: Call) -> bool:
        """Whether the call has a key that counts."""
        return config.retries.idempotency_s > 0 and HEADER in call.headers

    async def claimed(self, config: Config, call: Call, tenant: str, pool: str) -> Claim | None:
        """The call's key, which is its own from now on; None without one.

        Raises:
            DuplicateRequestError: another request has it.
        """
        key = clean_id(call.headers.get(HEADER)) if config.retries.idempotency_s > 0 else ""
        if not key:
            return None
        name = pin_key(secret_of(config), "idempotency", f"{tenant}\0{key}")
        lease_ms = round(config.retries.idempotency_s * 1000)
        claim = Claim(f"quota/{name[0]}", name, self._around.new_charge_id(), lease_ms, pool)
        if not await self._around.store.claim(claim):
            raise DuplicateRequestError("A request with this idempotency key is still running: wait for its answer.")
        return claim

    def belongs(self, claim: Claim, charge_id: str) -> None:
        """The claim lasts as long as this charge."""
        self._claims[charge_id] = claim

    def settled(self, charge_id: str) -> None:
        """A charge has ended; returns at once."""
        claim = self._claims.pop(charge_id, None)
        if claim is not None:
            self.release(claim)

    def release(self, claim: Claim) -> None:
        """Give a key up; returns at once."""
        task = asyncio.get_running_loop().create_task(self._unclaim(claim))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unclaim(self, claim: Claim) -> None:
        try:
            await self._around.store.unclaim(claim)
        except StoreError:
            if len(self._late) < _LATE:
                self._late[claim.token] = claim, self._clock.monotonic() + claim.lease_ms / 1000
            if self._mending is None or self._mending.done():
                self._mending = asyncio.get_running_loop().create_task(self._mend())

    async def _mend(self) -> None:
        """Give up keys that could not be given up, once the store answers again."""
        while self._late:
            await asyncio.sleep(_AGAIN_S)
            for token, (claim, until) in list(self._late.items()):
                try:
                    if self._clock.monotonic() < until:
                        await self._around.store.unclaim(claim)
                except StoreError:
                    break
                del self._late[token]

    async def close(self) -> None:
        """Finish giving up what is being given up."""
        await asyncio.gather(*self._tasks)
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.gather(self._mending, return_exceptions=True)
