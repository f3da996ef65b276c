"""The verbs of a store that concern limits of use, and keys that one request at a time may have."""

from typing import Protocol

from extproc.govern.quotas import Claim, Correction, Take, Taken


class QuotaStore(Protocol):
    """A part of `store.Store`; see there for errors."""

    async def take(self, ask: Take) -> Taken:
        """Take all draws, or none when one of them is not allowed.

        Draws of one shard are one atomic step. Those of several shards, which in a cluster may lie on several nodes,
        are several: what was taken of one is given back when another refuses.
        """
        ...

    async def correct(self, correction: Correction) -> None:
        """Change what is in use by what turned out to be otherwise; see `quotas.corrected`."""
        ...

    async def claim(self, claim: Claim) -> bool:
        """Whether the key is the claimer's now: nobody had it, or itself. It stays so until `unclaim` or the lease."""
        ...

    async def unclaim(self, claim: Claim) -> None:
        """Give a key up; one that somebody else has stays with that one."""
        ...
