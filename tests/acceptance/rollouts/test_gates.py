"""Versions that are worse, each in its way: the right gate rolls each back, and nobody gets it from then on."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.rollouts.people import Habits, People
from tests.acceptance.rollouts.stand import NEW, OLD, Fleet, Stand, stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHARE = 25
PATIENCE_S = 150.0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a version.

    Attributes:
        name: for people.
        gates: beginnings of the names of the gates, one of which must fail.
        traits: of its engines.
        leaves: chance that a client leaves in the middle, by version.
        fails: whether clients get answers that are failures.
    """

    name: str
    gates: tuple[str, ...]
    traits: Mapping[str, float] = {}
    leaves: Mapping[str, float] = {}
    fails: bool = False


FAULTS = (
    Fault(name="first tokens 30 % later", gates=("ttft",), traits={"prefill_factor": 1.3}),
    Fault(name="2 % of requests fail", gates=("errors",), traits={"fail_share": 0.02}, fails=True),
    Fault(name="5 % of streams end early", gates=("broken",), traits={"end_share": 0.05}, fails=True),
    Fault(name="5 % of answers say nothing", gates=("broken",), traits={"empty_share": 0.05}),
    Fault(name="answers 1.6 times as long", gates=("length_longer",), traits={"length_factor": 1.6}),
    Fault(name="20 % more clients leave", gates=("abandons",), leaves={OLD: 0.02, NEW: 0.22}),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """Two replicas, and two versions that are alike."""
    pools = {"main": {"ask_usage": True}, "next": {"ask_usage": True}}
    async with stand(journal, folder, Fleet(sections={"pools": pools})) as started:
        yield started


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
async def test_a_worse_version_is_rolled_back_by_its_gate(here: Stand, fault: Fault, measured: list[str]) -> None:
    """It gets 25 % of the sessions until its gate fails; from then on nobody."""
    seed = 10 + FAULTS.index(fault)
    await here.traits(NEW, **fault.traits)
    async with People([here.url], Habits(rate=40.0, turns=(1, 2), leaves=fault.leaves), seed) as people:
        await people.more(40)
        began = asyncio.get_running_loop().time()
        await here.start("--steps", f"{SHARE},100", "--hold", "3600", "--settle", "1")
        ended = await here.phase("rolled_back", patience_s=PATIENCE_S)
        took = asyncio.get_running_loop().time() - began
        touched = people.touched(NEW, began)
        await people.more(40)
        after = asyncio.get_running_loop().time()
        await people.more(60)
    measured.append(
        f"{fault.name}: {ended['gate']} after {took:.1f} s, "
        f"{people.by_version(began).get(NEW, 0)} requests; {touched:.0%} of the users were touched"
    )
    await here.traits(NEW)
    assert ended["phase"] == "rolled_back"
    assert ended["gate"].startswith(fault.gates), ended
    assert people.by_version(after).get(NEW, 0) == 0
    if not fault.fails:
        people.none_failed()
    assert all(one.version == NEW for one in people.failed), people.failed
