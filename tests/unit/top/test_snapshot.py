"""The frozen fleet of a decision, joined from configuration, membership, states and what was learnt."""

from typing import Any

import msgspec
import pytest

from extproc import snapshot
from extproc.choose import filters
from extproc.choose.fleet import Endpoint
from extproc.sightings import Sighting
from extproc.state.endpoint import EndpointState
from extproc.state.facts import DEFAULT_BLOCK_TOKENS
from extproc.state.feed import Answered
from extproc.state.knowledge import PoolKnowledge, Priors
from tests.unit.top.parts import config

NOW = 1000.0
STATE = EndpointState(
    destination="10.0.0.1:80",
    scraped_at=NOW,
    running=3,
    waiting=2,
    kv_usage=0.5,
    block_tokens=32,
    draining=True,
    asleep=True,
    reachable=False,
)


def knowledge() -> dict[str, PoolKnowledge]:
    """Nothing learnt yet."""
    return {"main": PoolKnowledge(Priors(prefill_tokens_per_s=1000.0))}


def test_an_endpoint_nobody_read_yet_is_taken_as_healthy() -> None:
    """Without a keeper the configured endpoints serve, at the believed speed times the factor."""
    settings = config(routing={"rate_factor": 0.5})
    fleet = snapshot.build(settings, {"main": {"a": "10.0.0.1:80"}}, {}, knowledge(), NOW)
    (endpoint,) = fleet.pools["main"].endpoints
    assert (endpoint.id, endpoint.destination, endpoint.rate) == ("a", "10.0.0.1:80", 500.0)
    assert endpoint.reachable
    assert not endpoint.asleep
    assert endpoint.block_tokens == DEFAULT_BLOCK_TOKENS


@pytest.mark.parametrize(("age_s", "running"), [(0.0, 3), (1.9, 3), (2.1, 0)])
def test_old_loads_are_not_believed_but_old_conditions_are(age_s: float, running: int) -> None:
    """Load numbers age within seconds; draining, asleep and unreachable hold until somebody says otherwise."""
    seen = {"main": {"a": Sighting(STATE, NOW)}}
    fleet = snapshot.build(config(), {"main": {"a": "10.0.0.1:80"}}, seen, knowledge(), NOW + age_s)
    (endpoint,) = fleet.pools["main"].endpoints
    assert endpoint.running == running
    assert (endpoint.draining, endpoint.asleep, endpoint.reachable) == (True, True, False)
    assert endpoint.block_tokens == 32


def test_slow_scraping_makes_states_live_longer() -> None:
    """A state is old after three missed scrapes, whatever the interval."""
    settings = config(telemetry={"scrape_ms": 10_000})
    seen = {"main": {"a": Sighting(STATE, NOW)}}
    fleet = snapshot.build(settings, {"main": {"a": "10.0.0.1:80"}}, seen, knowledge(), NOW + 29)
    assert fleet.pools["main"].endpoints[0].running == 3


def test_states_of_endpoints_that_left_are_not_shown() -> None:
    """Membership alone says who is there; a pool without members is still a pool."""
    seen = {"main": {"gone": Sighting(STATE, NOW)}}
    fleet = snapshot.build(config(), {}, seen, knowledge(), NOW)
    assert fleet.pools["main"].endpoints == ()


def test_the_first_model_of_the_file_names_the_default_pool() -> None:
    """Requests without a model go where the first model goes."""
    two = {"main": {"endpoints": ["10.0.0.1:80"]}, "b": {"endpoints": ["10.0.0.2:80"]}}
    settings = config(models={"x": {"pool": "b"}, "m": {"pool": "main"}}, pools=two)
    fleet = snapshot.build(settings, {}, {}, knowledge() | {"b": PoolKnowledge(Priors())}, NOW)
    assert fleet.default_pool == "b"
    assert fleet.models == {"x": "b", "m": "main"}


def fresh(**changes: object) -> EndpointState:
    """A state of an endpoint that serves, read just now."""
    return msgspec.structs.replace(STATE, **{"draining": False, "asleep": False, "reachable": True, **changes})


