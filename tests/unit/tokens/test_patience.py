"""When a source is left alone: after a few failures, for longer each time, and not for long when it answers again."""

from extproc.tokens.patience import FIRST_S, LONGEST_S, STRIKES, Patience


def struck(times: int = STRIKES, now: float = 0.0) -> Patience:
    """A source that failed so often in a row."""
    patience = Patience()
    for _ in range(times):
        patience.strike(now)
    return patience


def test_a_few_failures_are_borne() -> None:
    """One slow answer says nothing."""
    assert struck(STRIKES - 1).allows(0.0)


def test_a_dead_source_rests_and_is_tried_once_after_each_rest() -> None:
    """Each rest is twice as long as the one before, up to a limit."""
    patience, now, rest = struck(), 0.0, FIRST_S
    for _ in range(12):
        assert not patience.allows(now + rest - 0.01)
        now += rest
        rest = min(LONGEST_S, 2 * rest)
        assert patience.allows(now)
        assert not patience.allows(now)
        patience.strike(now)
    assert rest == LONGEST_S


def test_an_answer_in_time_ends_the_rest() -> None:
    """And the next rest is a short one again."""
    patience = struck()
    assert patience.allows(FIRST_S)
    patience.answered()
    assert patience.allows(FIRST_S)
    for _ in range(STRIKES):
        patience.strike(10.0)
    assert not patience.allows(10.0)
    assert patience.allows(10.0 + FIRST_S)


def test_answers_in_between_keep_it_going() -> None:
    """Only failures in a row count."""
    patience = Patience()
    for _ in range(10):
        patience.strike(0.0)
        patience.answered()
    assert patience.allows(0.0)


def test_a_late_answer_that_came_soon_is_forgiven() -> None:
    """A source that is slow with new prompts only is asked on."""
    patience = struck()
    patience.forgive()
    assert patience.allows(0.0)
    Patience().forgive()
