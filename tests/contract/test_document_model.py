"""Documents under any history: every answer is one that some order of the calls explains, whatever was lost between."""

import asyncio
import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.clock import ManualClock
from extproc.state.document_store import Document
from extproc.state.keys import shard
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.store import Store
from tests.valkey import Valkey

GROUP = "rollouts"
NAMES = ("m", "n")
WRITERS = ("a", "b", "c")

Put = tuple[str, str, Document]
"""Writer, name, document."""


def rule_of_put(kept: Mapping[str, Document], name: str, document: Document) -> tuple[bool, Mapping[str, Document]]:
    """What the contract says of one put: its answer, and the documents afterwards."""
    if name not in kept or kept[name].revision + 1 == document.revision:
        return True, {**kept, name: document}
    return kept[name] == document, kept


def explained(before: Mapping[str, Document], puts: Iterable[tuple[Put, bool]], after: Mapping[str, Document]) -> bool:
    """Whether some order of these puts gives these answers, and these documents in the end."""
    for order in itertools.permutations(puts):
        kept = before
        for (_, name, document), answer in order:
            told, kept = rule_of_put(kept, name, document)
            if told != answer:
                break
        else:
            if kept == after:
                return True
    return False


class Writers(RuleBasedStateMachine):
    """Writers that read, decide by what they know, write at once, and repeat themselves, while documents get lost."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Mapping[str, Document] = {}
        self.knows: dict[str, dict[str, Document]] = {writer: {} for writer in WRITERS}
        self.serial = itertools.count()

    def run_puts(self, puts: Sequence[Put]) -> list[bool]:
        """Put all of them at once, each writer by a store of its own."""
        raise NotImplementedError

    def read(self, writer: str) -> Mapping[str, Document]:
        """All documents, as a writer reads them."""
        raise NotImplementedError

    def drop(self, name: str) -> None:
        """Forget one document."""
        raise NotImplementedError

    def flush(self) -> None:
        """Lose everything."""
        raise NotImplementedError

    def next_of(self, writer: str, name: str) -> Put:
        """The next revision of what a writer knows, with bytes that nobody else writes."""
        known = self.knows[writer].get(name, Document(0, b""))
        return writer, name, Document(known.revision + 1, b"%d" % next(self.serial))

    def put(self, puts: Sequence[Put]) -> None:
        """Put at once, and compare with the contract. Who was first knows it; the others read again."""
        answers = self.run_puts(puts)
        after = dict(self.read(puts[0][0]))
        assert explained(self.kept, zip(puts, answers, strict=True), after)
        self.kept = after
        for (writer, name, document), kept in zip(puts, answers, strict=True):
            if kept:
                self.knows[writer][name] = document

    @rule(writer=st.sampled_from(WRITERS))
    def reads(self, writer: str) -> None:
        """A writer reads all; what it knew and does not find stays known."""
        self.knows[writer] |= self.read(writer)

    @rule(
        plans=st.lists(st.tuples(st.sampled_from(WRITERS), st.sampled_from(NAMES)), min_size=1, max_size=4, unique=True)
    )
    def write(self, plans: list[tuple[str, str]]) -> None:
        """Some writers put the next revision of what they know, at once."""
        self.put([self.next_of(writer, name) for writer, name in plans])

    @rule(writer=st.sampled_from(WRITERS), name=st.sampled_from(NAMES))
    def repeats(self, writer: str, name: str) -> None:
        """A writer that heard no answer puts what it put last."""
        if (document := self.knows[writer].get(name)) is not None:
            self.put([(writer, name, document)])

    @rule(writer=st.sampled_from(WRITERS), name=st.sampled_from(NAMES), revision=st.integers(1, 6))
    def errs(self, writer: str, name: str, revision: int) -> None:
        """A writer puts some revision, known or not."""
        self.put([(writer, name, Document(revision, b"%d" % next(self.serial)))])

    @rule(name=st.sampled_from(NAMES))
    def drops(self, name: str) -> None:
        """Somebody drops a document."""
        self.drop(name)
        self.kept = {each: document for each, document in self.kept.items() if each != name}

    @rule()
    def loses(self) -> None:
        """The store loses everything."""
        self.flush()
        self.kept = {}

    @invariant()
    def all_read_the_same(self) -> None:
        """Whoever reads finds what the history left."""
        assert {writer: dict(self.read(writer)) for writer in WRITERS} == dict.fromkeys(WRITERS, self.kept)


class OnStores(Writers):
    """On stores, one for each writer."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stores: Mapping[str, Store] = {}

    def run_puts(self, puts: Sequence[Put]) -> list[bool]:
        """See `Writers.run_puts`."""

        async def put() -> list[bool]:
            calls = (self.stores[writer].put_document(GROUP, name, document) for writer, name, document in puts)
            return await asyncio.gather(*calls)

        return self.runner.run(put())

    def read(self, writer: str) -> Mapping[str, Document]:
        """See `Writers.read`."""
        return self.runner.run(self.stores[writer].documents(GROUP)).found

    def drop(self, name: str) -> None:
        """See `Writers.drop`."""
        self.runner.run(self.stores["a"].drop_document(GROUP, name))

    def teardown(self) -> None:
        """Disconnect."""
        for store in self.stores.values():
            self.runner.run(store.close())
        self.runner.close()


class InMemory(OnStores):
    """On the memory store."""

    def __init__(self) -> None:
        super().__init__()
        self.stores = dict.fromkeys(WRITERS, MemoryStore(ManualClock()))

    def flush(self) -> None:
        """See `Writers.flush`."""
        self.stores = dict.fromkeys(WRITERS, MemoryStore(ManualClock()))


def test_any_history_in_memory() -> None:
    """For any history: some order of the calls explains all answers, and all replicas read the same."""
    InMemory.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
    InMemory.TestCase("runTest").runTest()


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    """A server for all examples."""
    with Valkey() as running:
        yield running


def test_any_history_on_a_server(server: Valkey) -> None:
    """The same on real Valkey, by connections of their own."""

    class OnServer(OnStores):
        """On the server of this test."""

        def __init__(self) -> None:
            super().__init__()
            self._prefix = secrets.token_hex(8)
            url = f"redis://127.0.0.1:{server.port}"
            self.stores = {writer: RedisStore(url, 10_000.0, self._prefix) for writer in WRITERS}
            for store in self.stores.values():
                self.runner.run(store.ping())

        def flush(self) -> None:
            """See `Writers.flush`."""
            with server.client() as client:
                client.delete(f"{self._prefix}:{{{shard(GROUP)}}}:documents")

    OnServer.TestCase.settings = settings(
        max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck), deadline=None
    )
    OnServer.TestCase("runTest").runTest()