def built(
    state: EndpointState | None,
    now: float = NOW,
    joined: float | None = None,
    other: float | None = None,
    foreign: int = 0,
    **sections: Any,
) -> Endpoint:
    """The endpoint `a` of a snapshot, whose state changed at `NOW`.

    Args:
        state: its state.
        now: when the snapshot is made.
        joined: when it joined; long ago for None.
        other: when the state of another endpoint changed last; None for no other.
        foreign: sequences in it that nobody charged.
        sections: of the configuration.
    """
    seen = {} if state is None else {"a": Sighting(state, NOW, foreign)}
    if other is not None:
        seen["b"] = Sighting(fresh(), other)
    since = {} if joined is None else {"main": {"a": joined}}
    members = {"main": {name: f"10.0.0.{number}:80" for number, name in enumerate("ab")}}
    fleet = snapshot.build(config(**sections), members, {"main": seen}, knowledge(), now, since)
    return fleet.pools["main"].endpoints[0]


@pytest.mark.parametrize(
    ("age_s", "share"), [(0.0, 0.1), (0.5, 0.1), (2.0, 0.2), (5.0, 0.5), (9.9, 0.99), (10.0, 1.0), (1e9, 1.0)]
)
def test_an_endpoint_that_joined_is_slowed_in(age_s: float, share: float) -> None:
    """A tenth of its speed at first, all of it after `ramp_s`, in a straight line between."""
    assert snapshot.ramp(age_s, 10.0) == pytest.approx(share)
    for state in (None, fresh()):
        usual, young = built(state), built(state, joined=NOW - age_s)
        assert (young.rate, young.slowed) == pytest.approx((usual.rate * share, share))


@pytest.mark.parametrize("age_s", [0.0, 5.0])
def test_no_ramp_is_no_ramp(age_s: float) -> None:
    """`ramp_s: 0` switches it off."""
    assert snapshot.ramp(age_s, 0.0) == 1.0


def test_a_stale_endpoint_is_slow_and_its_load_unknown_but_it_serves() -> None:
    """One that is not read while others are: gauges go to zero, no queue is believed, and half of the speed is."""
    state = fresh(waiting=4)
    seen, old = built(state, other=NOW), built(state, now=NOW + 3.0, other=NOW + 3.0)
    assert (old.running, old.waiting, old.kv_usage, old.floor_tokens) == (0, 0, 0.0, 0.0)
    assert (old.rate, old.slowed) == (seen.rate / 2, 0.5)
    assert filters.usable([old]) == [old]


def test_states_that_all_stand_still_are_a_sign_against_none() -> None:
    """No keeper is there, or no store: loads are unknown, and no endpoint is slower or more silent than another."""
    old = built(fresh(waiting=4, stalled_s=4.0), now=NOW + 100.0, other=NOW + 1.0)
    assert (old.running, old.waiting, old.floor_tokens) == (0, 0, 0.0)
    assert (old.slowed, old.silent_ms) == (1.0, 0.0)


def test_staleness_and_ramp_slow_together() -> None:
    """One that joined and cannot be read is believed to be slower than either."""
    old = built(fresh(), now=NOW + 3.0, joined=NOW - 1.0, other=NOW + 3.0)
    assert old.slowed == pytest.approx(0.5 * 0.4)


def test_a_standstill_goes_on_for_as_long_as_it_has_lasted() -> None:
    """By the keeper's word, or because nobody could read the engine for longer than a keeper's takeover takes."""
    assert built(fresh(stalled_s=4.0), other=NOW).silent_ms == 4000.0
    waited_for = built(fresh(stalled_s=4.0), now=NOW + 3.0, other=NOW + 3.0)
    assert (waited_for.silent_ms, waited_for.floor_running) == (7000.0, 5)
    assert built(fresh(), now=NOW + 9.0, other=NOW + 9.0).silent_ms == 0.0
    assert built(fresh(), now=NOW + 30.0, other=NOW + 30.0).silent_ms == 30_000.0


