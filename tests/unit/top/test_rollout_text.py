"""What `warmpath rollout` shows."""

from typing import Any

import pytest
import yaml

from extproc import rollout_text
from extproc.admin.values import Changed, History, Line, Started, Status, VersionNow
from extproc.config_rollouts import Gates
from extproc.rollout.gates import Gate, Judgement
from extproc.rollout.state import Event, Plan, Rollout
from tests.unit.admin.stage import config

NOW = 1_800_000_000.0
PLAN = Plan(
    steps=(0.01, 0.25, 1.0),
    hold_s=600.0,
    settle_s=10.0,
    min_samples=100,
    on_failure="rollback",
    false_alarms=0.01,
    require_verdict=False,
    retire_after_s=1800.0,
    gates=Gates(),
)


def rollout(**fields: Any) -> Rollout:
    """A rollout in its second step since 100 s; fields replace those given."""
    base: dict[str, Any] = {
        "id": "r1",
        "model": "chat",
        "canary": "v2",
        "base": {"v1": 1.0, "v2": 0.0},
        "plan": PLAN,
        "step": 1,
        "share": 0.25,
        "started": NOW - 1000.0,
        "entered": NOW - 100.0,
        "since": NOW - 100.0,
    }
    return Rollout(**{**base, **fields})


def status(**fields: Any) -> Status:
    """The status of that rollout; fields replace those given."""
    base: dict[str, Any] = {
        "model": "chat",
        "versions": [
            VersionNow(name="v1", pool="old", weight=1.0, share=0.75),
            VersionNow(name="v2", pool="new", weight=0.0, share=0.25),
        ],
        "now": NOW,
        "rollout": rollout(),
        "governs": True,
    }
    return Status(**{**base, **fields})


def gate(name: str, canary: float, baseline: float, **fields: Any) -> Gate:
    """A gate with these numbers; fields replace those given."""
    base: dict[str, Any] = {"evidence": 0.5, "threshold": 3.4, "tolerance": 0.1}
    return Gate(name=name, canary=canary, baseline=baseline, **{**base, **fields})


def test_what_cannot_be_read_of_workers_is_told() -> None:
    """A rollout whose step waits for answers that nobody here can count must not look as if there were none."""
    told = rollout_text.of_status(status(judgement=Judgement(epoch="r1-1", parts=1, unread=3)), None)
    assert "what 3 workers told cannot be read: are they of another release?" in told


def test_a_running_rollout_is_shown_whole() -> None:
    """Where it is, who has what, each gate with evidence and threshold, and what the step waits for."""
    gates = (
        gate("ttft_p50", 0.25, 0.2, canary_samples=1234, baseline_samples=5678, evidence=3.5, failed=True),
        gate("errors", 0.001, 0.0, tolerance=0.005),
        gate("length_longer", -1.0, 321.0, note="rests"),
    )
    judgement = Judgement(epoch="r1-1", gates=gates, canary=40, baseline=1200, parts=4)
    assert rollout_text.of_status(status(judgement=judgement), None) == (
        "model chat\n"
        "rollout r1 to version v2 is running; it began 2027-01-15 07:43:20 UTC\n"
        "step 2 of 3 (1 %, 25 %, 100 %): 25 % since 2027-01-15 07:58:20 UTC\n"
        "\n"
        "   version  pool  weight   now\n"
        "   v1       old        1  75 %\n"
        ">  v2       new        0  25 %\n"
        "\n"
        "answers that count: 40 of version v2, 1,200 of the others (100 of each are needed), told by 4 workers\n"
        "   gate             canary    baseline  tolerance  evidence  fails at      samples\n"
        "!  ttft_p50       250.0 ms    200.0 ms      +10 %      3.50      3.40  1,234/5,678\n"
        "   errors           0.10 %      0.00 %     +0.5 %      0.50      3.40          0/0\n"
        "   length_longer         -  321 tokens      +10 %      0.50      3.40          0/0  rests\n"
        "A gate fails when its evidence, log10 of an e-value, gets there.\n"
        "waits for: 500 s of its hold time, 60 more answers of the canary\n"
    )


def test_nothing_measured_is_said() -> None:
    """Rather than a table of nothing."""
    assert "nothing is measured of this step as yet" in rollout_text.of_status(status(), None)


def test_a_model_without_a_rollout_has_the_weights_of_the_file() -> None:
    """And no table of gates."""
    told = rollout_text.of_status(status(rollout=None, governs=False), None)
    assert told.startswith("model chat\nno rollout as yet: the weights of warmpath.yaml hold\n")
    assert "gate" not in told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"phase": "paused", "reason": "lunch"}, "is paused; it began"),
        ({"phase": "paused", "reason": "lunch"}, "why: lunch"),
        ({"phase": "rolled_back", "gate": "errors"}, "was rolled back: version v2 has nothing"),
        ({"phase": "rolled_back", "gate": "errors"}, "failed gate: errors"),
        ({"phase": "aborted"}, "was aborted: version v2 has nothing"),
        ({"verdict": "fail"}, "verdict on this step: fail"),
    ],
)
def test_every_phase_has_its_words(fields: dict[str, Any], told: str) -> None:
    """What the value says, the text says."""
    assert told in rollout_text.of_status(status(rollout=rollout(**fields)), None)


