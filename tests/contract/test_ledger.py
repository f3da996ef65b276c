"""Any order of verbs from any replica: every store must agree with a model that is written from the verbs' rules.

`WARMPATH_LONG=1` runs thirty times as many histories.
"""

import asyncio
import itertools
import os
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from extproc.state.store import Store
from extproc.state.values import Candidate, Move, Reserve, Settle
from tests.contract.conftest import MemoryWorld, RedisWorld, World
from tests.contract.ledger_model import LEASE_MS, PIN_TTL_MS, QUANTUM_S, STEPS, STILL, TIE, UNIT_MS, Model

T = TypeVar("T")
ENDPOINTS = ("a", "b", "c", "d")
REPLICAS = ("r1", "r2", "r3")
SESSIONS = ("s1", "s2", "s3", "s4")
CLIENTS = range(3)
# How long a replica with open charges shows no sign of life, nor is reaped. After four leases Redis drops by itself
# what it has of the replica, so that nothing stays of a pool that nobody serves; no fleet is silent for as long.
SILENCE_S = 4 * LEASE_MS / 1000 - 100
LONG = os.environ.get("WARMPATH_LONG", "") not in {"", "0"}

_serial = itertools.count()

candidates = st.lists(st.sampled_from(ENDPOINTS), min_size=1, max_size=4, unique=True).flatmap(
    lambda ids: st.tuples(
        *(
            st.builds(
                Candidate,
                endpoint=st.just(endpoint),
                static_ms=st.integers(0, 3).map(lambda units: units * UNIT_MS),
                tokens=st.integers(0, 5).map(float),
                rate=st.just(STILL),
                floor_tokens=st.integers(0, 9).map(float),
                floor_running=st.integers(0, 9),
                stalled_tokens=st.sampled_from((0.0, 0.0, 1.0, 2.0)),
            )
            for endpoint in ids
        )
    )
)
flows = st.fixed_dictionaries(
    {
        "pin_key": st.sampled_from(("", *SESSIONS)),
        "next_pin_key": st.sampled_from(("", *SESSIONS)),
        "max_pins": st.sampled_from((1, 2, 3, 100)),
        "break_out_ms": st.integers(0, 4).map(lambda units: (units + TIE) * UNIT_MS),
        "sequences": st.integers(1, 8),
        "output_tokens": st.floats(0.0, 8.0),
    }
)


class Replicas(RuleBasedStateMachine):
    """Several connections to one world, driven from a thread beside the loop that they live on."""

    world: World
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        if isinstance(self.world, RedisWorld):
            self.flushed()
        else:
            self.world = MemoryWorld()
        self.stores: Sequence[Store] = [self.world.store() for _ in CLIENTS]

    def flushed(self) -> None:
        """Delete all that the world holds."""
        assert isinstance(self.world, RedisWorld)
        if keys := list(self.world.raw.scan_iter(f"{self.world.prefix}:*", count=1000)):
            self.world.raw.delete(*keys)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The outcome of a call."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result()


