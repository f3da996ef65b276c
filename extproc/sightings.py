"""What a worker makes of the endpoints' published states over time, by its own clock alone.

The host that read an engine may have another idea of the time than this one, or none that it sticks to: how old a state
is follows from when it last changed here. Plain values and rules; the caller passes times and reads the store.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from extproc.state.endpoint import EndpointState
from extproc.state.values import Load

MOST_RUNNING: Final = 65_536
"""Sequences of one engine that are believed, at most."""


class Sighting(msgspec.Struct, frozen=True, gc=False):
    """One endpoint's state as this worker saw it.

    Attributes:
        state: the state.
        since: when it was last seen to change, by the worker's clock that never goes back.
        foreign: sequences in the engine that no charge of the fleet accounts for.
    """

    state: EndpointState
    since: float
    foreign: int = 0


class _Trace(msgspec.Struct):
    """What is kept of an endpoint between two looks.

    Attributes:
        payload: its published state.
        sighting: what was made of it.
        charged: sequences that the ledger had in flight there at the last looks, oldest first: all of them since the
            look before the one that saw the state change.
        excess: sequences that the state before had beyond all charges.
    """

    payload: bytes
    sighting: Sighting
    charged: list[int]
    excess: int = 0


class Sightings:
    """The endpoints of one pool."""

    def __init__(self) -> None:
        self._traces: dict[str, _Trace] = {}

    @property
    def all(self) -> Mapping[str, Sighting]:
        """By endpoint id, what was last seen."""
        return {name: trace.sighting for name, trace in self._traces.items()}

    def saw(
        self, payloads: Mapping[str, bytes], states: Mapping[str, EndpointState], loads: Mapping[str, Load], now: float
    ) -> None:
        """Take one look; endpoints that it does not show stay as they were.

        Args:
            payloads: the states as published: any change of them is a sign that somebody reads the engine.
            states: what they say.
            loads: the ledger's load of each endpoint, read after the states; those without any may be absent.
            now: when, by a clock that never goes back.
        """
        for name, state in states.items():
            payload, load = payloads[name], loads.get(name)
            charged = load.running if load else 0
            trace = self._traces.get(name)
            if trace is None:
                self._traces[name] = _Trace(payload, Sighting(state, now), [charged])
                continue
            trace.charged.append(charged)
            changed, trace.payload = payload != trace.payload, payload
            if changed and not state.unread:
                excess = max(0, min(state.running + state.waiting, MOST_RUNNING) - max(trace.charged))
                trace.sighting = Sighting(state, now, min(excess, trace.excess))
                trace.excess = excess
                del trace.charged[:-2]
                continue
            if changed:
                # The keeper could not read the engine: the numbers are those of before, and prove nothing new.
                trace.sighting = Sighting(state, now, trace.sighting.foreign)
            if len(trace.charged) > 2:
                # Nobody reads the engine: what the ledger had there meanwhile is one number, the most of it.
                trace.charged[0:2] = [max(trace.charged[0:2])]

    def keep(self, endpoints: Mapping[str, object]) -> None:
        """Forget all endpoints but these."""
        for name in self._traces.keys() - endpoints.keys():
            del self._traces[name]
