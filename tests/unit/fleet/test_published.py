"""The states in the store, seen from one host: as old as the time since they last changed."""

from extproc.fleet.published import Published
from extproc.state.endpoint import EndpointState, encode

ONE = EndpointState("10.0.0.1:80", running=1)
TWO = EndpointState("10.0.0.2:80", running=2)


def test_a_state_is_read_as_it_stands() -> None:
    """The latest bytes count; what cannot be read, was never there, or is gone, is none."""
    published = Published()
    assert published.state("a") is None
    published.learn({"a": encode(ONE), "junk": b"\x90"}, 1.0)
    assert (published.state("a"), published.state("junk"), published.state("b")) == (ONE, None, None)
    published.learn({"a": encode(TWO)}, 2.0)
    assert published.state("a") == TWO
    published.learn({}, 3.0)
    assert published.state("a") is None


def test_only_what_is_no_member_and_does_not_change_is_stale() -> None:
    """By the time at which the bytes were first seen as they are."""
    published = Published()
    published.learn({"same": encode(ONE), "changes": encode(ONE), "member": encode(ONE), "junk": b"\x90"}, 1.0)
    published.learn({"same": encode(ONE), "changes": encode(TWO), "member": encode(ONE), "junk": b"\x90"}, 5.0)
    assert published.stale({"member"}, 0.9) == []
    assert published.stale({"member"}, 1.0) == ["same", "junk"]
    assert published.stale({"member"}, 5.0) == ["same", "changes", "junk"]


def test_what_comes_back_is_as_young_as_its_return() -> None:
    """A state that was dropped and published again has changed, though its bytes are the same."""
    published = Published()
    published.learn({"a": encode(ONE)}, 1.0)
    published.learn({}, 2.0)
    published.learn({"a": encode(ONE)}, 3.0)
    assert published.stale((), 2.0) == []
