"""Limits and keys while the shared store fails: each process allows its share, and nobody waits twice."""

import msgspec
import pytest

from extproc.clock import ManualClock
from extproc.errors import StoreError
from extproc.govern.quotas import Claim, Correction, Draw, Take, Taken
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import Trouble, UnreachableError
from tests.unit.state.unsteady import LATE, Unsteady, resilient

REQUESTS = Draw("quota/1", "r", "requests", "minute", 10.0, 10 / 60, 1.0)
TOKENS = Draw("quota/1", "t", "tokens", "minute", 1000.0, 1000 / 60, 100.0)
CLAIM = Claim("quota/2", "k", "mine", 60_000, "p")


class Failing(Unsteady):
    """Its quota verbs fail, too."""

    async def take(self, ask: Take) -> Taken:
        """See `Store.take`."""
        self.calls.append("take")
        return await self._run(ask.draws[0].shard, super().take(ask))

    async def correct(self, correction: Correction) -> None:
        """See `Store.correct`."""
        self.calls.append("correct")
        await self._run(correction.draws[0].shard, super().correct(correction))

    async def claim(self, claim: Claim) -> bool:
        """See `Store.claim`."""
        self.calls.append("claim")
        return await self._run(claim.shard, super().claim(claim))

    async def unclaim(self, claim: Claim) -> None:
        """See `Store.unclaim`."""
        self.calls.append("unclaim")
        await self._run(claim.shard, super().unclaim(claim))


@pytest.fixture
def shared() -> Failing:
    """The shared store."""
    return Failing()


@pytest.fixture
def store(shared: Failing) -> ResilientStore:
    """What a worker uses."""
    return resilient(shared, MemoryStore(ManualClock()))


async def allowed(store: ResilientStore, *draws: Draw, share: float = 0.5, pool: str = "p") -> Taken:
    """Take these."""
    return await store.take(Take(draws, pool, share))


async def test_without_the_store_a_process_allows_its_share(store: ResilientStore, shared: Failing) -> None:
    """Half of ten requests for one of two, less those it allowed with the store already."""
    for _ in range(2):
        assert not (await allowed(store, REQUESTS)).local
    shared.fault = LATE
    told = [await allowed(store, REQUESTS) for _ in range(5)]
    assert [each.allowed for each in told] == [True, True, True, False, False]
    assert all(each.local for each in told)
    assert shared.calls.count("take") == 3


async def test_one_missed_deadline_spares_the_request_another(store: ResilientStore, shared: Failing) -> None:
    """The circuit of its pool opens too: its reservation does not wait in vain again; and the other way round."""
    shared.fault = LATE
    await allowed(store, REQUESTS)
    assert store.degraded_in("p")
    assert not store.degraded_in("q")
    await store.states("q")
    before = len(shared.calls)
    assert (await allowed(store, msgspec.structs.replace(REQUESTS, shard="quota/5"), pool="q")).local
    assert shared.calls[before:] == []


async def test_a_request_larger_than_the_share_passes_when_nothing_is_in_use(
    store: ResilientStore, shared: Failing
) -> None:
    """It would be refused for as long as the store is gone: it overdraws the share, and others wait for that."""
    shared.fault = LATE
    large = msgspec.structs.replace(TOKENS, amount=900.0)
    assert (await allowed(store, large)).levels == [900.0]
    assert not (await allowed(store, TOKENS)).allowed
    assert not (await allowed(store, large)).allowed


async def test_a_refusal_of_the_store_opens_no_circuit(store: ResilientStore) -> None:
    """What another replica used is an answer as well."""
    for _ in range(12):
        last = await allowed(store, REQUESTS)
    assert (last.allowed, last.local) == (False, False)
    assert not store.degraded


async def test_corrections_reach_both_stores_or_are_told_as_lost(store: ResilientStore, shared: Failing) -> None:
    """The share of this process is corrected at once; a shared correction that fails is not tried again."""
    taken = await allowed(store, TOKENS)
    more = msgspec.structs.replace(TOKENS, amount=700.0)
    await store.correct(Correction(taken.at, [more], [msgspec.structs.replace(more, most=500.0)]))
    assert (await allowed(store, msgspec.structs.replace(TOKENS, amount=0.0))).levels == [800.0]
    shared.fault = LATE
    with pytest.raises(StoreError):
        await store.correct(Correction(taken.at, [more]))
    with pytest.raises(UnreachableError) as caught:
        await store.correct(Correction(taken.at, [more]))
    assert caught.value.trouble is Trouble.SLOW
    assert shared.calls.count("correct") == 2
    assert not (await allowed(store, TOKENS)).allowed


async def test_a_key_is_known_to_its_own_process_without_the_store(store: ResilientStore, shared: Failing) -> None:
    """A second claim fails here; a claim that the store refused is not kept."""
    theirs = msgspec.structs.replace(CLAIM, token="theirs")
    assert await shared.claim(theirs)
    assert not await store.claim(CLAIM)
    await shared.unclaim(theirs)
    assert await store.claim(CLAIM)
    shared.fault = LATE
    assert not await store.claim(theirs)
    with pytest.raises(StoreError):
        await store.unclaim(CLAIM)
    assert await store.claim(theirs)
