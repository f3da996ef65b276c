"""Arguments that no simulated engine could run with."""

import pytest

from extproc.sim.fleet import SimFleet


@pytest.mark.parametrize(("engines", "port"), [(0, 0), (-1, 0), (1, 65_536), (2, 65_535), (1, -1)])
def test_engines_and_ports_that_cannot_be_are_refused(engines: int, port: int) -> None:
    """At least one engine, and ports that exist for all of them."""
    with pytest.raises(ValueError, match=r"engines|port"):
        SimFleet(engines, port=port)


def test_the_last_port_can_be_asked_for() -> None:
    """65,535 is a port."""
    assert SimFleet(1, port=65_535).addresses == ["127.0.0.1:65535"]
