"""When a circuit opens, and how long it waits before it asks again."""

import pytest

from extproc.state.circuit import Circuit, pause_s
from extproc.state.trouble import Trouble

EVEN = 0.5
"""A chance that changes no wait."""


def test_it_opens_at_the_first_failure_and_closes_when_asked() -> None:
    """The second failure of the same stall opens nothing; its trouble is the one that shows."""
    circuit = Circuit()
    assert circuit.trip(Trouble.SLOW, 10.0) is True
    assert circuit.trip(Trouble.GONE, 11.0) is False
    assert (circuit.open, circuit.opened_at, circuit.trouble) == (True, 10.0, Trouble.GONE)
    assert circuit.close(14.0) == 4.0
    assert not circuit.open


def test_the_first_probe_goes_out_at_once_and_later_ones_further_and_further_apart() -> None:
    """A blink is over within its own length; a store that stays away is asked twice a second."""
    circuit = Circuit(0.5)
    circuit.trip(Trouble.SLOW, 0.0)
    waits = []
    for _ in range(8):
        waits.append(circuit.wait_s(EVEN))
        circuit.missed(Trouble.SLOW)
    assert waits == [0.0, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]


def test_a_store_that_answers_probes_alone_is_asked_less_and_less() -> None:
    """Each opening soon after a close waits longer: not every few milliseconds does a decision wait in vain."""
    circuit = Circuit(0.5)
    waits = []
    for number in range(5):
        circuit.trip(Trouble.SLOW, number * 0.1)
        waits.append(circuit.wait_s(EVEN))
        circuit.close(number * 0.1 + 0.05)
    assert waits == [0.0, 0.02, 0.04, 0.08, 0.16]
    circuit.trip(Trouble.SLOW, 60.0)
    assert circuit.wait_s(EVEN) == 0.0


@pytest.mark.parametrize(("chance", "wait"), [(0.0, 0.25), (0.5, 0.5), (1.0, 0.75)])
def test_chance_spreads_the_waits_of_many_workers(chance: float, wait: float) -> None:
    """Half more or less; and however many failures, no overflow."""
    assert pause_s(10**9, 0.5, chance) == wait
