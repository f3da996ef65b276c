"""Shared work under any history: at most one believer a name; in the end one each, even shares, and nothing moves."""

import asyncio
import itertools
from collections.abc import Collection, Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.clock import ManualClock
from extproc.state.memory import MemoryStore
from tests.contract.sharing import NAMES, Shared
from tests.valkey import Valkey


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    """A server for all examples."""
    with Valkey() as running:
        yield running


class Sharing(RuleBasedStateMachine):
    """Holders that call, fall silent, die, leave and join again, while time passes and what they see changes.

    A lease is 10,000 s and time passes in steps of 3,000 s, so that the time that the test itself takes means nothing.
    """

    lease_s = 10_000
    step_s = 3_000
    can_lose_answers = False

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.others = itertools.count()
        self.sees: dict[str, frozenset[str]] = {}
        # What each living holder believes to have, and until when.
        self.believes: dict[str, tuple[set[str], int]] = {}

    def call(self, holder: str, names: Collection[str]) -> Collection[str]:
        """One call of `Store.hold`."""
        raise NotImplementedError

    def call_unheard(self, holder: str, names: Collection[str]) -> None:
        """One whose answer is lost."""
        raise NotImplementedError

    def pass_time(self, seconds: int) -> None:
        """Let the store grow older."""
        raise NotImplementedError

    @initialize(names=st.frozensets(st.sampled_from(NAMES), min_size=1))
    def first(self, names: frozenset[str]) -> None:
        """The names that all see at first."""
        self.sees = dict.fromkeys("abcde", names)

    @rule(holder=st.sampled_from("abcde"))
    def asks(self, holder: str) -> None:
        """A holder calls; it begins nothing on names that it does not ask for."""
        names, until = self.believes.get(holder, (set(), 0))
        self.believes[holder] = names & self.sees[holder], until
        until = self.now + self.lease_s
        got = self.call(holder, self.sees[holder])
        assert set(got) <= self.sees[holder]
        self.believes[holder] = set(got), until

    @precondition(lambda self: self.can_lose_answers)
    @rule(holder=st.sampled_from("abcde"))
    def asks_in_vain(self, holder: str) -> None:
        """A holder calls and hears nothing."""
        names, until = self.believes.get(holder, (set(), 0))
        self.believes[holder] = names & self.sees[holder], until
        self.call_unheard(holder, self.sees[holder])

    @rule(holder=st.sampled_from("abcde"))
    def dies(self, holder: str) -> None:
        """A holder does nothing from here on, until it calls again as if new."""
        self.believes.pop(holder, None)

    @rule(holder=st.sampled_from("abcde"))
    def leaves(self, holder: str) -> None:
        """A holder stops in good order."""
        self.believes.pop(holder, None)
        assert not self.call(holder, ())

    @rule(steps=st.integers(1, 4))
    def waits(self, steps: int) -> None:
        """Time passes."""
        self.now += steps * self.step_s
        self.pass_time(steps * self.step_s)

    @rule(holder=st.sampled_from("abcde"), names=st.frozensets(st.sampled_from(NAMES), min_size=1))
    def sees_others(self, holder: str, names: frozenset[str]) -> None:
        """A change of names reaches one holder."""
        self.sees[holder] = names

    @rule(
        living=st.lists(st.sampled_from("abcde"), min_size=1, unique=True),
        names=st.frozensets(st.sampled_from(NAMES), min_size=1),
    )
    def settles(self, living: list[str], names: frozenset[str]) -> None:
        """Some go on, the others are dead: soon each name has one holder, shares are even, and nothing moves."""
        self.sees = dict.fromkeys("abcde", names)
        for dead in set(self.believes) - set(living):
            del self.believes[dead]
        for call in range(7):
            # Four steps outlast the leases of the dead.
            if call < 4:
                self.waits(1)
            for holder in living:
                self.asks(holder)
        held = {holder: self.believes[holder][0] for holder in living}
        assert sorted(itertools.chain(*held.values())) == sorted(names)
        assert max(map(len, held.values())) - min(map(len, held.values())) <= 1
        for holder in reversed(living):
            self.asks(holder)
        assert {holder: self.believes[holder][0] for holder in living} == held

    @rule(number=st.integers(1, 5))
    def gets_names(self, number: int) -> None:
        """Names that nobody ever saw, and that all see from here on, have a holder after two calls of each."""
        living = [holder for holder, (_, until) in self.believes.items() if until > self.now]
        fresh = {f"10.0.1.{next(self.others)}:8000" for _ in range(number)}
        for holder in living:
            self.sees[holder] = self.sees[holder] | fresh
        for _ in range(2):
            for holder in living:
                self.asks(holder)
        has = set(itertools.chain(*(self.believes[holder][0] for holder in living)))
        assert not living or fresh <= has

    @invariant()
    def no_name_has_two(self) -> None:
        """No two holders believe in the same name."""
        believed = [name for names, until in self.believes.values() if until > self.now for name in names]
        assert len(believed) == len(set(believed))


class SharingInMemory(Sharing):
    """On the memory store."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = ManualClock()
        self._store = MemoryStore(self._clock)

    def call(self, holder: str, names: Collection[str]) -> Collection[str]:
        """See `Sharing.call`."""
        return asyncio.run(self._store.hold("p", "scrape", holder, names, self.lease_s * 1000))

    def pass_time(self, seconds: int) -> None:
        """See `Sharing.pass_time`."""
        self._clock.advance(seconds)


def test_any_history_in_memory() -> None:
    """For any history: one believer a name at most; in the end one each, and even shares."""
    SharingInMemory.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
    SharingInMemory.TestCase("runTest").runTest()


def test_any_history_on_a_server(server: Valkey) -> None:
    """The same on real Valkey, where answers are lost, too."""

    class SharingOnServer(Sharing):
        """On the server of this test."""

        can_lose_answers = True

        def __init__(self) -> None:
            super().__init__()
            self._runner = asyncio.Runner()
            self._shared = Shared(server.port)
            self._runner.run(self._shared.store.ping())

        def call(self, holder: str, names: Collection[str]) -> Collection[str]:
            """See `Sharing.call`."""
            return self._runner.run(self._shared.store.hold("p", "scrape", holder, names, self.lease_s * 1000))

        def call_unheard(self, holder: str, names: Collection[str]) -> None:
            """See `Sharing.call_unheard`."""
            self._shared.unheard(holder, names, self.lease_s * 1000)

        def pass_time(self, seconds: int) -> None:
            """See `Sharing.pass_time`."""
            self._shared.age(seconds)

        def teardown(self) -> None:
            """Disconnect."""
            self._runner.run(self._shared.close())
            self._runner.close()

    SharingOnServer.TestCase.settings = settings(
        max_examples=100, stateful_step_count=30, suppress_health_check=list(HealthCheck)
    )
    SharingOnServer.TestCase("runTest").runTest()