def test_requests_of_an_engine_that_stands_still_are_not_prefilled() -> None:
    """Each of its sequences stands for the mean prompt of its requests; of the pool's while it answered none."""
    known = knowledge()
    members = {"main": {"a": "10.0.0.1:80", "b": "10.0.0.2:80"}}
    seen = {"main": {name: Sighting(fresh(stalled_s=4.0), NOW) for name in "ab"}}

    def stalled() -> list[float]:
        fleet = snapshot.build(config(), members, seen, known, NOW)
        return [each.stalled_tokens for each in fleet.pools["main"].endpoints]

    assert stalled() == [0.0, 0.0]
    known["main"].apply(Answered("c", "a", -1.0, -1.0, 4000.0, 1000.0, cached_tokens=600.0))
    assert stalled() == [pytest.approx(400.0)] * 2
    assert built(fresh(stalled_s=4.0)).floor_running == 5
    assert built(fresh()).stalled_tokens == 0.0


def test_requests_of_others_count_while_they_are_seen() -> None:
    """All sequences in the engine are a floor under those in flight."""
    assert built(fresh()).floor_running == 0
    assert built(fresh(), foreign=4).floor_running == 5
    assert built(fresh(), now=NOW + 3.0, foreign=4).floor_running == 0


def test_an_engines_own_queue_is_a_floor_under_its_backlog() -> None:
    """Waiting requests stand for their mean uncached tokens, while read lately; before the first answer for nothing."""
    known = knowledge()
    members, seen = {"main": {"a": "10.0.0.1:80"}}, {"main": {"a": Sighting(fresh(waiting=3), NOW)}}

    def floor(now: float = NOW) -> float:
        return snapshot.build(config(), members, seen, known, now).pools["main"].endpoints[0].floor_tokens

    assert floor() == 0.0
    known["main"].apply(Answered("c", "a", -1.0, -1.0, 4000.0, 1000.0, cached_tokens=600.0))
    assert floor() == pytest.approx(3 * 400.0)
    assert floor(NOW + 3.0) == 0.0


@pytest.mark.parametrize("usage", [float("nan"), 1e308, -1.0])
def test_a_damaged_gauge_counts_as_unknown(usage: float) -> None:
    """A key in the store that somebody damaged must not fail every reservation of the pool."""
    state = EndpointState(destination="10.0.0.1:80", scraped_at=100.0, kv_usage=usage)
    settings = config()
    pool = next(iter(settings.pools))
    seen = {pool: {"a": Sighting(state, 100.0)}}
    fleet = snapshot.build(settings, {pool: {"a": "10.0.0.1:80"}}, seen, {pool: PoolKnowledge(Priors())}, 100.0)
    assert fleet.pools[pool].endpoints[0].kv_usage == 0.0


def test_numbers_that_a_keeper_could_not_renew_are_not_believed() -> None:
    """Three scrapes in a row without numbers: load unknown, half the speed, and it serves; fewer change nothing."""
    seen = built(fresh(waiting=4), other=NOW)
    for unread, changes in ((2, False), (3, True), (300, True)):
        old = built(fresh(waiting=4, unread=unread), other=NOW)
        assert (old.running, old.waiting, old.kv_usage) == ((0, 0, 0.0) if changes else (3, 4, 0.5))
        assert (old.rate, old.slowed, old.silent_ms) == (
            seen.rate / 2 if changes else seen.rate,
            0.5 if changes else 1,
            0,
        )
        assert filters.usable([old]) == [old]


def test_engines_that_nobody_can_read_are_not_slower_than_one_another() -> None:
    """No page of the pool can be read: that says nothing of any engine."""
    old = built(fresh(unread=50))
    assert (old.slowed, old.running) == (1.0, 0)


def test_frozen_numbers_are_no_floor_and_no_sign_against_an_engine() -> None:
    """What moves only when a request completes is old: the fleet's own counts govern, at full speed."""
    frozen = built(fresh(waiting=4, frozen=True), other=NOW, foreign=9)
    assert (frozen.running, frozen.waiting, frozen.kv_usage) == (0, 0, 0.0)
    assert (frozen.floor_tokens, frozen.floor_running, frozen.slowed, frozen.silent_ms) == (0.0, 0, 1.0, 0.0)
    assert built(fresh(waiting=4), other=NOW, foreign=9).floor_running == 7


def test_the_kind_of_engine_and_its_adapters_are_shown() -> None:
    """Requests are fitted to the one, and go where the other is loaded."""
    shown = built(fresh(kind="sglang", adapters=("sql",)))
    assert (shown.kind, shown.adapters) == ("sglang", ("sql",))
    assert (built(None).kind, built(None).adapters) == ("", ())
