"""What one pool's shared store was not told while it did not answer: ends, charges, pins. Bounded, and without I/O."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from extproc.state.values import MAX_PINS, Settle

LONG_AGO: Final = float("-inf")


class LatePin(msgspec.Struct, frozen=True, gc=False):
    """A pin that the shared store may not have.

    Attributes:
        endpoint: what it names.
        until: when its life ends, on the clock of this process.
        max_pins: pins that the pool keeps.
        before: what this worker knew the session to be pinned to before it pinned it without the shared store; empty
            for nothing. None for a pin made with it, which it lost: nobody need have decided since.
    """

    endpoint: str
    until: float
    max_pins: int
    before: str | None

    def wins_over(self, shared: str) -> bool:
        """Whether it is written over what the shared store has now.

        A session's most recent decision should win, and no two replicas have one clock. While the shared store has
        what this worker knew before, or nothing, or the same, nobody else has decided since: this pin is the most
        recent. Anything else is a decision of another replica that this worker had not seen. It stays: all replicas
        see that one, and so of several replicas that moved a session in one outage the first to return wins.
        """
        return not shared or (self.before is not None and shared in {self.before, self.endpoint})


class Unsent:
    """Ends, charges and pins that wait for the shared store.

    Args:
        most: settles, and pins, kept at most.

    Attributes:
        settles: ends to be delivered, by charge, oldest first.
        pins: pins to be merged, by key, the one made longest ago first.
        wiped: replicas whose charges are to be dropped at once, and all open ones told again: there were more ends than
            could be kept, and ends dropped one by one would leave charges that nothing ends; or there are such already.
        lost: the shared store may know none of the open charges.
        pins_lost: it may have no pins either.
        max_pins: pins that the pool keeps, as the last decision asked.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._local_only: set[str] = set()
        self._unsure: dict[str, float] = {}
        self.settles: OrderedDict[str, Settle] = OrderedDict()
        self.pins: OrderedDict[str, LatePin] = OrderedDict()
        self.wiped: set[str] = set()
        self.lost = self.pins_lost = False
        self.max_pins = MAX_PINS

    def __bool__(self) -> bool:
        return bool(self.settles or self.pins or self.wiped or self.lost or self.pins_lost or self._unsure)

    def doubt(self, charge_id: str, decided_at: float) -> None:
        """The shared store may know this charge, or not, or with another endpoint."""
        self._unsure.setdefault(charge_id, decided_at)

    def alone(self, charge_id: str, decided_at: float) -> None:
        """A charge was made here alone; one in doubt before stays in doubt, as the shared store may have it too."""
        if charge_id not in self._unsure:
            self._local_only.add(charge_id)
            self._unsure[charge_id] = decided_at

    def is_unsure(self, charge_id: str) -> bool:
        """Whether the shared store is still to be told of this charge."""
        return charge_id in self._unsure

    def is_local_only(self, charge_id: str) -> bool:
        """Whether the shared store surely does not know this charge."""
        return charge_id in self._local_only

    def doubt_all(self, charge_ids: Iterable[str]) -> None:
        """The shared store lost, perhaps, these charges, made when it still answered."""
        for charge_id in charge_ids:
            self._unsure.setdefault(charge_id, LONG_AGO)

    def keep_doubts(self, open_ids: Collection[str]) -> None:
        """Forget doubts of charges that are not open any more."""
        for charge_id in [each for each in self._unsure if each not in open_ids]:
            self.ended(charge_id)

    def telling(self, charge_id: str) -> float:
        """The shared store is being told of a charge, and from here on of its end; returns when it was decided."""
        self._local_only.discard(charge_id)
        return self._unsure.get(charge_id, LONG_AGO)

    def told(self, charge_id: str) -> None:
        """The shared store knows the charge as it is."""
        self._unsure.pop(charge_id, None)

    def ended(self, charge_id: str) -> bool:
        """A charge ended; True when the shared store never knew it and need not hear of it."""
        self._unsure.pop(charge_id, None)
        if charge_id in self._local_only:
            self._local_only.discard(charge_id)
            return True
        return False

    def end(self, settle: Settle) -> int:
        """Keep an end for later; returns how many were given up for the wholesale way of `wiped`."""
        self.settles[settle.charge_id] = settle
        if len(self.settles) <= self._most:
            return 0
        given_up = len(self.settles)
        self.wiped |= {each.replica for each in self.settles.values()}
        self.settles.clear()
        return given_up

    def delivered(self, settle: Settle) -> None:
        """The shared store knows this end."""
        self.settles.pop(settle.charge_id, None)

    def pin(self, key: str, pin: LatePin) -> int:
        """Keep a pin for later, the newest of its session; returns how many went for it."""
        known = self.pins.get(key)
        if known is not None and known.before is not None:
            pin = msgspec.structs.replace(pin, before=known.before)
        self.pins[key] = pin
        self.pins.move_to_end(key)
        if len(self.pins) <= self._most:
            return 0
        self.pins.popitem(last=False)
        return 1

    def superseded(self, key: str) -> None:
        """The shared store decided for the session again: a pin that waits is older."""
        self.pins.pop(key, None)

    def ghost(self, key: str, endpoint: str) -> None:
        """The shared store pinned the session by a decision of this worker whose answer came too late."""
        if (pin := self.pins.get(key)) is not None:
            self.pins[key] = msgspec.structs.replace(pin, before=endpoint)

    def merged(self, key: str, pin: LatePin, shared: str) -> None:
        """This pin was merged, and `shared` is what the shared store has of it; one made meanwhile still waits."""
        kept = self.pins.get(key)
        if kept is pin:
            del self.pins[key]
        elif kept is not None:
            self.pins[key] = msgspec.structs.replace(kept, before=shared)

    def forget(self, replica: str) -> None:
        """The replica gave up all its charges."""
        for charge_id in [each.charge_id for each in self.settles.values() if each.replica == replica]:
            del self.settles[charge_id]
        self.wiped.discard(replica)
