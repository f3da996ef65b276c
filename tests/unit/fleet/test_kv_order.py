"""The order of a stream of KV event batches: what is taken in, what is missing, and when nothing is known any more."""

import pytest

from extproc.fleet.kv_order import (
    CHECK_S,
    LONGEST_S,
    REPLAY_S,
    REST_S,
    TRIES,
    Action,
    Apply,
    Ask,
    Begin,
    Forget,
    Order,
    Phase,
)
from extproc.fleet.kv_tally import MOST


def batch(seq: int, life: int = 0) -> bytes:
    """What an engine publishes under a number; other in each life, as its time stamp is."""
    return f"{life}/{seq}".encode()


def live(order: Order, *seqs: int, life: int = 0, now: float = 0.0) -> list[Action]:
    """Publish these numbers."""
    return [action for seq in seqs for action in order.live(seq, batch(seq, life), now)]


def replay(order: Order, *seqs: int, life: int = 0, now: float = 0.0) -> list[Action]:
    """Answer a replay with these numbers, and end it."""
    actions = [action for seq in seqs for action in order.replayed(seq, batch(seq, life), now)]
    return actions + order.replay_ended(now)


def applied(*seqs: int, life: int = 0) -> list[Action]:
    """Batches that are to be taken in."""
    return [Apply(seq, batch(seq, life)) for seq in seqs]


def in_step(*seqs: int) -> Order:
    """A stream whose replay brought these numbers."""
    order = Order(replay=True)
    order.begin(0.0)
    replay(order, *seqs)
    return order


def test_a_replay_from_the_start_comes_before_what_was_published_meanwhile() -> None:
    """Live batches wait for the end of the replay; those that it brought too are dropped."""
    order = Order(replay=True)
    assert order.begin(0.0) == [Ask(0)]
    assert live(order, 1, 2, 3) == []
    assert [order.phase] == [Phase.REPLAYING]
    assert replay(order, 0, 1, 2) == [Begin(from_start=True), *applied(0, 1, 2, 3)]
    assert [order.phase] == [Phase.IN_STEP]
    assert live(order, 4) == applied(4)


def test_a_replay_that_begins_later_is_not_known_from_its_start() -> None:
    """An engine that has run longer than its buffer reaches is joined late."""
    order = Order(replay=True)
    order.begin(0.0)
    assert replay(order, 70, 71) == [Begin(from_start=False), *applied(70, 71)]


def test_an_empty_replay_means_that_nothing_was_ever_published() -> None:
    """A living engine keeps its last batch at least, so one without any is known from its start."""
    order = Order(replay=True)
    order.begin(0.0)
    assert replay(order) == [Begin(from_start=True)]
    assert live(order, 0) == applied(0)


def test_a_batch_lost_before_the_subscription_took_effect_is_fetched() -> None:
    """After an empty replay the next number is 0; another one shows a gap."""
    order = Order(replay=True)
    order.begin(0.0)
    replay(order)
    assert live(order, 2) == [Ask(0)]
    assert replay(order, 0, 1, 2) == applied(0, 1, 2)


def test_without_a_replay_socket_the_first_batch_is_the_beginning() -> None:
    """It is known from its start when that batch is number 0."""
    for first in (0, 7):
        order = Order(replay=False)
        assert order.begin(0.0) == []
        assert live(order, first) == [Begin(from_start=first == 0), *applied(first)]
        assert order.phase is Phase.IN_STEP


def test_a_gap_is_filled_by_a_replay_from_the_last_batch_taken_in() -> None:
    """What was published meanwhile waits, and comes after it, once."""
    order = in_step(0, 1)
    assert live(order, 4) == [Ask(1)]
    assert live(order, 5) == []
    assert replay(order, 1, 2, 3, 4) == applied(2, 3, 4, 5)
    assert order.tally.gaps == 1
    assert order.phase is Phase.IN_STEP


def test_what_waited_behind_a_second_gap_goes_on_waiting() -> None:
    """Live batches lost in two places need two replays, and none that came is asked for twice."""
    order = Order(replay=True)
    order.begin(0.0)
    live(order, 1, 2, 5, 6, 7)
    assert replay(order, 0) == [Begin(from_start=True), *applied(0, 1, 2), Ask(2)]
    assert replay(order, 2, 3, 4) == applied(3, 4, 5, 6, 7)


def test_a_gap_that_the_replay_does_not_reach_back_to_forgets_all() -> None:
    """Removals may be lost: the stream begins again with the oldest batch that can be had."""
    order = in_step(0, 1)
    live(order, 50)
    assert order.replayed(40, batch(40), 0.0) == [Forget("gap"), Ask(0)]
    assert replay(order, 40, 41, 42) == [Begin(from_start=False), *applied(40, 41, 42), Ask(42)]
    assert replay(order, *range(42, 51)) == applied(*range(43, 51))


def test_a_gap_without_a_replay_socket_forgets_all() -> None:
    """The batch after the gap is the beginning."""
    order = Order(replay=False)
    order.begin(0.0)
    live(order, 0, 1)
    assert live(order, 3) == [Forget("gap"), Begin(from_start=False), *applied(3)]


