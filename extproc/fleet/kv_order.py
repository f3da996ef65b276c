"""In which order a rank's batches are taken in, which are missing, and when to ask for them again. No I/O, no clock.

Rules:
- Subscribe first, then ask for a replay from 0; live batches are held back meanwhile, and those that the replay brought
  too are dropped by their number. So nothing falls between the two.
- A batch whose number is not the next one shows a gap: a replay is asked for from the last batch that was taken in. The
  first answer must be that very batch. If it is another one of the same number, or if there is none at all, the engine
  has started again. If it is a later one, the replay does not reach back far enough.
- A live number that goes back is another life of the engine too.
- A gap that cannot be filled may have had removals in it: all that is known is forgotten, and begins anew with what
  comes next, as for one that joins late. The same goes for a new life, which is known from its start when its first
  batch is number 0.
- A connection that came about anew may be one to another life, whose numbers happen to go on where the old one's ended:
  the last batch is asked for before anything else is taken in.
- A stream that has been quiet for `CHECK_S` is asked for its last batch again. That finds what was lost at the end of a
  burst, or before a subscription took effect, and an engine that started again and has nothing to tell yet.
- An engine's router socket drops answers that its peer does not fetch in time, with no sign but their numbers: what is
  missing is asked for again as long as each replay gets further.
- A replay that brings nothing new, or no answer, `TRIES` times in a row is given up for a while. So is one that has no
  end: what it brings must not keep a stream out of step for ever. Without one, the first live batch is the beginning,
  and no gap can be filled.
- A stream that had to be forgotten too often (`kv_tally.Losses`) makes no sense: numbers that jump back and
  forth, or one loss after another. It is not listened to for `REST_S`, and begins anew after that.

Protocol: `vllm/distributed/kv_events.py`.
"""

from enum import StrEnum
from typing import Final, Literal

import msgspec
from xxhash import xxh3_64_intdigest

from extproc.fleet.kv_held import Held, Room
from extproc.fleet.kv_tally import Losses, Tally

REPLAY_S: Final = 5.0
"""Longest wait for the first answer of a replay. vLLM looks for requests every 0.1 s, between two batches."""
NEXT_S: Final = 1.0
"""Longest wait for the next one: they are sent in one go, and the end may be among those that a router drops."""
CHECK_S: Final = 10.0
TRIES: Final = 3
REST_S: Final = 30.0
"""Pause before a replay that was given up is tried again."""
LONGEST_S: Final = 300.0
"""Longest time from a question to the end of its replay, further ones that it took included. A keeper that starts
beside 100 busy engines reads a million batches."""


class Phase(StrEnum):
    """Where a stream stands."""

    CONNECTING = "connecting"
    """Nothing has been heard yet."""
    REPLAYING = "replaying"
    """Live batches wait for the end of a replay."""
    IN_STEP = "in_step"
    """Every batch is taken in as it comes."""
    LEFT_ALONE = "left_alone"
    """It made no sense: nothing is taken in."""


class Forget(msgspec.Struct, frozen=True, gc=False):
    """All that is known may be wrong now.

    Attributes:
        why: `gap` for batches that cannot be had any more, `restart` for another life of the engine.
    """

    why: Literal["gap", "restart"]


class Begin(msgspec.Struct, frozen=True, gc=False):
    """Know nothing: the stream begins with the next batch.

    Attributes:
        from_start: the engine told nothing before that.
    """

    from_start: bool


class Apply(msgspec.Struct, frozen=True, gc=False):
    """Take in this batch."""

    seq: int
    payload: bytes


class Ask(msgspec.Struct, frozen=True, gc=False):
    """Ask for a replay from this number on; answers of one that was asked for before must not come any more."""

    start: int


Action = Forget | Begin | Apply | Ask


class _Asked(msgspec.Struct):
    """A replay that is out.

    Attributes:
        start: number asked for; that of the last batch taken in, or 0 when there is none.
        print: fingerprint of that batch; None when there is none.
        until: when it is given up, unless an answer comes.
        check: nothing is known to be missing.
        repair: something was known when it was asked for, and more than the first connection was the reason.
        answered: at least one answer came.
        hole: an answer was missing between others.
    """

    start: int
    print: int | None
    until: float
    check: bool
    repair: bool
    answered: bool = False
    hole: bool = False