def test_a_file_that_was_changed_after_the_end_holds() -> None:
    """That is said, as the table shows its shares then."""
    told = rollout_text.of_status(status(rollout=rollout(phase="aborted"), governs=False), None)
    assert "the weights of warmpath.yaml hold: they were changed since" in told


def test_a_canary_that_the_file_has_no_more_is_told() -> None:
    """Its rollout stands still, and can only be aborted."""
    left = [VersionNow(name="v1", pool="old", weight=1.0, share=1.0)]
    assert "warmpath.yaml has no version v2 of the model any more; abort it" in rollout_text.of_status(
        status(versions=left), None
    )
    assert "any more" not in rollout_text.of_status(status(), None)


@pytest.mark.parametrize("phase", ["promoted", "retired"])
def test_a_promoted_rollout_ends_with_what_to_write(phase: str) -> None:
    """The lines are YAML; put into the file they give the canary everything, and keep what else versions have."""
    settings = config(
        {
            "versions": {
                "v1": {"pool": "old", "weight": 1},
                "v2": {"pool": "new", "served_as": "a: b", "adapter": {"name": "x", "id": 1, "path": "/x"}},
            }
        }
    )
    told = rollout_text.of_status(status(rollout=rollout(phase=phase, share=1.0)), settings)
    written = yaml.safe_load(told.partition("wants it:\n")[2])
    assert written == {
        "models": {
            "chat": {
                "versions": {
                    "v1": {"pool": "old", "weight": 0},
                    "v2": {
                        "pool": "new",
                        "served_as": "a: b",
                        "adapter": {"name": "x", "id": 1, "path": "/x"},
                        "weight": 1,
                    },
                }
            }
        }
    }


def test_what_is_written_already_is_not_asked_for() -> None:
    """The file gives the canary everything."""
    versions = [
        VersionNow(name="v1", pool="old", weight=0.0, share=0.0),
        VersionNow(name="v2", pool="new", weight=1.0, share=1.0),
    ]
    told = rollout_text.of_status(status(versions=versions, rollout=rollout(phase="promoted", share=1.0)), None)
    assert "write this" not in told


def test_a_start_tells_its_warnings_and_whether_it_was_one() -> None:
    """A dry run cannot be taken for a start."""
    started = Started(rollout=rollout(), preview=["then 100 %"], warnings=["slow"], dry_run=False)
    assert rollout_text.of_start(started) == (
        "rollout r1 of model chat to version v2 has started:\n  then 100 %\nwarning: slow\n"
    )
    dry = Started(rollout=rollout(), preview=[], warnings=[], dry_run=True)
    assert rollout_text.of_start(dry).startswith("dry run: nothing was changed.")


def test_a_change_and_the_audit_log() -> None:
    """Who, what, when, why, and the numbers that it was decided by."""
    event = Event(
        at=NOW,
        model="chat",
        rollout="r1",
        what="rolled_back",
        by="controller",
        gate="errors",
        text="2.00 % on the canary, 0.00 % on the baseline",
        told={"evidence": 3.51234, "canary": 0.02},
    )
    ended = rollout(phase="rolled_back", share=0.0)
    assert rollout_text.of_change(Changed(rollout=ended, event=event)) == (
        "rollout r1 of model chat was rolled back: version v2 has nothing\nversion v2 has 0 %\n"
    )
    assert rollout_text.of_history(History([Line("1-0", event)])) == (
        "2027-01-15 08:00:00 UTC  r1  rolled_back by controller, 0 %, gate errors: "
        "2.00 % on the canary, 0.00 % on the baseline\n"
        "    evidence 3.512, canary 0.02\n"
    )
    assert rollout_text.of_history(History([])) == "nothing has happened as yet\n"


def test_nothing_that_others_wrote_reaches_the_terminal_as_a_command() -> None:
    """A text, an operator's name or a version of another keeper may hold anything."""
    told = rollout_text.of_status(status(rollout=rollout(reason="\x1b]0;x\x07\x9b2J\u202e")), None)
    assert all(letter.isprintable() or letter == "\n" for letter in told)


@pytest.mark.parametrize(
    ("seconds", "words"), [(59.4, "59 s"), (119.4, "119 s"), (600.0, "10 min"), (7260.0, "2 h 1 min")]
)
def test_times_are_told_in_words(seconds: float, words: str) -> None:
    """As coarse as they are long."""
    told = rollout_text.of_status(status(rollout=rollout(phase="promoted"), hold_left_s=seconds), None)
    assert f"conversations leave the old version in {words}," in told