def test_a_live_number_that_goes_back_is_another_life() -> None:
    """The new life is asked for from its start, and what was published meanwhile follows."""
    order = in_step(0, 1, 2)
    live(order, 3)
    assert live(order, 0, life=1) == [Forget("restart"), Ask(0)]
    assert live(order, 1, life=1) == []
    assert replay(order, 0, 1, life=1) == [Begin(from_start=True), *applied(0, 1, life=1)]


def test_another_life_whose_numbers_went_on_is_known_by_its_last_batch() -> None:
    """An engine that started again may have published as many batches as before: the last one is another one."""
    order = in_step(0, 1, 2)
    assert live(order, 9, life=1) == [Ask(2)]
    assert order.replayed(2, batch(2, 1), 0.0) == [Forget("restart"), Ask(0)]
    assert replay(order, *range(10), life=1) == [Begin(from_start=True), *applied(*range(10), life=1)]


def test_a_new_connection_is_made_sure_of_before_anything_is_taken_in() -> None:
    """What it brings waits until the last batch was seen to be the same; the first connection asks for nothing more."""
    order = Order(replay=True)
    order.begin(0.0)
    assert order.reconnected(0.0) == []
    replay(order, 0, 1)
    assert order.reconnected(0.0) == [Ask(1)]
    assert live(order, 2) == []
    assert replay(order, 1) == applied(2)
    assert order.reconnected(0.0) == [Ask(2)]
    assert live(order, 3, life=1) == []
    assert order.replayed(2, batch(2, 1), 0.0) == [Forget("restart"), Ask(0)]


def test_a_new_connection_without_a_replay_socket_changes_nothing() -> None:
    """Nobody could be asked: its numbers tell what they can."""
    order = Order(replay=False)
    order.begin(0.0)
    live(order, 0)
    assert order.reconnected(0.0) == []
    assert live(order, 1) == applied(1)


def test_a_quiet_stream_is_asked_for_its_last_batch() -> None:
    """What was lost at the end of a burst shows; nothing waits for the answer, and nothing comes twice."""
    order = in_step(0, 1)
    assert order.tick(CHECK_S - 1) == []
    assert order.tick(CHECK_S) == [Ask(1)]
    assert order.phase is Phase.IN_STEP
    assert live(order, 2, now=CHECK_S) == applied(2)
    assert replay(order, 1, 2, 3, now=CHECK_S) == applied(3)


def test_a_quiet_engine_that_started_again_is_found_by_its_empty_buffer() -> None:
    """It has published nothing yet, so that not even the last batch is there."""
    order = in_step(0, 1)
    order.tick(CHECK_S)
    assert order.replay_ended(CHECK_S) == [Forget("restart"), Ask(0)]
    assert replay(order, now=CHECK_S) == [Begin(from_start=True)]


def test_answers_that_a_router_dropped_are_asked_for_again() -> None:
    """A replay with a hole is taken in up to the hole, and goes on from there."""
    order = Order(replay=True)
    order.begin(0.0)
    assert replay(order, 0, 1, 4, 5) == [Begin(from_start=True), *applied(0, 1), Ask(1)]
    assert replay(order, 1, 2, 3, 4, 5) == applied(2, 3, 4, 5)


def test_a_replay_that_never_gets_further_is_given_up() -> None:
    """After some tries the gap counts as lost, and no replay is asked for until it has rested."""
    order = in_step(0)
    actions = live(order, 5)
    tries = 0
    while actions == [Ask(0)]:
        tries += 1
        actions = replay(order, 0)
    assert tries == TRIES
    assert actions == [Forget("gap"), Begin(from_start=False), *applied(5)]
    assert live(order, 8) == [Forget("gap"), Begin(from_start=False), *applied(8)]
    assert live(order, 11, now=REST_S) == [Ask(8)]


def test_a_replay_that_does_not_answer_is_given_up() -> None:
    """Then the first batch that was held back is the beginning."""
    order = Order(replay=True)
    order.begin(0.0)
    live(order, 3, 4)
    now, actions = 0.0, list[Action]()
    for _ in range(TRIES + 1):
        assert order.tick(now + REPLAY_S - 1) == []
        now += REPLAY_S
        actions = order.tick(now)
    assert actions == [Begin(from_start=False), *applied(3, 4)]
    assert order.phase is Phase.IN_STEP
    assert order.tally.unanswered == TRIES + 1


def test_a_check_that_is_not_answered_changes_nothing() -> None:
    """The stream stays in step; the replay socket rests."""
    order = in_step(0)
    order.tick(CHECK_S)
    assert order.tick(CHECK_S + REPLAY_S) == []
    assert order.phase is Phase.IN_STEP
    assert live(order, 1, now=CHECK_S + REPLAY_S) == applied(1)


def test_answers_of_a_replay_that_nobody_waits_for_are_ignored() -> None:
    """A late end or answer is no news."""
    order = in_step(0, 1)
    assert order.replayed(2, batch(2), 0.0) == []
    assert order.replay_ended(0.0) == []


