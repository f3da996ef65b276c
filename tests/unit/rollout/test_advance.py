"""How a rollout goes on, and what operators may tell it."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.errors import RolloutError
from extproc.rollout import advance as rules
from extproc.rollout.advance import advance, begin, waits_for
from extproc.rollout.evidence import Evidence
from extproc.rollout.gates import Gate, Judgement, judge
from extproc.rollout.state import ACTIVE, Event, Plan, Rollout, decode, encode, governs, weights
from tests.canaries import plan, started

HOLD = 600.0


def judged(rollout: Rollout, *failed: str, canary: int = 100, baseline: int = 100) -> Judgement:
    """A judgement of the present step in which these gates fail, the first by most."""
    gates = tuple(
        Gate(
            name=name,
            evidence=9.0 - index,
            threshold=3.5,
            canary=0.4,
            baseline=0.2,
            tolerance=0.1,
            failed=True,
        )
        for index, name in enumerate(failed)
    )
    before = {"errors": (1000, 10)}
    return Judgement(epoch=rollout.epoch, gates=gates, canary=canary, baseline=baseline, before=before)


def further(rollout: Rollout, now: float, *failed: str) -> tuple[Rollout, Event]:
    """What the controller does now; it must do something."""
    told = advance(rollout, judged(rollout, *failed), now)
    assert told is not None
    return told


def ended(settings: Plan) -> Rollout:
    """A rollout at the end of all steps."""
    rollout = started(settings)
    for _ in settings.steps:
        rollout, _ = further(rollout, rollout.since + HOLD)
    assert rollout.phase == "promoted"
    return rollout


def test_a_rollout_goes_through_its_steps_to_the_end() -> None:
    """Each step is entered as soon as its time is over; conversations of before may stay until the old version goes."""
    rollout, now, told = started(plan()), 0.0, []
    while rollout.phase in ACTIVE:
        now += 1.0
        if change := advance(rollout, judged(rollout), now):
            rollout, event = change
            assert decode(encode(rollout)) == rollout
            told.append((now, event.what, event.share, rollout.earlier))
    assert told == [
        (600.0, "step", 0.25, (0.05, 0.0)),
        (1200.0, "step", 0.75, (0.25, 0.05, 0.0)),
        (1800.0, "step", 1.0, (0.75, 0.25, 0.05, 0.0)),
        (2400.0, "promoted", 1.0, (0.75, 0.25, 0.05, 0.0)),
        (3000.0, "retired", 1.0, ()),
    ]
    assert (rollout.phase, rollout.share, rollout.before) == ("retired", 1.0, {"errors": (1000, 10)})


def test_a_rollout_begins_above_the_share_that_its_canary_has() -> None:
    """Raising a share moves conversations to the canary only: a first step must not take any from it."""
    rollout, event = begin("r", "m", "b", {"a": 3.0, "b": 1.0}, plan(), (5.0, "me"))
    assert (rollout.step, rollout.share, rollout.earlier) == (2, 0.75, (0.25,))
    assert (event.what, event.by, event.at, event.share) == ("started", "me", 5.0, 0.75)
    assert (rollout.started, rollout.entered, rollout.since) == (5.0, 5.0, 5.0)


@pytest.mark.parametrize("base", [{"a": 1.0}, {"b": 1.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}])
def test_a_rollout_needs_traffic_to_move(base: dict[str, float]) -> None:
    """There must be another version with traffic, and the canary among the versions."""
    with pytest.raises(RolloutError, match="no traffic to move"):
        begin("r", "m", "b", base, plan(), (0.0, "me"))


def test_a_rollout_needs_a_step_above_the_present_share() -> None:
    """A plan that ends at what the canary has already moves nothing."""
    with pytest.raises(RolloutError, match="50% already"):
        begin("r", "m", "b", {"a": 1.0, "b": 1.0}, plan(steps=(0.1, 0.5)), (0.0, "me"))


@pytest.mark.parametrize(
    ("canary", "baseline", "now", "verdict", "waits"),
    [
        (100, 100, 599.0, "pass", "1 s of its hold time"),
        (5, 100, 600.0, "pass", "5 more answers of the canary"),
        (100, 5, 600.0, "pass", "5 more answers of the baseline"),
        (100, 100, 600.0, "", "a verdict"),
    ],
)
def test_a_step_waits_for_all_that_it_needs(canary: int, baseline: int, now: float, verdict: str, waits: str) -> None:
    """Time, answers of both, a verdict; each of them alone holds it up, and is named."""
    rollout = msgspec.structs.replace(started(plan(require_verdict=True)), verdict=verdict)
    judgement = judged(rollout, canary=canary, baseline=baseline)
    assert advance(rollout, judgement, now) is None
    assert waits_for(rollout, judgement, now) == (waits,)


def test_the_last_step_needs_no_answers_of_the_baseline() -> None:
    """It gets none there."""
    rollout = started(plan(steps=(1.0,)))
    assert advance(rollout, judged(rollout, baseline=0), HOLD) is not None


def test_a_failed_gate_takes_everything_from_the_canary_at_once() -> None:
    """Nobody stays: not by share, and not because a conversation began there. Numbers are told."""
    rollout, _ = further(started(plan()), HOLD)
    back, event = further(rollout, 700.0, "errors", "ttft_p50")
    assert (back.phase, back.share, back.earlier, back.gate) == ("rolled_back", 0.0, (), "errors")
    assert weights(back, back.share)["canary"] == 0.0
    assert (event.what, event.gate, event.share, event.by) == ("rolled_back", "errors", 0.0, "controller")
    assert event.told["evidence"] == 9.0
    assert event.told["canary"] == 0.4
    assert event.text == "40.00 % on the canary, 20.00 % on the baseline"
    assert advance(back, judged(back, "errors"), 800.0) is None


@pytest.mark.parametrize("phase", ["running", "paused", "promoted"])
def test_gates_are_looked_at_as_long_as_the_old_version_is_there(phase: str) -> None:
    """While it is paused, and after 100 %, a canary still serves users."""
    rollout = ended(plan()) if phase == "promoted" else started(plan())
    if phase == "paused":
        rollout, _ = rules.pause(rollout, 10.0, "me")
    back, _ = further(rollout, rollout.since + 1.0, "errors")
    assert (back.phase, back.share) == ("rolled_back", 0.0)


def test_a_failed_gate_may_only_pause() -> None:
    """It keeps its share; whoever resumes goes on in spite of all gates that had failed then, and not of others."""
    rollout = started(plan(on_failure="pause"))
    paused, event = further(rollout, 100.0, "errors", "broken")
    assert (paused.phase, paused.share, paused.gate, paused.held_s, event.what) == (
        "paused",
        0.05,
        "errors",
        100.0,
        "paused",
    )
    assert advance(paused, judged(paused, "errors", "broken"), 5000.0) is None
    resumed, _ = rules.resume(paused, 5000.0, "me", "known")
    assert advance(resumed, judged(resumed, "errors", "broken"), 5001.0) is None
    assert further(resumed, 5001.0, "ttft_p50")[0].gate == "ttft_p50"
    assert further(resumed, 5500.0, "errors", "broken")[0].step == 1


def test_who_resumes_has_seen_what_failed_during_the_pause() -> None:
    """All gates that have failed by then are passed over; a judgement of another step says nothing."""
    paused, _ = further(started(plan(on_failure="pause")), 100.0, "errors")
    shown = judged(paused, "errors", "broken", "ttft_p50")
    resumed, _ = rules.resume(paused, 5000.0, "me", judgement=shown)
    assert advance(resumed, shown, 5001.0) is None
    assert further(resumed, 5001.0, "length_longer")[0].gate == "length_longer"
    unseen, _ = rules.resume(paused, 5000.0, "me", judgement=msgspec.structs.replace(shown, epoch="another"))
    assert further(unseen, 5001.0, "broken")[0].gate == "broken"


def test_a_failed_gate_may_only_be_reported() -> None:
    """Once a gate and step; the step goes on, and the next one reports anew."""
    rollout = started(plan(on_failure="report"))
    rollout, event = further(rollout, 100.0, "errors")
    assert (event.what, event.gate, rollout.phase) == ("gate_failed", "errors", "running")
    assert advance(rollout, judged(rollout, "errors"), 101.0) is None
    rollout, event = further(rollout, 102.0, "errors", "broken")
    assert event.gate == "broken"
    rollout, event = further(rollout, HOLD, "errors", "broken")
    assert event.what == "step"
    assert further(rollout, HOLD + 1.0, "errors")[1].what == "gate_failed"


@pytest.mark.parametrize(
    ("on_failure", "phase", "what"),
    [("rollback", "rolled_back", "rolled_back"), ("pause", "paused", "paused"), ("report", "running", "gate_failed")],
)
def test_a_bad_verdict_is_a_failed_gate(on_failure: str, phase: str, what: str) -> None:
    """It does what `on_failure` says, with or without `require_verdict`."""
    rollout, event = rules.verdict(started(plan(on_failure=on_failure)), 50.0, "judge", "worse at SQL", passed=False)
    assert (event.what, event.text) == ("verdict", "fail: worse at SQL")
    rollout, event = further(rollout, 51.0)
    assert (rollout.phase, event.what, event.gate) == (phase, what, "verdict")
    if on_failure == "report":
        assert waits_for(rollout, judged(rollout), 5000.0) == ()
        assert further(rollout, 5000.0)[0].step == 1
    if on_failure == "pause":
        resumed, _ = rules.resume(rollout, 60.0, "me")
        assert further(resumed, 5000.0)[0].step == 1


def test_a_reported_verdict_is_a_verdict() -> None:
    """Where steps wait for one, a bad one that stops nothing is not waited on for a better one."""
    rollout = started(plan(on_failure="report", require_verdict=True))
    assert waits_for(rollout, judged(rollout), 5000.0) == ("a verdict",)
    rollout, _ = rules.verdict(rollout, 50.0, "judge", "", passed=False)
    rollout, event = further(rollout, 5000.0)
    assert (event.what, event.gate) == ("gate_failed", "verdict")
    assert further(rollout, 5000.0)[0].step == 1


def test_what_is_forgotten_governs_nothing() -> None:
    """The file's weights hold at once, also those of a canary that a rollback kept at nothing."""
    base = {"base": 9.0, "canary": 1.0}
    rollout, _ = begin("r1", "m", "canary", base, plan(steps=(0.5, 1.0)), (0.0, "me"))
    rollout, _ = rules.abort(rollout, 1.0, "me")
    assert governs(rollout, base)
    forgotten, event = rules.forget(rollout, 2.0, "me", "tidy")
    assert not governs(forgotten, base)
    assert (event.what, event.rollout, event.text, event.share) == ("forgotten", "r1", "tidy", 0.0)
    assert advance(forgotten, judged(forgotten), 5000.0) is None


