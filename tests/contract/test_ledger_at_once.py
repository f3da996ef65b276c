"""Verbs of several replicas at the same moment: what must hold whatever the order in which the store takes them."""

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from extproc.state.store import Store
from extproc.state.values import Beat, Candidate, Move, Reservation, Reserve, Settle
from tests.contract.conftest import World
from tests.contract.ledger_model import LEASE_MS, PIN_TTL_MS, QUANTUM_S, STILL, TIE
from tests.contract.test_ledger import ENDPOINTS, REPLICAS, SESSIONS, Replicas, histories

_serial = itertools.count()

Verb = Reserve | Settle | Move


class Charge(msgspec.Struct, frozen=True):
    """An open charge: how it was asked for, and where it is."""

    ask: Reserve
    endpoint: str


def _candidates(costs: Sequence[int], tokens: int) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(name, float(cost), float(tokens), STILL) for name, cost in zip(ENDPOINTS, costs, strict=True)
    )


# All endpoints stand among the candidates and pins are strict: whoever comes second to a session follows the first.
reserves = st.builds(
    lambda replica, session, costs, tokens, sequences: Reserve(
        "p",
        f"c{next(_serial)}",
        replica,
        _candidates(costs, tokens),
        pin_key=session,
        pin_ttl_ms=PIN_TTL_MS,
        strict=True,
        sequences=sequences,
        output_tokens=sequences / 8,
        backlog_weight=0.0,
        lease_ms=LEASE_MS,
    ),
    st.sampled_from(REPLICAS),
    st.sampled_from(("", *SESSIONS)),
    st.permutations(range(len(ENDPOINTS))),
    st.integers(0, 5),
    st.integers(1, 4),
)


