"""Properties of a decision: it follows from the costs alone, and is the same one in every store."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from extproc.clock import ManualClock
from extproc.state.memory import MemoryStore
from extproc.state.pick import cost_ms, floored
from extproc.state.store import Store
from extproc.state.values import Candidate, Load, Reserve
from tests.contract.conftest import RedisWorld, World

ENDPOINTS = ("a", "b", "c", "d", "e")

_serial = itertools.count()

amounts = st.floats(0.0, 1e4)
# A held load takes no prompt tokens, so that no backlog drains and real time has no part in what is compared.
loads = st.dictionaries(
    st.sampled_from(ENDPOINTS), st.tuples(st.integers(1, 9), st.integers(0, 5000).map(lambda steps: steps / 8))
)
candidates = st.lists(
    st.builds(
        Candidate,
        endpoint=st.sampled_from(ENDPOINTS),
        static_ms=st.floats(-1e3, 1e4),
        tokens=st.just(0.0),
        rate=st.floats(1.0, 1e5),
        floor_tokens=amounts,
        floor_running=st.integers(0, 12),
        stalled_tokens=st.floats(0.0, 500.0),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda each: each.endpoint,
)
prices = st.fixed_dictionaries(
    {
        "running_ms": st.floats(0.0, 10.0),
        "output_ms": st.floats(0.0, 1.0),
        "backlog_weight": st.floats(0.0, 2.0),
        "tie_ms": st.floats(0.0, 50.0),
        "break_out_ms": amounts,
        "strict": st.booleans(),
        "ignore_pin": st.booleans(),
    }
)
pins = st.sampled_from(["", *ENDPOINTS])
# One server serves all examples; each has a pool of its own.
shared_world = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


async def _pool(store: Store, held: dict[str, tuple[int, float]], pin: str) -> str:
    """A fresh pool with this load in flight, and session `s` pinned to `pin`."""
    pool = f"pool{next(_serial)}"
    for endpoint, (sequences, output_tokens) in held.items():
        alone = (Candidate(endpoint, 0.0, 0.0, 1.0),)
        await store.reserve(Reserve(pool, f"held-{endpoint}", "r", alone, **_flight(sequences, output_tokens)))
    if pin:
        await store.reserve(Reserve(pool, "pin", "r", (Candidate(pin, 0.0, 0.0, 1.0),), next_pin_key="s"))
    return pool


def _costs(
    options: list[Candidate], held: dict[str, tuple[int, float]], pin: str, price: dict[str, Any]
) -> Iterator[float]:
    """Cost of each candidate in such a pool."""
    for each in options:
        running, outputs = held.get(each.endpoint, (0, 0.0))
        load = floored(each, Load(0.0, running + (each.endpoint == pin), outputs))
        yield cost_ms(Reserve("", "", "", options, **price), each, load)


def _flight(sequences: int, output_tokens: float) -> dict[str, Any]:
    return {"sequences": sequences, "output_tokens": output_tokens}


@shared_world
@given(options=candidates, order=st.randoms(use_true_random=False), held=loads, pin=pins, price=prices)
async def test_the_order_of_candidates_decides_ties_only(
    world: World,
    options: list[Candidate],
    order: Any,
    held: dict[str, tuple[int, float]],
    pin: str,
    price: dict[str, Any],
) -> None:
    """Costs further apart than `tie_ms` are decided alike in any order, pins and break-outs included."""
    shuffled = list(options)
    order.shuffle(shuffled)
    costs = sorted(_costs(options, held, pin, price))
    assume(all(high - low > price["tie_ms"] + 1e-6 for low, high in itertools.pairwise(costs)))
    store = world.store()
    answers = [
        await store.reserve(Reserve(await _pool(store, held, pin), "c", "r", each, pin_key="s", **price))
        for each in (options, shuffled)
    ]
    assert answers[0] == answers[1]
    if not answers[0].pinned and answers[0].endpoint:
        assert answers[0].cost_ms == costs[0]


@shared_world
@given(
    turns=st.lists(st.tuples(candidates, prices, st.integers(1, 8), amounts), min_size=1, max_size=6),
    held=loads,
    pin=pins,
)
async def test_both_stores_decide_alike_to_the_last_bit(
    redis_world: RedisWorld,
    turns: Sequence[tuple[list[Candidate], dict[str, Any], int, float]],
    held: dict[str, tuple[int, float]],
    pin: str,
) -> None:
    """The same calls get equal answers from memory and from the scripts: costs, loads, pins and moves."""
    memory, shared = MemoryStore(ManualClock()), redis_world.store()
    pools = [(store, await _pool(store, held, pin)) for store in (memory, shared)]
    for number, (options, price, sequences, outputs) in enumerate(turns):
        # A floor drains once it was picked, in one store by the clock of the machine: only the last turn has any.
        last = number == len(turns) - 1
        floorless = [msgspec.structs.replace(each, floor_tokens=0.0, stalled_tokens=0.0) for each in options]
        charged = options if last else floorless
        answers = [
            await store.reserve(
                Reserve(pool, f"c{number}", "r", charged, pin_key="s", **_flight(sequences, outputs), **price)
            )
            for store, pool in pools
        ]
        assert answers[0] == answers[1]
