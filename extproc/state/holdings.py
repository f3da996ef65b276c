"""Work that is done once for the whole fleet, shared among its holders: the rule of `Store.hold` as plain values.

`redis/hold.lua` applies the same rule, and one thing more: an answer of Redis can be lost on its way, so a holder keeps
what it is told to stop until it says that it heard, or its lease is over. Here an answer always arrives.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence


class Holdings:
    """Who has which names of one group."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        self._owners: dict[str, str] = {}
        # Names that a holder asked for because it has fewer; their owner gives them up at its next call.
        self._heirs: dict[str, str] = {}

    def hold(self, holder: str, names: Collection[str], lease_s: float, now: float) -> Sequence[str]:
        """Renew the lease of `holder` and return the names that it has until then.

        Args:
            holder: id of the process that would do the work.
            names: all of the work, as this holder sees it; empty to leave at once.
            lease_s: seconds that the lease lasts.
            now: seconds from any origin, never less than at the last call.
        """
        self._ends = {each: end for each, end in self._ends.items() if end > now and each != holder}
        sees = dict.fromkeys(names)
        for name, owner in list(self._owners.items()):
            self._settle(name, owner, holder, sees)
        if not sees:
            return []
        self._ends[holder] = now + lease_s
        # Nothing waits for a better holder: who comes first takes all that nobody has, and the others take their share
        # of it from there.
        for name in sees:
            self._owners.setdefault(name, holder)
        self._ask_for_share(holder, list(sees))
        return [name for name in sees if self._owners[name] == holder]

    def _settle(self, name: str, owner: str, holder: str, sees: Collection[str]) -> None:
        """Take a name from the dead, and from the calling holder when it does not see it or another asked for it."""
        heir = self._heirs.get(name)
        if heir and heir not in self._ends and (heir != holder or name not in sees):
            del self._heirs[name]
            heir = None
        stays = name in sees and heir is None if owner == holder else owner in self._ends
        if stays:
            return
        self._heirs.pop(name, None)
        if heir:
            self._owners[name] = heir
        else:
            del self._owners[name]

    def _ask_for_share(self, holder: str, sees: Sequence[str]) -> None:
        """Ask for names of those that have most, up to the share, as long as that makes the two more equal."""
        counts = Counter(self._heirs.get(name, owner) for name, owner in self._owners.items())
        share = math.ceil(len(self._owners) / len(self._ends))
        if counts[holder] >= share:
            return
        takeable: dict[str, list[str]] = {}
        for name in sees:
            if self._owners[name] != holder and name not in self._heirs:
                takeable.setdefault(self._owners[name], []).append(name)
        while takeable and counts[holder] < share:
            # Ids break ties, as in Redis.
            richest = min(takeable, key=lambda owner: (-counts[owner], owner))
            if counts[richest] < counts[holder] + 2:
                return
            self._heirs[takeable[richest].pop()] = holder
            counts[richest] -= 1
            counts[holder] += 1
            if not takeable[richest]:
                del takeable[richest]