class Crowd(Replicas):
    """Steps of several verbs, each step sent at once over all connections."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[str, Charge] = {}
        self.backlog = 0.0
        self.pins: dict[str, str] = {}

    def at_once(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """The outcomes of all calls, in their order."""

        async def together() -> list[Any]:
            return await asyncio.gather(*calls)

        return self.run(together())

    def store(self, number: int) -> Store:
        """The connection that the verb of this number goes over."""
        return self.stores[number % len(self.stores)]

    def send(self, number: int, verb: Verb) -> Coroutine[Any, Any, Any]:
        """One verb on its way."""
        store = self.store(number)
        match verb:
            case Reserve():
                return store.reserve(verb)
            case Settle():
                return store.settle(verb)
            case Move():
                return store.move(verb)

    def drawn(self, data: st.DataObject) -> list[Verb]:
        """Up to four reservations, ends of open charges, some of them twice, and moves."""
        verbs: list[Verb] = list(data.draw(st.lists(reserves, max_size=4)))
        if self.open:
            some = st.sampled_from(sorted(self.open))
            for charge in data.draw(st.lists(some, max_size=4)):
                refund = data.draw(st.booleans())
                verbs.append(Settle("p", charge, self.open[charge].ask.replica, refund))
            for charge in data.draw(st.lists(some, max_size=4)):
                tokens = self.open[charge].ask.candidates[0].tokens
                to = data.draw(st.sampled_from(ENDPOINTS))
                verbs.append(Move("p", charge, self.open[charge].ask.replica, to, tokens, STILL))
        return data.draw(st.permutations(verbs))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some verbs at once."""
        verbs = self.drawn(data)
        told = self.at_once([self.send(number, verb) for number, verb in enumerate(verbs)])
        answers = list(zip(verbs, told, strict=True))
        self.see_reserved([(verb, got) for verb, got in answers if isinstance(verb, Reserve)])
        self.see_settled([(verb, got) for verb, got in answers if isinstance(verb, Settle)])
        self.see_moved([(verb, got) for verb, got in answers if isinstance(verb, Move)])

    def see_reserved(self, answers: Sequence[tuple[Reserve, Reservation]]) -> None:
        """Every reservation is charged; those of one session agree, with its pin when it had one."""
        winners = defaultdict(set, {session: {endpoint} for session, endpoint in self.pins.items()})
        for ask, got in answers:
            assert got.endpoint in ENDPOINTS
            self.open[ask.charge_id] = Charge(ask, got.endpoint)
            self.backlog += ask.candidates[0].tokens
            if ask.pin_key:
                winners[ask.pin_key].add(got.endpoint)
        assert all(len(endpoints) == 1 for endpoints in winners.values())
        firsts = Counter(ask.pin_key for ask, got in answers if ask.pin_key and not got.pinned)
        assert firsts == {ask.pin_key: 1 for ask, _ in answers if ask.pin_key and ask.pin_key not in self.pins}
        self.pins = {session: endpoint for session, (endpoint,) in winners.items()}

    def see_settled(self, answers: Sequence[tuple[Settle, bool]]) -> None:
        """Of several ends of an open charge exactly one finds it open, and its refund alone counts."""
        assert Counter(end.charge_id for end, ended in answers if ended) == {end.charge_id: 1 for end, _ in answers}
        for end, ended in answers:
            if ended:
                charge = self.open.pop(end.charge_id)
                self.backlog -= charge.ask.candidates[0].tokens if end.refund else 0.0

    def see_moved(self, answers: Sequence[tuple[Move, bool]]) -> None:
        """A charge that stays open was moved by every move, and is where one of them put it."""
        targets = defaultdict(set)
        for move, moved in answers:
            assert moved or move.charge_id not in self.open
            targets[move.charge_id].add(move.endpoint)
        for charge_id in targets.keys() & self.open.keys():
            charge = self.open[charge_id]
            again = self.run(self.stores[0].reserve(charge.ask))
            assert again.endpoint in targets[charge_id]
            self.open[charge_id] = Charge(charge.ask, again.endpoint)

    @rule()
    def wait(self) -> None:
        """No lease has run out when the replicas show signs of life."""
        self.pass_time(REPLICAS)

    def pass_time(self, alive: Sequence[str]) -> None:
        """These replicas show a sign of life, then time passes; pins are renewed."""
        self.at_once([self.store(number).heartbeat("p", name, LEASE_MS) for number, name in enumerate(alive)])
        self.world.age(QUANTUM_S)
        self.at_once([self.stores[0].pin("p", name, endpoint, PIN_TTL_MS) for name, endpoint in self.pins.items()])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), replicas=st.permutations(REPLICAS), leave=st.booleans())
    def die(self, data: st.DataObject, replicas: Sequence[str], leave: bool) -> None:
        """A replica dies or leaves while its charges end and move, and all others find it dead at once."""
        dead, *living = replicas
        doomed = [name for name, charge in self.open.items() if charge.ask.replica == dead]
        ending = data.draw(st.lists(st.sampled_from(doomed), unique=True)) if doomed else []
        calls: list[Coroutine[Any, Any, Any]] = [
            self.store(number).settle(Settle("p", charge, dead)) for number, charge in enumerate(ending)
        ]
        calls += [
            self.store(number + 1).move(Move("p", charge, dead, "a", self.open[charge].ask.candidates[0].tokens, STILL))
            for number, charge in enumerate(doomed)
        ]
        if leave:
            calls.insert(0, self.stores[2].release("p", dead))
        else:
            for alive in (REPLICAS, living, living):
                self.pass_time(alive)
            calls[:0] = [self.store(number).heartbeat("p", name, LEASE_MS) for number, name in enumerate(living)]
        told = self.at_once(calls)
        ended = sum(1 for answer in told[len(calls) - len(ending) - len(doomed) :][: len(ending)] if answer)
        beats = [answer for answer in told if isinstance(answer, Beat)]
        assert leave or sum(beat.reaped for beat in beats) == len(doomed) - ended
        for charge in doomed:
            del self.open[charge]

    @invariant()
    def the_loads_are_those_of_the_open_charges(self) -> None:
        """At each endpoint is in flight what its open charges hold; the backlog is whole, and nowhere negative."""
        loads = self.run(self.stores[1].loads("p"))
        running: Counter[str] = Counter()
        for charge in self.open.values():
            running[charge.endpoint] += charge.ask.sequences
        assert {name: load.running for name, load in loads.items() if load.running} == running
        assert all(load.output_tokens == load.running / 8 for load in loads.values())
        assert all(load.backlog_tokens >= 0 for load in loads.values())
        assert sum(load.backlog_tokens for load in loads.values()) == pytest.approx(self.backlog, abs=TIE)

    @invariant()
    def pins_have_one_winner(self) -> None:
        """Every connection reads of a session what its first reservation decided."""
        for number, (session, endpoint) in enumerate(self.pins.items()):
            assert self.run(self.store(number).pinned("p", session)) == endpoint

    def teardown(self) -> None:
        """When all have ended at once, nothing is in flight."""
        ends = [Settle("p", name, charge.ask.replica) for name, charge in self.open.items()]
        assert all(self.at_once([self.store(number).settle(end) for number, end in enumerate(ends)]))
        assert all(load.running == 0 for load in self.run(self.stores[0].loads("p")).values())


async def test_verbs_at_once_keep_the_sums(world: World) -> None:
    """In flight is what open charges hold; charges end once, sessions have one winner."""
    await histories(Crowd, world)