def test_a_replay_without_an_end_is_given_up() -> None:
    """Answers that bring nothing, or new batches for ever: the stream does not stay out of step, and it is counted."""
    for brings_new in (False, True):
        order = in_step(0, 1)
        assert live(order, 10**6) == [Ask(1)]
        now, seq, actions = 0.0, 1, list[Action]()
        while not actions and now < 2 * LONGEST_S:
            now += 0.5
            order.replayed(seq, batch(seq), now)
            seq += brings_new
            actions = order.tick(now)
        assert now == LONGEST_S
        assert actions == [Forget("gap"), Begin(from_start=False), *applied(10**6)]
        assert (order.phase, order.is_asking, order.tally.endless) == (Phase.IN_STEP, False, 1)
        assert live(order, 10**6 + 5, now=now) == [Forget("gap"), Begin(from_start=False), *applied(10**6 + 5)]


def test_replays_with_holes_one_after_another_are_given_up() -> None:
    """Each gets further, none gets there: the time counts from the first one."""
    order = in_step(0, 1)
    live(order, 10**6)
    now, seq, actions = 0.0, 1, list[Action]([Ask(1)])
    while len(actions) == 1 and isinstance(actions[0], Ask) and now < 2 * LONGEST_S:
        now, seq = now + 1.0, seq + 1
        for one in (seq - 1, seq, seq + 9):
            order.replayed(one, batch(one), now)
        actions = order.tick(now) or order.replay_ended(now)
    assert now == LONGEST_S
    assert actions[0] == Forget("gap")


def test_a_check_without_an_end_changes_nothing() -> None:
    """Nothing is known to be missing; nobody listens to it any more."""
    order = in_step(0, 1)
    assert order.tick(CHECK_S) == [Ask(1)]
    for second in range(1, int(LONGEST_S)):
        assert order.replayed(1, batch(1), CHECK_S + second) == []
        assert order.tick(CHECK_S + second) == []
    assert order.tick(CHECK_S + LONGEST_S) == []
    assert (order.phase, order.is_asking, order.tally.endless) == (Phase.IN_STEP, False, 1)


@pytest.mark.parametrize("has_replay", [True, False])
@pytest.mark.parametrize("jumps", [(5, 4), (5, 900), (0, 0), (7, 3, 10**9)])
def test_numbers_that_jump_for_ever_are_not_listened_to(has_replay: bool, jumps: tuple[int, ...]) -> None:
    """What an engine tells makes no sense: little is done for it, nothing of it stays, and it is counted."""
    order = Order(replay=has_replay)
    order.begin(0.0)
    actions = [
        action for at in range(10_000) for action in order.live(jumps[at % len(jumps)], bytes([at % 7]), 0.001 * at)
    ]
    if has_replay:  # it answers nothing: the first replay goes on waiting
        assert sum(isinstance(each, Ask) for each in actions) <= MOST
    assert sum(isinstance(each, Forget) for each in actions) <= MOST
    assert sum(isinstance(each, Apply) for each in actions) <= 2 * MOST
    if not has_replay:
        assert (order.phase, order.tally.senseless) == (Phase.LEFT_ALONE, 1)
        assert isinstance(actions[-1], Forget)


def test_a_stream_that_was_left_alone_begins_anew() -> None:
    """After its rest it is heard again, from the start."""
    order = in_step(0)
    now = 0.0
    for life in range(MOST):
        now += 1.0
        actions = order.live(0, batch(0, life), now) or order.live(0, batch(0, life + 100), now)
    assert actions == [Forget("restart")]
    assert order.tally.senseless == 1
    assert live(order, 1, 2, now=now + 1.0) == order.tick(now + 1.0) == []
    assert order.tick(now + REST_S) == [Ask(0)]
    assert replay(order, 0, 1, now=now + REST_S) == [Begin(from_start=True), *applied(0, 1)]
    assert order.phase is Phase.IN_STEP


def test_a_crash_now_and_then_is_no_nonsense() -> None:
    """An engine that starts again every twenty seconds is followed each time."""
    order = in_step(0, 1)
    live(order, 2)
    for life in range(1, 20):
        now = 20.0 * life
        assert live(order, 0, life=life, now=now) == [Forget("restart"), Ask(0)]
        replay(order, 0, 1, life=life, now=now)
        live(order, 2, life=life, now=now)
    assert order.tally.senseless == 0


def test_a_stream_that_begins_repairs_nothing() -> None:
    """The replay that every stream begins with is no fault, nor after a restart; a repair is one."""
    order = in_step(0, 1)
    assert order.reconnected(0.0) == [Ask(1)]
    replay(order, 1)
    assert order.tally.replays == 0
    order.tick(CHECK_S)
    replay(order, 1, now=CHECK_S)
    live(order, 2, now=CHECK_S)
    live(order, 0, life=1, now=CHECK_S)
    replay(order, 0, life=1, now=CHECK_S)
    assert order.tally.replays == 0
    live(order, 3, life=1, now=CHECK_S)
    replay(order, 0, 1, 2, 3, life=1, now=CHECK_S)
    assert order.tally.replays == 1
    order.reconnected(CHECK_S)
    replay(order, 3, life=1, now=CHECK_S)
    assert order.tally.replays == 2
