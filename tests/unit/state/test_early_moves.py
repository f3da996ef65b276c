"""Who has a request is told while it runs: the profile moves then, and the answer's end teaches as ever."""

import pytest

from extproc.state.feed import Answered, Dropped, Held, Turned
from extproc.state.knowledge import PoolKnowledge, Priors

BLOCKS = (1, 2, 3, 4)


def early(endpoint: str) -> Answered:
    """The data plane tells who has the request, and nothing else."""
    return Answered("c1", endpoint, -1.0, -1.0, -1.0, -1.0)


def ended(endpoint: str) -> Answered:
    """The access log tells of its end."""
    return Answered("c1", endpoint, -1.0, -1.0, 1024.0, 256.0, cached_tokens=-1.0, output_tokens=10.0)


@pytest.fixture
def known() -> PoolKnowledge:
    """A decision on endpoint `a` is under way."""
    made = PoolKnowledge(Priors())
    made.decided("c1", "a", BLOCKS, turn=b"turn")
    return made


def held(known: PoolKnowledge) -> dict[str, int]:
    """Blocks of the prompt in each profile."""
    return {name: known.held(name) for name in ("a", "b", "c")}


def test_profiles_follow_each_further_attempt(known: PoolKnowledge) -> None:
    """What an attempt put into a profile, the next one takes out: an endpoint that gave no answer prefilled nothing."""
    told = [known.apply(early(name)) for name in ("b", "c")]
    assert held(known) == {"a": 0, "b": 0, "c": 4}
    for deltas, gone, holds in zip(told, "ab", "bc", strict=True):
        assert [(type(delta), delta.endpoint) for delta in deltas if isinstance(delta, Dropped | Held)] == [
            (Dropped, gone),
            (Held, holds),
        ]


def test_the_end_teaches_what_the_endpoint_that_answered_has(known: PoolKnowledge) -> None:
    """The conversation goes on there; the profile stays as the early word left it."""
    known.apply(early("b"))
    told = known.apply(ended("b"))
    assert [(delta.turn, delta.endpoint) for delta in told if isinstance(delta, Turned)] == [(b"turn", "b")]
    assert held(known) == {"a": 0, "b": 4, "c": 0}


def test_an_end_without_an_answer_takes_it_back(known: PoolKnowledge) -> None:
    """The second endpoint failed as well: nobody has the prompt."""
    known.apply(early("b"))
    known.apply(ended(""))
    assert held(known) == {"a": 0, "b": 0, "c": 0}


def test_listeners_hear_who_has_each_request(known: PoolKnowledge) -> None:
    """Of every worker's requests, early and at the end; of one that nobody answered nothing."""
    heard: list[tuple[str, str]] = []
    known.hear(lambda charge, endpoint: heard.append((charge, endpoint)))
    for answer in (early("b"), ended("b"), ended("")):
        known.apply(answer)
    known.apply(Answered("other", "c", -1.0, -1.0, -1.0, -1.0))
    assert heard == [("c1", "b"), ("c1", "b"), ("other", "c")]
