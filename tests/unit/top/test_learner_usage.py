"""Where the tokens of an answer are known from: reported, asked for, counted from bytes, or nowhere."""

import pytest

from extproc.gossip import Gossip
from extproc.learner import Learner, answered, usage_source
from extproc.request.model import RouteKind
from extproc.telemetry.metrics import Metrics
from tests.unit.top.test_learner import METADATA, learner, served

CHAT: dict[str, str | float] = METADATA | {"kind": "chat"}
SILENT = {"prompt_tokens": -1, "cached_tokens": -1, "output_tokens": -1, "metadata": CHAT}


def size(tokens: int) -> int:
    """Bytes of a stream of so many tokens."""
    return 700 + 230 * tokens


def taught(answers: int = 20) -> tuple[Learner, Gossip, Metrics]:
    """A learner that has seen so many streams of different length, with usage."""
    learns, _, gossip, metrics = learner()
    for at in range(answers):
        learns.observe(served(output_tokens=10 + at, response_bytes=size(10 + at), metadata=CHAT, charge_id=""))
    return learns, gossip, metrics


def shown(metrics: Metrics, line: str) -> bool:
    """Whether the page has this line."""
    return line in metrics.page().decode().splitlines()


@pytest.mark.parametrize(("asked", "source"), [({}, "engine"), ({"asked_usage": 1.0}, "asked")])
def test_a_report_is_the_engines_or_was_asked_for(asked: dict[str, str | float], source: str) -> None:
    """By what the decision said of itself."""
    learns, _, _, metrics = learner()
    learns.observe(served(output_tokens=5, metadata=CHAT | asked))
    assert shown(metrics, f'warmpath_usage_total{{pool="main",source="{source}"}} 1.0')
    assert shown(metrics, 'warmpath_output_tokens_total{endpoint="a",pool="main"} 5.0')


def test_a_stream_without_usage_is_counted_by_its_bytes() -> None:
    """Apart from what engines told themselves; the rest of what usage tells stays unknown."""
    learns, _, metrics = taught()
    learns.observe(served(**SILENT, response_bytes=size(64)))
    assert shown(metrics, 'warmpath_usage_total{pool="main",source="counted"} 1.0')
    counted = next(line for line in metrics.page().decode().splitlines() if line.startswith("warmpath_counted_output"))
    assert float(counted.split()[-1]) == pytest.approx(64, abs=0.01)
    assert shown(metrics, f'warmpath_output_tokens_total{{endpoint="a",pool="main"}} {sum(range(10, 30))}.0')


def test_with_too_little_known_nothing_is_made_up() -> None:
    """Neither shown nor learnt."""
    learns, _, metrics = taught(answers=3)
    learns.observe(served(**SILENT, response_bytes=size(64)))
    assert shown(metrics, 'warmpath_usage_total{pool="main",source="none"} 1.0')
    assert "warmpath_counted_output_tokens_total{" not in metrics.page().decode()


async def test_counted_lengths_are_learnt_like_reported_ones() -> None:
    """How long answers grow is needed for the load they make; an answer that was cut short does not tell."""
    assert answered(served(**SILENT), "a", 0.5, 64.0).output_tokens == 64.0
    assert answered(served(**SILENT), "a", 0.5).output_tokens == -1.0
    for gone in ("DC", "DPE", "DR"):
        assert answered(served(**SILENT, flags=(gone,)), "a", 0.5, 64.0).output_tokens == -1.0
    assert answered(served(output_tokens=7, metadata=CHAT), "a", 0.5, 64.0).output_tokens == 7.0
    several = served(**(SILENT | {"metadata": CHAT | {"sequences": 4.0}}))
    assert answered(several, "a", 0.5, 64.0).output_tokens == 16.0


@pytest.mark.parametrize(
    "kind", [each.value for each in RouteKind if each not in {RouteKind.CHAT, RouteKind.COMPLETION}]
)
def test_other_apis_are_not_counted(kind: str) -> None:
    """Their frames hold other things than tokens, or their streams always end with usage."""
    learns, _, metrics = taught()
    for at in range(20):
        learns.observe(served(output_tokens=at + 1, response_bytes=size(at + 1), metadata=METADATA | {"kind": kind}))
    learns.observe(served(**(SILENT | {"metadata": METADATA | {"kind": kind}}), response_bytes=size(9)))
    assert "warmpath_counted_output_tokens_total{" not in metrics.page().decode()
    wanted = kind != "other"
    assert shown(metrics, 'warmpath_usage_total{pool="main",source="none"} 1.0') is wanted


@pytest.mark.parametrize(
    "changes", [{"status": 400}, {"status": 0}, {"metadata": METADATA}, {"metadata": METADATA | {"kind": "other"}}]
)
def test_what_has_no_tokens_has_no_source(changes: dict[str, object]) -> None:
    """Refusals, and requests of which nobody knows what they are."""
    assert usage_source(served(**({"metadata": CHAT} | changes)), 64.0) is None


def test_whole_answers_and_streams_are_counted_apart() -> None:
    """One frame a token is not one frame in all."""
    learns, _, metrics = taught()
    learns.observe(served(**(SILENT | {"metadata": CHAT | {"streamed": 0.0}}), response_bytes=900))
    assert shown(metrics, 'warmpath_usage_total{pool="main",source="none"} 1.0')
