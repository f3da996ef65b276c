"""The versions of models as they are now, by file and by rollout; and that raising a share moves units only one way."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import Config
from extproc.config_rollouts import Gates
from extproc.rollout.split import Split, chosen, of_weights
from extproc.rollout.state import Phase, Plan, Rollout, governs
from extproc.splits import fleet_of, splits_of, with_splits
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.versions import Around, unit_of
from tests.unit.top.parts import config
from tests.unit.top.test_versions import chat

PLAN = Plan(
    steps=(0.01, 0.05, 0.25, 1.0),
    hold_s=60.0,
    settle_s=1.0,
    min_samples=10,
    on_failure="rollback",
    false_alarms=0.01,
    require_verdict=False,
    retire_after_s=60.0,
    gates=Gates(),
)


def settings(**weights: float) -> Config:
    """Model `m` with these versions, each in the pool of its name, and model `one` in the pool of the first."""
    made = {name: {"pool": name, "weight": weight} for name, weight in weights.items()}
    return config(
        models={"m": {"versions": made, "aliases": ["gpt"]}, "one": {"pool": next(iter(weights)), "aliases": ["uno"]}},
        pools={name: {"endpoints": ["10.0.0.1:80"]} for name in weights},
    )


def rollout(
    share: float, *earlier: float, base: Mapping[str, float] | None = None, phase: Phase = "running", **more: Any
) -> dict[str, Rollout]:
    """A rollout of `new` over `old`."""
    weights = base or {"old": 1.0, "new": 0.0}
    made = Rollout(id="r1", model="m", canary="new", base=weights, plan=PLAN, phase=phase, share=share, earlier=earlier)
    return {"m": msgspec.structs.replace(made, **more)}


def units(count: int) -> list[bytes]:
    """Digests as they come."""
    draw = random.Random(7)
    return [draw.randbytes(16) for _ in range(count)]


def test_without_a_rollout_the_file_says_who_gets_what() -> None:
    """Models with one version have no split; aliases lead to the model's own name."""
    here = settings(old=0.9, new=0.1)
    (split,) = splits_of(here, {}).values()
    expected = Split(model="m", pools={"old": "old", "new": "new"}, weights={"old": 0.9, "new": 0.1}, main="old")
    assert split == expected
    fleet = fleet_of({}, here, splits_of(here, {}))
    assert (fleet.models, fleet.default_pool) == ({"m": "old", "one": "old"}, "old")
    assert fleet.aliases == {"gpt": "m", "uno": "one"}


def test_a_rollout_says_who_gets_what_and_who_stays() -> None:
    """Its share, the shares before it, and the epoch that is measured; others keep their proportions."""
    here, base = settings(old=3.0, new=0.0, third=1.0), {"old": 3.0, "new": 0.0, "third": 1.0}
    split = splits_of(here, rollout(0.2, 0.0, base=base, step=1))["m"]
    assert split.weights == pytest.approx({"old": 0.6, "new": 0.2, "third": 0.2})
    assert [dict(each) for each in split.earlier] == [pytest.approx({"old": 0.75, "new": 0.0, "third": 0.25})]
    assert (split.epoch, split.main) == ("r1-1", "old")


def test_a_rollout_at_its_end_moves_the_main_version_too() -> None:
    """At 100 % requests that belong to nobody leave the old pool as all others do."""
    here = settings(old=1.0, new=0.0)
    fleet = with_splits(fleet_of({}, here, splits_of(here, {})), here, rollout(1.0, 0.25, phase="promoted", step=3))
    assert (fleet.models["m"], fleet.default_pool, fleet.splits["m"].main) == ("new", "new", "new")


@pytest.mark.parametrize("phase", ["rolled_back", "aborted"])
def test_a_rollback_gives_everything_back_at_once(phase: Phase) -> None:
    """No weight, no earlier weights, nothing to measure."""
    split = splits_of(settings(old=1.0, new=0.0), rollout(0.0, phase=phase))["m"]
    assert (split.weights["new"], split.earlier, split.epoch, split.main) == (0.0, (), "", "old")


def test_a_rollout_that_is_over_gives_way_to_a_changed_file() -> None:
    """The file governs once its weights are others than those that the rollout began with."""
    over = rollout(1.0, phase="retired")
    assert splits_of(settings(old=1.0, new=0.0), over)["m"].weights == {"new": 1.0}
    assert splits_of(settings(old=0.5, new=0.5), over)["m"].weights == {"old": 0.5, "new": 0.5}


@pytest.mark.parametrize(("phase", "share"), [("retired", 1.0), ("rolled_back", 0.0)])
def test_a_version_that_is_only_written_down_moves_nothing(phase: Phase, share: float) -> None:
    """A further version of weight 0 is no other weight: the retired version must not have everything again by it."""
    here = settings(old=1.0, new=0.0, third=0.0)
    weights = splits_of(here, rollout(share, phase=phase))["m"].weights
    assert weights.get("new", 0.0) == share
    assert weights.get("third", 0.0) == 0.0


