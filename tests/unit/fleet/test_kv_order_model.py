"""A stream of KV event batches of an engine that loses some, drops answers, and starts again: what is known is true."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.fleet.kv_order import Action, Apply, Ask, Begin, Forget, Order, Phase
from tests.unit.fleet.test_kv_order import batch


class _Engine:
    """An engine with a replay buffer, that may start again."""

    def __init__(self, buffer: int) -> None:
        self.life = 0
        self.count = 0
        self.buffer = deque[int](maxlen=buffer)

    def publish(self) -> tuple[int, bytes]:
        seq, self.count = self.count, self.count + 1
        self.buffer.append(seq)
        return seq, batch(seq, self.life)

    def restart(self) -> None:
        self.life, self.count = self.life + 1, 0
        self.buffer.clear()


class _Reader:
    """Does what an `Order` says, and keeps what it knows by then."""

    def __init__(self, engine: _Engine, *, has_replay: bool) -> None:
        self.engine = engine
        self.order = Order(replay=has_replay)
        self.known: list[bytes] = []
        self.from_start = False
        self.asked: int | None = None
        self.do(self.order.begin(0.0))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply():
                    self.known.append(action.payload)
                case Begin():
                    self.known, self.from_start = [], action.from_start
                case Forget():
                    self.known, self.from_start = [], False
                case Ask():
                    self.asked = action.start

    def told(self, now: float, *, new_life: bool) -> None:
        """Time has passed, and the engine's state says whether it has started again."""
        if new_life:
            self.known, self.from_start, self.asked = [], False, None
            self.do(self.order.begin(now))
        self.do(self.order.tick(now))

    def answer(self, lost: set[int], now: float) -> None:
        """Let the engine answer the replay that is out, but for some answers."""
        start, self.asked = self.asked, None
        if start is None:
            return
        for number, seq in enumerate([each for each in self.engine.buffer if each >= start]):
            if self.asked is None and number not in lost:
                self.do(self.order.replayed(seq, batch(seq, self.engine.life), now))
        if self.asked is None:
            self.do(self.order.replay_ended(now))


_STEPS = st.lists(
    st.one_of(
        st.sampled_from(["publish", "lose", "restart", "answer", "wait"]),
        st.sets(st.integers(0, 6), min_size=1, max_size=3),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(_STEPS, st.booleans(), st.integers(1, 8))
def test_what_is_known_is_one_stretch_of_one_life(steps: list[str | set[int]], has_replay: bool, buffer: int) -> None:
    """Whatever is lost and whenever the engine starts again: no batch twice, none missing between, none out of order.

    With a replay socket that answers in the end, the stretch then ends with the last batch published. A new life is
    told of late, as scraping does: until then its numbers may happen to go on where those of the old one ended.
    """
    engine, now, untold = _Engine(buffer), 0.0, False
    reader = _Reader(engine, has_replay=has_replay)
    for step in steps:
        match step:
            case "publish":
                reader.do(reader.order.live(*engine.publish(), now))
            case "lose":
                engine.publish()
            case "restart":
                engine.restart()
                untold = True
            case "answer":
                reader.answer(set(), now)
            case "wait":
                now += 3.0
                reader.told(now, new_life=untold)
                untold = False
            case set():
                reader.answer(step, now)
        seqs = [int(each.split(b"/")[1]) for each in reader.known]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else True
        assert untold or all(each.startswith(b"%d/" % engine.life) for each in reader.known)
        if reader.from_start and seqs:
            assert seqs[0] == 0
    if has_replay:
        reader.told(now, new_life=untold)
        for _ in range(40):
            now += 4.0
            reader.do(reader.order.tick(now))
            reader.answer(set(), now)
        assert reader.order.phase is Phase.IN_STEP
        first = int(reader.known[0].split(b"/")[1]) if reader.known else engine.count
        assert reader.known == [batch(seq, engine.life) for seq in range(first, engine.count)]
        assert first == 0 or not reader.from_start