class Ledger(Replicas):
    """Drives the replicas and the model side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.ended: list[tuple[str, str]] = []
        self.beats: dict[str, float] = {}

    def some_charge(self, data: st.DataObject) -> tuple[str, str]:
        """One that is open, one that has ended, or one that never was."""
        known = [*self.model.charges, *self.ended[-3:], ("r1", f"ghost{next(_serial)}")]
        return data.draw(st.sampled_from(known))

    def agree(self, ask: Reserve, client: int) -> None:
        """Reserve on both sides."""
        wanted, got = self.model.reserve(ask), self.run(self.stores[client].reserve(ask))
        assert (got.endpoint, got.pinned, got.moved, got.absent_pin) == (
            wanted.endpoint,
            wanted.pinned,
            wanted.moved,
            wanted.absent_pin,
        )
        assert (got.running, got.output_tokens) == (wanted.running, wanted.output_steps / STEPS)
        assert got.backlog_tokens == pytest.approx(wanted.backlog, abs=TIE)
        assert got.cost_ms == pytest.approx(wanted.cost * UNIT_MS, abs=TIE * UNIT_MS)

    @rule(
        client=st.sampled_from(CLIENTS),
        replica=st.sampled_from(REPLICAS),
        options=candidates,
        flow=flows,
        force=st.sampled_from([{}, {}, {"strict": True}, {"ignore_pin": True}]),
    )
    def reserve(
        self, client: int, replica: str, options: tuple[Candidate, ...], flow: dict[str, Any], force: dict[str, bool]
    ) -> None:
        """A new charge."""
        self.agree(_ask(f"c{next(_serial)}", replica, options, **flow, **force), client)

    @precondition(lambda self: self.model.charges)
    @rule(client=st.sampled_from(CLIENTS), data=st.data(), options=candidates)
    def reserve_again(self, client: int, data: st.DataObject, options: tuple[Candidate, ...]) -> None:
        """An open charge once more: the first answer, from where it is by then, and nothing charged."""
        replica, charge = data.draw(st.sampled_from(list(self.model.charges)))
        self.agree(_ask(charge, replica, options, pin_key="s1"), client)

    @rule(client=st.sampled_from(CLIENTS), data=st.data(), refund=st.booleans())
    def settle(self, client: int, data: st.DataObject, refund: bool) -> None:
        """End a charge, open or not."""
        replica, charge = key = self.some_charge(data)
        end = Settle("p", charge, replica, refund)
        was_open = self.run(self.stores[client].settle(end))
        assert was_open == self.model.settle(end)
        self.ended += [key] if was_open else []

    @rule(
        client=st.sampled_from(CLIENTS), data=st.data(), endpoint=st.sampled_from(ENDPOINTS), tokens=st.integers(0, 5)
    )
    def move(self, client: int, data: st.DataObject, endpoint: str, tokens: int) -> None:
        """Move a charge, open or not, to where it may be already."""
        replica, charge = self.some_charge(data)
        move = Move("p", charge, replica, endpoint, float(tokens), STILL)
        assert self.run(self.stores[client].move(move)) == self.model.move(move)

    @rule(
        client=st.sampled_from(CLIENTS),
        session=st.sampled_from(SESSIONS),
        endpoint=st.sampled_from(ENDPOINTS),
        max_pins=st.sampled_from((1, 2, 3, 100)),
    )
    def pin(self, client: int, session: str, endpoint: str, max_pins: int) -> None:
        """Pin a session without a decision."""
        self.run(self.stores[client].pin("p", session, endpoint, PIN_TTL_MS, max_pins))
        self.model.pin(session, endpoint, max_pins)

    @rule(client=st.sampled_from(CLIENTS))
    def look_at_pins(self, client: int) -> None:
        """Every session is pinned where the model has it, or not at all."""
        found = {session: self.run(self.stores[client].pinned("p", session)) for session in SESSIONS}
        assert found == {session: self.model.pinned(session) for session in SESSIONS}

    @rule(client=st.sampled_from(CLIENTS), replica=st.sampled_from(REPLICAS))
    def heartbeat(self, client: int, replica: str) -> None:
        """A sign of life, which finds the dead ones; counting anew changes nothing."""
        self.beats[replica] = self.model.now
        before = set(self.model.charges)
        beat, wanted = self.run(self.stores[client].heartbeat("p", replica, LEASE_MS)), self.model.heartbeat(replica)
        # Whether the store was emptied each client notices for itself.
        assert (beat.reaped, beat.known) == (wanted.reaped, wanted.known)
        self.ended += sorted(before - set(self.model.charges))

    @rule(client=st.sampled_from(CLIENTS), replica=st.sampled_from(REPLICAS))
    def release(self, client: int, replica: str) -> None:
        """A replica leaves."""
        self.ended += [key for key in self.model.charges if key[0] == replica]
        self.run(self.stores[client].release("p", replica))
        self.model.release(replica)

    @rule(quanta=st.integers(1, 5))
    def wait(self, quanta: int) -> None:
        """Time passes: leases and pins may end."""
        for replica in sorted({owner for owner, _ in self.model.charges}):
            if self.model.now + quanta * QUANTUM_S - self.beats.get(replica, 0.0) > SILENCE_S:
                lives = self.model.leases.get(replica, 0.0) > self.model.now
                self.heartbeat(0, replica if lives else next(name for name in REPLICAS if name != replica))
        self.world.age(quanta * QUANTUM_S)
        self.model.now += quanta * QUANTUM_S

    @precondition(lambda self: isinstance(self.world, RedisWorld))
    @rule(sure=st.integers(0, 3))
    def flush(self, sure: int) -> None:
        """Redis loses everything, now and then."""
        if sure == 0:
            self.ended += self.model.charges
            self.flushed()
            self.model.flush()

    @invariant()
    def the_loads_are_the_models(self) -> None:
        """What is in flight is exactly what the open charges hold; backlogs are what was charged and not given back."""
        loads = self.run(self.stores[0].loads("p"))
        assert set(loads) <= set(ENDPOINTS)
        for endpoint in ENDPOINTS:
            sequences, steps = self.model.in_flight(endpoint)
            load = loads.get(endpoint)
            assert (load.running, load.output_tokens) == (sequences, steps / STEPS) if load else sequences == 0
            assert (load.backlog_tokens if load else 0.0) >= 0.0
            assert (load.backlog_tokens if load else 0.0) == pytest.approx(self.model.backlog[endpoint], abs=TIE)

    def teardown(self) -> None:
        """When everything has ended nothing is in flight, before and after a count."""
        for replica, charge in self.model.charges:
            assert self.run(self.stores[1].settle(Settle("p", charge, replica))) is True
        for _ in range(2):
            assert all(load.running == 0 for load in self.run(self.stores[2].loads("p")).values())
            self.world.age(LEASE_MS / 1000)
            self.run(self.stores[0].heartbeat("p", "last", LEASE_MS))


def _ask(charge: str, replica: str, options: tuple[Candidate, ...], **flow: Any) -> Reserve:
    return Reserve(
        "p",
        charge,
        replica,
        options,
        pin_ttl_ms=PIN_TTL_MS,
        running_ms=UNIT_MS,
        output_ms=UNIT_MS,
        tie_ms=TIE * UNIT_MS,
        lease_ms=LEASE_MS,
        **flow,
    )


async def histories(machine: type[Replicas], world: World) -> None:
    """Run as many histories of the machine on the world as there is time for."""
    bound = type("Bound", (machine,), {"loop": asyncio.get_running_loop(), "world": world})
    examples = 50 if isinstance(world, MemoryWorld) else 10
    chosen = settings(
        max_examples=examples * (30 if LONG else 1), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    await asyncio.to_thread(run_state_machine_as_test, bound, settings=chosen)


async def test_every_history_is_the_models(world: World) -> None:
    """Whatever the order of verbs and from whichever replica, picks, pins, loads and answers are the model's."""
    await histories(Ledger, world)