def test_a_rollout_to_a_version_that_is_gone_is_over() -> None:
    """Else nobody could start another one: the file can no longer say that the canary has everything."""
    (over,) = rollout(1.0, phase="retired").values()
    assert not governs(over, {"old": 1.0})
    assert governs(over, {"old": 1.0, "new": 0.0})


def test_versions_that_the_file_no_longer_has_get_nothing() -> None:
    """A canary that was taken out of the file leaves what it had to the others, however its rollout stands."""
    here = settings(old=1.0, third=1.0)
    running = rollout(0.25, 0.05, base={"old": 1.0, "new": 0.0})
    split = splits_of(here, running)["m"]
    assert all(set(each) <= {"old", "third"} for each in (split.weights, *split.earlier))
    gone = splits_of(here, rollout(1.0, 0.25, base={"old": 1.0, "new": 0.0}))["m"]
    assert gone.weights == {"old": 1.0, "third": 1.0}


def test_conversations_stay_when_the_file_is_changed() -> None:
    """The weights before are kept, over further looks; a version with weight 0 is left at once."""
    first = splits_of(settings(old=0.9, new=0.1), {})
    raised = settings(old=0.5, new=0.5)
    second = splits_of(raised, {}, first)
    assert second["m"].earlier == ({"old": 0.9, "new": 0.1},)
    assert splits_of(raised, {}, second) is second
    third = splits_of(settings(old=0.1, new=0.9), {}, second)
    assert third["m"].earlier == ({"old": 0.5, "new": 0.5}, {"old": 0.9, "new": 0.1})
    assert splits_of(settings(old=1.0, new=0.0), {}, third)["m"].earlier == ()
    ended = splits_of(settings(old=0.0, new=1.0), {}, third)["m"]
    assert (ended.earlier, ended.main) == ((), "new")


def test_a_file_that_changes_often_keeps_the_newest_weights() -> None:
    """Eight of them: what a request looks through stays short."""
    splits = splits_of(settings(old=1.0, new=1.0), {})
    for weight in range(2, 30):
        splits = splits_of(settings(old=1.0, new=float(weight)), {}, splits)
    assert [each["new"] for each in splits["m"].earlier] == [28.0, 27.0, 26.0, 25.0, 24.0, 23.0, 22.0, 21.0]


def test_a_fleet_is_the_same_while_nothing_changes() -> None:
    """What is made for each fleet is not made anew at each look at the rollouts."""
    here = settings(old=0.9, new=0.1)
    fleet = fleet_of({}, here, splits_of(here, {}))
    assert with_splits(fleet, here, {}) is fleet
    assert with_splits(fleet, here, rollout(0.25)) is not fleet


@given(
    weights=st.dictionaries(st.sampled_from("abcd"), st.floats(0.0, 10.0), min_size=2),
    more=st.floats(0.01, 10.0),
    data=st.data(),
)
def test_more_weight_only_draws(weights: dict[str, float], more: float, data: st.DataObject) -> None:
    """A greater weight of one version moves units to it and none elsewhere: nobody leaves it, others do not swap."""
    raised = data.draw(st.sampled_from(sorted(weights)))
    after = {**weights, raised: weights[raised] + more}
    for unit in units(40):
        was, now = of_weights(weights, unit), of_weights(after, unit)
        assert now in (was, raised)


@given(shares=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6).map(sorted))
def test_a_rollout_that_goes_up_takes_and_gives_nothing_back(shares: list[float]) -> None:
    """Units on the canary stay there at each greater share, with three versions as with two."""
    base = {"old": 3.0, "new": 0.0, "third": 1.0}
    here, on_canary = settings(**base), set[bytes]()
    for share in shares:
        split = splits_of(here, rollout(share, base=base))["m"]
        now = {unit for unit in units(40) if chosen(split, unit).version == "new"}
        assert on_canary <= now
        on_canary = now


def test_a_tenth_is_a_tenth() -> None:
    """10,000 sessions at 10 %: 10 +- 1 %. At 25 % each of them is still on the canary, and 25 +- 1 % are."""
    here = settings(old=1.0, new=0.0)

    def versions(share: float, **more: Any) -> dict[str, str]:
        split = splits_of(here, rollout(share, **more))["m"]
        around = Around(fleet_of({}, here, {}), {"old": PoolKnowledge(Priors())}, here)
        names = map(str, range(10_000))
        found = {name: unit_of(around.config, split, chat("a", session=name), "")[0] for name in names}
        return {name: chosen(split, unit).version for name, unit in found.items()}

    tenth, quarter = versions(0.10), versions(0.25)
    assert 900 <= Counter(tenth.values())["new"] <= 1100
    assert 2400 <= Counter(quarter.values())["new"] <= 2600
    assert all(quarter[name] == "new" for name, version in tenth.items() if version == "new")