def test_a_good_verdict_is_of_one_step() -> None:
    """The next step needs one of its own."""
    rollout, _ = rules.verdict(started(plan(require_verdict=True)), 50.0, "judge", "", passed=True)
    rollout, _ = further(rollout, HOLD)
    assert (rollout.step, rollout.verdict) == (1, "")
    assert advance(rollout, judged(rollout), 5000.0) is None


def test_a_pause_stops_time_and_keeps_the_share() -> None:
    """What passed before counts after; the time of the pause does not."""
    rollout, _ = rules.pause(started(plan()), 400.0, "me", "lunch")
    assert (rollout.phase, rollout.share, rollout.reason) == ("paused", 0.05, "lunch")
    assert advance(rollout, judged(rollout), 5000.0) is None
    rollout, _ = rules.resume(rollout, 5000.0, "me")
    assert advance(rollout, judged(rollout), 5199.0) is None
    assert further(rollout, 5200.0)[0].step == 1


def test_a_promoted_rollout_that_was_paused_keeps_the_old_version() -> None:
    """Nothing is retired meanwhile; after, its time begins anew, and the last step's is not asked for again."""
    rollout = ended(plan())
    paused, _ = rules.pause(rollout, rollout.since + 10.0, "me")
    assert advance(paused, judged(paused), 1e6) is None
    resumed, _ = rules.resume(paused, 1e6, "me")
    promoted, event = further(resumed, 1e6)
    assert (promoted.phase, event.what, promoted.since) == ("promoted", "promoted", 1e6)


