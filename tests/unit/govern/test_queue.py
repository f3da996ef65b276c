"""The fair queue: bounds, classes, shares between tenants, and what leaves."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from extproc.govern.queue import BANDS, QUANTUM, Bounds, Entry, FairQueue, band_of

WIDE = Bounds(1_000_000, 1e12, 0.1)


def entry(id_: int, tenant: str = "a", tokens: float = 100.0, band: int = 1, weight: float = 1.0) -> Entry:
    """One that waits."""
    return Entry(id_, band, tenant, tokens, weight)


def queue_of(*entries: Entry, bounds: Bounds = WIDE) -> FairQueue:
    """A queue with these entries, none of them refused."""
    queue = FairQueue(bounds)
    for each in entries:
        assert not queue.put(each)
    return queue


def drained(queue: FairQueue, count: int | None = None) -> list[Entry]:
    """The next entries, all when no count is given."""
    out: list[Entry] = []
    while count is None or len(out) < count:
        one = queue.pop()
        if one is None:
            break
        out.append(one)
    return out


def test_priorities_are_vllms() -> None:
    """Lower is served first; 0 is normal."""
    assert [BANDS[band_of(each)] for each in (-5, -1, 0, 1, 100)] == ["high", "high", "normal", "low", "low"]


def test_one_tenant_is_served_in_order() -> None:
    """Within a tenant nobody overtakes."""
    queue = queue_of(*(entry(at, tokens=10.0 * (at % 3 + 1)) for at in range(20)))
    assert [each.id for each in drained(queue)] == list(range(20))


def test_a_tenant_with_many_requests_does_not_delay_one_with_few() -> None:
    """A has 1,000 requests, B ten of the same size: B's last one goes within the first 20 of both and one quantum."""
    a = [entry(at, "a", QUANTUM) for at in range(1000)]
    b = [entry(1000 + at, "b", QUANTUM) for at in range(10)]
    order = [each.tenant for each in drained(queue_of(*a, *b))]
    assert max(at for at, tenant in enumerate(order) if tenant == "b") <= 21


def test_shares_follow_weights() -> None:
    """Weights 3 and 1 share tokens three to one."""
    entries = [entry(2 * at + one, "ab"[one], 500.0, weight=(3.0, 1.0)[one]) for at in range(2000) for one in (0, 1)]
    served = Counter(each.tenant for each in drained(queue_of(*entries), 1600))
    assert abs(served["a"] - 1200) <= 40


def test_higher_classes_go_first() -> None:
    """Without a share for lower classes, these wait until nobody else does."""
    bounds = Bounds(100, 1e9, 0.0)
    queue = queue_of(*(entry(at, band=2 - at % 3) for at in range(30)), bounds=bounds)
    assert [each.band for each in drained(queue)] == [0] * 10 + [1] * 10 + [2] * 10


def test_a_lower_class_gets_its_share_while_higher_ones_wait() -> None:
    """One in ten of equal size, for each lower class that waits: nobody starves."""
    entries = [entry(at, band=at % 3) for at in range(3000)]
    served = Counter(BANDS[each.band] for each in drained(queue_of(*entries), 1000))
    assert abs(served["low"] - 100) <= 2
    assert abs(served["normal"] - 100) <= 2


def test_a_lower_class_that_comes_one_by_one_gets_no_more_than_its_share() -> None:
    """Nothing is saved up while nobody waits, and what was had too much is paid back."""
    queue = queue_of(*(entry(at, band=0) for at in range(1000)))
    low = 0
    for at in range(1000):
        if not queue.requests()[2]:
            queue.put(entry(10_000 + at, band=2))
        one = queue.pop()
        assert one is not None
        low += one.band == 2
    assert abs(low - 100) <= 2


def test_a_full_queue_makes_room_for_a_higher_class() -> None:
    """The newest of the lowest class goes; an equal one is refused when its own tenant holds all."""
    queue = queue_of(entry(1, band=2), entry(2, band=2), entry(3, band=1), bounds=Bounds(3, 1e9, 0.1))
    assert [each.id for each in queue.put(entry(4, band=1))] == [2]
    assert [each.id for each in queue.put(entry(5, band=2))] == [5]
    assert sorted(each.id for each in drained(queue)) == [1, 3, 4]