class Order:
    """One stream of batches. Methods return what is to be done, in this order; `now` is monotonic time in seconds.

    Attributes:
        phase: where it stands.
        tally: what was counted.
    """

    def __init__(self, *, replay: bool, tally: Tally | None = None, room: Room | None = None) -> None:
        """Call `begin` first.

        Args:
            replay: whether the engine has a replay socket.
            tally: counted here; several streams may share it.
            room: memory for batches that wait; likewise.
        """
        self.tally = tally or Tally()
        self._has_replay = replay
        self._rests_until = 0.0
        self._ends_by = 0.0
        self._is_connected = False
        self._losses = Losses()
        self._held = Held(room or Room())
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self.phase = Phase.CONNECTING
        self._next: int | None = None
        self._print: int | None = None
        self._live = -1
        self._tries = 0
        self._heard_at = now
        self._asked: _Asked | None = None
        self._held.take()

    @property
    def is_asking(self) -> bool:
        """Whether a replay is out; nobody waits for answers otherwise."""
        return self._asked is not None

    def begin(self, now: float) -> list[Action]:
        """Begin with nothing known: sockets were opened, or the engine is another one."""
        self._reset(now)
        return self._ask(now) if self._can_replay(now) else []

    def end(self) -> None:
        """Nothing is read any more: let go of what waits."""
        self._reset(0.0)

    def reconnected(self, now: float) -> list[Action]:
        """A connection to the engine came about."""
        first, self._is_connected = not self._is_connected, True
        known = self._next is not None and self.phase is Phase.IN_STEP
        return self._ask(now, repair=not first) if known and self._can_replay(now) else []

    def live(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch was published."""
        if self.phase is Phase.LEFT_ALONE:
            return []
        self._heard_at = now
        actions = self._another_life(now) if seq <= self._live else []
        self._live = seq
        if self.phase is Phase.REPLAYING:
            self._held.put(Apply(seq, payload))
            return actions
        return actions + self._take(Apply(seq, payload), now)

    def replayed(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """An answer of the replay that was asked for last."""
        asked = self._asked
        if asked is None:
            return []
        asked.until = now + NEXT_S
        first, asked.answered = not asked.answered, True
        actions: list[Action] = []
        if first and asked.print is not None:
            if seq > asked.start:
                return self._lost(now)
            if seq == asked.start and xxh3_64_intdigest(payload) != asked.print:
                return self._another_life(now)
        elif first and (self._next is None or seq > self._next):
            self._next = seq
            actions.append(Begin(seq == 0))
        if seq == self._next and not asked.hole:
            self._tries = 0
            return actions + self._apply(Apply(seq, payload))
        asked.hole = asked.hole or self._next is None or seq > self._next
        return actions

    def replay_ended(self, now: float) -> list[Action]:
        """The engine said that the replay is complete."""
        asked, self._asked = self._asked, None
        if asked is None:
            return []
        if not asked.answered and asked.print is not None:
            return self._another_life(now)
        if asked.hole:
            return self._again(now)
        actions: list[Action] = []
        if self._next is None:
            # No batch is kept, so none was ever published.
            self._next = 0
            actions.append(Begin(True))
        self.tally.replays += asked.repair and not asked.check
        self.phase = Phase.IN_STEP
        return actions + self._release(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        asked = self._asked
        if self.phase is Phase.LEFT_ALONE:
            return [] if now < self._rests_until else self.begin(now)
        if asked is not None and now >= self._ends_by:
            self.tally.endless += 1
            self._asked, self._rests_until = None, now + REST_S
            return [] if asked.check else self._without_replay(now)
        if asked is not None:
            if now < asked.until:
                return []
            self.tally.unanswered += 1
            self._asked = None
            if not asked.check:
                return self._again(now)
            self._rests_until = now + REST_S
        elif now - self._heard_at >= CHECK_S and self._can_replay(now):
            self._heard_at = now
            return self._ask(now, check=self._next is not None)
        return []

    def _can_replay(self, now: float) -> bool:
        return self._has_replay and now >= self._rests_until

    def _ask(self, now: float, *, check: bool = False, repair: bool = True) -> list[Action]:
        if self.phase is not Phase.REPLAYING:
            self._ends_by = now + LONGEST_S
        if not check:
            self.phase = Phase.REPLAYING
        start = max((self._next or 0) - 1, 0)
        self._asked = _Asked(start, self._print, now + REPLAY_S, check, repair and self._next is not None)
        return [Ask(start)]

    def _again(self, now: float) -> list[Action]:
        """Ask for what is missing, unless that has been of no use too often."""
        if not self._can_replay(now):
            return self._without_replay(now)
        self._tries += 1
        if self._tries > TRIES:
            self._tries = 0
            self._rests_until = now + REST_S
            return self._without_replay(now)
        return self._ask(now)

    def _take(self, batch: Apply, now: float) -> list[Action]:
        """A live batch, whose turn it is if nothing is missing before it."""
        if self.phase is Phase.LEFT_ALONE:
            return []
        if self._next is None:
            self.phase = Phase.IN_STEP
            return [Begin(batch.seq == 0), *self._apply(batch)]
        if batch.seq < self._next:
            return []
        if batch.seq == self._next:
            return self._apply(batch)
        self.tally.gaps += 1
        self._held.put(batch)
        return self._again(now)

    def _apply(self, batch: Apply) -> list[Action]:
        self._next = batch.seq + 1
        self._print = xxh3_64_intdigest(batch.payload)
        return [batch]

    def _release(self, now: float) -> list[Action]:
        """Take in what was held back, up to the first gap."""
        actions: list[Action] = []
        held = self._held.take()
        while held and self.phase is not Phase.REPLAYING:
            actions += self._take(held.popleft(), now)
        for batch in held:
            self._held.put(batch)
        return actions

    def _another_life(self, now: float) -> list[Action]:
        self._reset(now)
        asks = not self._makes_no_sense(now) and self._can_replay(now)
        return [Forget("restart"), *(self._ask(now) if asks else [])]

    def _lost(self, now: float) -> list[Action]:
        """The replay does not reach back: begin with the oldest batch that it has."""
        self._next = self._print = None
        return [Forget("gap"), *([] if self._makes_no_sense(now) else self._ask(now))]

    def _without_replay(self, now: float) -> list[Action]:
        """Begin with the oldest batch that was held back."""
        actions: list[Action] = [Forget("gap")] if self._next is not None else []
        self._next = self._print = None
        self.phase = Phase.CONNECTING
        return actions if actions and self._makes_no_sense(now) else actions + self._release(now)

    def _makes_no_sense(self, now: float) -> bool:
        """Note that all is forgotten; whether that was once too often, so that the stream is not listened to."""
        if not self._losses.too_often(now):
            return False
        self.tally.senseless += 1
        self._reset(now)
        self.phase, self._rests_until = Phase.LEFT_ALONE, now + REST_S
        return True