def test_operators_promote_step_by_step_or_to_the_end() -> None:
    """One step, from a pause too; or all; and what is promoted is retired."""
    rollout, event = rules.promote(started(plan()), 5.0, "me", "sure")
    assert (rollout.step, rollout.since, event.what, event.text, event.by) == (1, 5.0, "step", "sure", "me")
    rollout, _ = rules.pause(rollout, 6.0, "me")
    rollout, _ = rules.promote(rollout, 7.0, "me")
    assert (rollout.phase, rollout.step, rollout.held_s) == ("running", 2, 0.0)
    full, _ = rules.promote(started(plan()), 5.0, "me", full=True)
    assert (full.phase, full.step, full.share, full.earlier) == ("running", 3, 1.0, (0.05, 0.0))
    full, _ = rules.promote(full, 6.0, "me", full=True)
    assert full.phase == "promoted"
    full, event = rules.promote(full, 7.0, "me")
    assert (full.phase, full.earlier, event.what) == ("retired", (), "retired")


def test_who_promotes_keeps_what_the_baseline_did() -> None:
    """A step that an operator ends is compared with at 100 % as any other, if its judgement is at hand and its own."""
    rollout = started(plan())
    told = judged(rollout)
    assert rules.promote(rollout, 5.0, "me", judgement=told)[0].before == told.before
    other = msgspec.structs.replace(told, epoch="another")
    assert rules.promote(rollout, 5.0, "me", judgement=other)[0].before == {}