def test_a_tenant_that_fills_the_queue_gives_way_to_another() -> None:
    """Its newest requests go until both hold the same, not further."""
    queue = queue_of(*(entry(at, "a") for at in range(10)), bounds=Bounds(10, 1e9, 0.1))
    out = [each.id for at in range(10) for each in queue.put(entry(100 + at, "b"))]
    assert out == [9, 8, 7, 6, 5, *(105 + at for at in range(5))]


def test_one_that_could_never_fit_displaces_nobody() -> None:
    """More tokens than the queue may hold: it is refused, and those it would have pushed out stay, in order."""
    queue = queue_of(*(entry(at, band=2) for at in range(5)), bounds=Bounds(10, 1000.0, 0.1))
    assert [each.id for each in queue.put(entry(9, tokens=2000.0, band=0))] == [9]
    assert [each.id for each in drained(queue)] == list(range(5))


def test_a_scale_lowers_a_tenants_weight() -> None:
    """Where most of a tenant's tokens wait elsewhere, its weight here is so much less."""
    queue = queue_of(*(entry(2 * at + one, "ab"[one], QUANTUM) for at in range(500) for one in (0, 1)))
    queue.scale = {"a": 0.25}
    served = Counter(each.tenant for each in drained(queue, 500))
    assert abs(served["a"] - 100) <= 5


sizes = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(1, 50_000)), max_size=60)


@given(sizes, st.integers(1, 20), st.floats(1, 200_000))
def test_bounds_hold_and_nothing_is_lost(puts: list[tuple[int, int, float]], most: int, most_tokens: float) -> None:
    """Whatever comes and goes, the queue stays in its bounds, and each entry leaves exactly once."""
    queue = FairQueue(Bounds(most, most_tokens, 0.1))
    out: Counter[int] = Counter()
    for at, (tenant, band, tokens) in enumerate(puts):
        out.update(each.id for each in queue.put(Entry(at, band, str(tenant), tokens)))
        assert len(queue) <= most
        assert queue.tokens <= most_tokens + 1e-6
        if at % 5 == 4 and (gone := queue.remove(at - 2)):
            out[gone.id] += 1
        if at % 7 == 6 and (popped := queue.pop()):
            out[popped.id] += 1
    out.update(each.id for each in drained(queue))
    assert out == Counter(range(len(puts)))
    assert queue.tokens == 0.0
    assert not queue.demand()


@given(
    st.lists(
        st.tuples(st.floats(0.01, 100), st.lists(st.floats(1, 20_000), min_size=30, max_size=60)),
        min_size=2,
        max_size=5,
    )
)
def test_tenants_that_wait_are_served_by_weight(tenants: list[tuple[float, list[float]]]) -> None:
    """While all wait, no two tenants' tokens per weight differ by more than one round and their largest requests.

    The bound is that of Shreedhar and Varghese: after any number of full rounds each tenant has had its quanta, less or
    more than one request; in the round that is under way one quantum more.
    """
    queue, at = FairQueue(WIDE), 0
    for name, (weight, costs) in enumerate(tenants):
        for cost in costs:
            queue.put(Entry(at, 1, str(name), cost, weight))
            at += 1
    served = [0.0] * len(tenants)
    left = [len(costs) for _, costs in tenants]
    while all(left):
        one = queue.pop()
        assert one is not None
        served[int(one.tenant)] += one.tokens
        left[int(one.tenant)] -= 1
        if all(left):
            norm = [done / weight for done, (weight, _) in zip(served, tenants, strict=True)]
            slack = [QUANTUM + max(costs) / weight for weight, costs in tenants]
            for here, mine in enumerate(norm):
                for there, theirs in enumerate(norm):
                    assert mine - theirs <= slack[here] + slack[there] + 1e-3 * max(1.0, mine)