@pytest.mark.parametrize("phase", ["running", "paused", "promoted"])
def test_abort_takes_everything_from_the_canary(phase: str) -> None:
    """From any phase that is not over, 100 % included."""
    rollout = ended(plan()) if phase == "promoted" else started(plan())
    if phase == "paused":
        rollout, _ = rules.pause(rollout, 10.0, "me")
    aborted, event = rules.abort(rollout, 9000.0, "me", "no")
    assert (aborted.phase, aborted.share, aborted.earlier, event.what) == ("aborted", 0.0, (), "aborted")


Command = Callable[[Rollout, float, str, str], tuple[Rollout, Event]]
COMMANDS: dict[str, Command] = {
    "promote": rules.promote,
    "pause": rules.pause,
    "resume": rules.resume,
    "abort": rules.abort,
    "verdict": lambda rollout, now, by, text: rules.verdict(rollout, now, by, text, passed=bool(text)),
}


@pytest.mark.parametrize(
    ("phase", "refused", "hint"),
    [
        ("running", {"resume"}, "promote, pause or abort"),
        ("paused", {"pause"}, "resume, promote or abort"),
        ("promoted", {"resume"}, "retire the old version"),
        ("retired", set(COMMANDS), "start another"),
        ("rolled_back", set(COMMANDS), "start another"),
        ("aborted", set(COMMANDS), "start another"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(phase: str, refused: set[str], hint: str) -> None:
    """409, with the phase and the remedy."""
    rollout = msgspec.structs.replace(started(plan()), phase=phase)
    for name, command in COMMANDS.items():
        if name in refused:
            with pytest.raises(RolloutError, match=hint):
                command(rollout, 1.0, "me", "")
        else:
            command(rollout, 1.0, "me", "")


def test_a_judgement_of_another_step_decides_nothing() -> None:
    """Evidence that was read before a step began must not end it."""
    rollout = started(plan())
    later, _ = further(rollout, HOLD)
    assert advance(later, judged(rollout, "errors"), HOLD + 1.0) is None


counts = st.integers(0, 1 << 40)
logs = st.lists(st.lists(st.floats(-1e9, 1e9), max_size=5), max_size=16)
names = st.sampled_from(["errors", "abandons", "broken", "ttft_p50", "length_longer", "x"])
evidences = st.builds(
    Evidence,
    answers=st.lists(counts, min_size=2, max_size=2),
    logs=st.dictionaries(names, logs),
    risks=st.dictionaries(names, st.lists(counts, min_size=4, max_size=4)),
    exposed=st.dictionaries(names, st.lists(st.lists(counts, min_size=2, max_size=2), max_size=16)),
    others=st.dictionaries(names, st.lists(counts, min_size=2, max_size=2)),
)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["rollback", "pause", "report"]),
    st.lists(st.tuples(st.sampled_from(["look", *COMMANDS]), evidences, st.floats(-1e6, 1e6)), max_size=12),
)
def test_no_history_breaks_the_rules(on_failure: str, history: list[tuple[str, Evidence, float]]) -> None:
    """Whatever is measured, asked and whenever: nothing raises but refusals, shares stay shares, and ends are ends."""
    rollout, now = started(plan(on_failure=on_failure, hold_s=10.0)), 0.0
    for what, evidence, passed in history:
        now += passed
        before = rollout
        if what == "look":
            told = advance(rollout, judge(evidence, rollout), now)
            rollout = told[0] if told else rollout
        else:
            try:
                rollout, _ = COMMANDS[what](rollout, now, "me", "text" if passed > 0 else "")
            except RolloutError:
                assert rollout == before
        assert 0.0 <= rollout.share <= 1.0
        assert all(0.0 <= share < rollout.share for share in rollout.earlier)
        assert list(rollout.earlier) == sorted(rollout.earlier, reverse=True)
        if before.phase not in ACTIVE:
            assert rollout == before
        if rollout.phase in ("rolled_back", "aborted"):
            assert (rollout.share, rollout.earlier) == (0.0, ())
        else:
            assert rollout.share >= before.share
        assert decode(encode(rollout)) == rollout
