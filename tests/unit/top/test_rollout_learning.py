"""What finished requests say of a version: facts of Envoy's access log, as it tells them of each kind of failure."""

from typing import Any

import msgspec
import pytest

from extproc.config import Config
from extproc.envoy.contract import BRIEF, CONTINUED, EPOCH, MODEL, QUEUED, UNIT, VERSION, Served
from extproc.rollout.evidence import Sample
from extproc.rollout_learning import model_of, outcome_of, sample_of, usage_due
from tests.unit.top.parts import config

METADATA: dict[str, str | float] = {
    "endpoint": "b",
    "kind": "chat",
    "streamed": 1.0,
    "uncached_tokens": 500.0,
    "sequences": 1.0,
    MODEL: "m",
    VERSION: "two",
    UNIT: 0.25,
    EPOCH: "r1-0",
}


def settings(*, ask_usage: bool = False) -> Config:
    """Model `m`, also called `alias`, in two versions with a pool each."""
    pool = {"endpoints": ["10.0.0.1:80"], "ask_usage": ask_usage}
    versions = {"one": {"pool": "p1", "weight": 1}, "two": {"pool": "p2"}}
    return config(
        models={"m": {"versions": versions, "aliases": ["alias"]}, "n": {"pool": "p1"}},
        pools={"p1": pool, "p2": pool},
    )


def served(**changes: Any) -> Served:
    """A whole streamed answer of the second version, changed in some fields; `told` is laid over its metadata."""
    told = METADATA | changes.pop("told", {})
    fields: dict[str, Any] = {
        "charge_id": "c1",
        "pool": "p2",
        "destination": "10.0.0.1:80",
        "status": 200,
        "ttft_s": 0.5,
        "duration_s": 2.5,
        "response_bytes": 3000,
        "prompt_tokens": 1000,
        "cached_tokens": 500,
        "output_tokens": 21,
        "metadata": told,
    }
    return Served(**(fields | changes))


def outcome(**changes: Any) -> str:
    """How a request ended whose answer has usage when it is whole."""
    return outcome_of(served(**changes), due=True)


CUT = {"prompt_tokens": -1, "cached_tokens": -1, "output_tokens": -1}
"""What Envoy reads of the usage of an answer that did not get to its end."""


@pytest.mark.parametrize(
    ("changes", "ended"),
    [
        ({}, "ok"),
        ({"status": 503, "flags": ("UF", "URX"), **CUT}, "failed"),
        ({"status": 503, "flags": ("UC", "URX"), **CUT}, "failed"),
        ({"status": 503, "flags": ("URX", "UPE"), **CUT}, "failed"),
        ({"status": 503, "flags": ("UH",), **CUT}, "failed"),
        ({"status": 500, **CUT}, "failed"),
        ({"status": 504, "stage": "headers", "flags": ("UT",), **CUT}, "failed"),
        ({"status": 504, "stage": "first_token", **CUT}, "failed"),
        ({"status": 504, "stage": "request", **CUT}, "failed"),
        ({"status": 200, "stage": "first_token", **CUT}, "failed"),
        ({"status": 200, "stage": "stall", **CUT}, "broken"),
        ({"status": 200, "stage": "idle", **CUT}, "broken"),
        ({"status": 200, "flags": ("UPE",), **CUT}, "broken"),
        ({"status": 200, "flags": ("UC",), **CUT}, "broken"),
        (CUT, "broken"),
        ({"output_tokens": 0}, "broken"),
        ({"response_bytes": 0, **CUT}, "broken"),
        ({"status": 200, "flags": ("DC",), **CUT}, "abandoned"),
        ({"status": 0, "flags": ("DC",), **CUT}, "abandoned"),
        ({"status": 0, "flags": ("DR",), **CUT}, "abandoned"),
        ({"status": 503, "flags": ("URX",), **CUT}, "failed"),
        ({"status": 503, "flags": ("UO",), **CUT}, "failed"),
        ({"status": 429, **CUT}, "failed"),
        ({"status": 401, **CUT}, "failed"),
        ({"status": 404, **CUT}, "failed"),
        ({"status": 400, **CUT}, "neutral"),
        ({"status": 413, **CUT}, "neutral"),
        ({"status": 0, **CUT}, "neutral"),
        ({"status": 400, "flags": ("DPE",), **CUT}, "neutral"),
        ({"status": 200, "stage": "request", **CUT}, "neutral"),
        ({"status": 200, "stage": "stall", "response_bytes": 65536, **CUT}, "neutral"),
    ],
)
def test_who_is_to_blame_for_how_a_request_ended(changes: dict[str, Any], ended: str) -> None:
    """The version for what its engines failed, refused or cut; nobody for bad requests and answers too long."""
    assert outcome(**changes) == ended


def test_usage_that_nobody_asked_for_is_missed_in_no_stream() -> None:
    """A client that does not ask for usage gets none, and its answer may be whole all the same."""
    assert outcome_of(served(**CUT), due=False) == "ok"
    assert outcome_of(served(response_bytes=0, **CUT), due=False) == "broken"


@pytest.mark.parametrize(
    ("told", "ask_usage", "due"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"asked_usage": 1.0}, True, True),
        ({"streamed": 0.0}, False, True),
        ({"kind": "responses"}, False, True),
        ({"kind": "messages"}, False, True),
        ({"kind": "embedding", "streamed": 0.0}, True, False),
        ({"kind": "other", "streamed": 0.0}, True, False),
    ],
)
def test_when_an_answer_must_have_usage(told: dict[str, str | float], ask_usage: bool, due: bool) -> None:
    """Whole answers of APIs that generate, streams that always tell, and streams where it was asked for."""
    both = settings(ask_usage=ask_usage)
    assert usage_due(both, both.models["m"], served(told=told)) is due


def test_streams_are_known_to_be_cut_only_where_every_version_is_asked() -> None:
    """Else those of one version would look cut, and those of the other whole."""
    mixed = settings(ask_usage=True)
    mixed = msgspec.structs.replace(mixed, pools={**mixed.pools, "p1": settings().pools["p1"]})
    assert not usage_due(mixed, mixed.models["m"], served())
    assert not usage_due(mixed, mixed.models["m"], served(told={"asked_usage": 1.0}))


@pytest.mark.parametrize(("tokens", "ended"), [(0, "broken"), (1, "broken"), (2, "ok")])
def test_an_answer_that_says_nothing_has_the_token_of_its_end_alone(tokens: int, ended: str) -> None:
    """Engines count that token (vLLM), so an answer of one token is empty, unless the client wants no more."""
    assert outcome(output_tokens=tokens) == ended
    assert outcome(output_tokens=2 * tokens, told={"sequences": 2.0}) == ended
    assert outcome(output_tokens=1, told={BRIEF: 1.0}) == "ok"
    assert outcome(output_tokens=0, told={BRIEF: 1.0}) == "broken"


def test_an_answer_without_tokens_by_nature_is_not_empty() -> None:
    """An embedding is whole without any output token, and empty without a byte."""
    told: dict[str, Any] = {"kind": "embedding", "streamed": 0.0}
    assert outcome_of(served(told=told, output_tokens=-1), due=False) == "ok"
    assert outcome_of(served(told=told, output_tokens=-1, response_bytes=0), due=False) == "broken"


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({}, "m"),
        ({"told": {MODEL: "alias"}}, "m"),
        ({"told": {MODEL: "n"}}, None),
        ({"told": {MODEL: "unknown"}}, None),
        ({"told": {VERSION: "three"}}, None),
        ({"told": {VERSION: 2.0}}, None),
        ({"pool": "p1"}, None),
    ],
)
def test_a_version_is_believed_only_with_its_own_pool(changes: dict[str, Any], model: str | None) -> None:
    """Labels of metrics come from the configuration, whatever the access log says."""
    found = model_of(settings(), served(**changes))
    assert (found[0] if found else None) == model


def sample(**changes: Any) -> Sample | None:
    """The sample of a request of the second version."""
    one = served(**changes)
    return sample_of(one, "b" if one.destination else "", outcome_of(one, due=True))


def known(**changes: Any) -> Sample:
    """The same, where there is one."""
    found = sample(**changes)
    assert found is not None
    return found


def test_a_whole_stream_tells_everything() -> None:
    """20 tokens came in the two seconds after the first."""
    one = known()
    assert (one.version, one.unit, one.uncached_tokens, one.streamed) == ("two", 0.25, 500.0, True)
    assert (one.ttft_s, one.output_tokens, one.duration_s) == (0.5, 21.0, 2.5)
    assert one.tpot_s == pytest.approx(0.1)
    assert (one.answered, one.failed, one.abandoned, one.broken, one.continued) == (True, False, False, False, False)


def test_time_in_the_queue_is_not_the_versions() -> None:
    """Neither of the first token nor of those after it."""
    waited = known(ttft_s=5.5, duration_s=7.5, told={QUEUED: 5000.0})
    assert waited.ttft_s == 0.5
    assert waited.tpot_s == pytest.approx(0.1)


def test_several_answers_to_one_request_come_side_by_side() -> None:
    """Their length, and the time of a token, are those of one of them."""
    both = known(output_tokens=42, told={"sequences": 2.0})
    assert both.output_tokens == 21.0
    assert both.tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"told": {"streamed": 0.0}},
        {"told": {"kind": "responses"}},
        {"output_tokens": 1},
    ],
)
def test_what_does_not_tell_when_tokens_came_tells_no_time_of_a_token(changes: dict[str, Any]) -> None:
    """Whole answers, streams that open before their first token, and answers of one token."""
    assert known(**changes).tpot_s == -1.0


def test_only_streams_that_open_with_their_first_token_tell_its_time() -> None:
    """Neither a whole answer nor the Responses API, nor an error."""
    assert known(told={"streamed": 0.0}).ttft_s == -1.0
    assert known(told={"kind": "responses"}).ttft_s == -1.0
    assert known(status=500).ttft_s == -1.0


def test_how_a_request_ended_stands_in_its_sample() -> None:
    """A failure is no answer; a cut or an abandoned one is, and has no length."""
    failed, cut, left = known(status=500, **CUT), known(flags=("UPE",), **CUT), known(flags=("DC",), **CUT)
    assert (failed.failed, failed.answered) == (True, False)
    assert (cut.broken, cut.answered, cut.output_tokens, cut.tpot_s) == (True, True, -1.0, -1.0)
    told = known(flags=("UPE",))  # usage in each chunk of a stream, as some engines send it
    assert (told.output_tokens, told.tpot_s) == (-1.0, -1.0)
    assert (left.abandoned, left.answered, left.ttft_s) == (True, True, 0.5)
    assert not known(flags=("DC",), status=0, ttft_s=-1.0, destination="", **CUT).answered


def test_a_conversation_that_had_begun_is_told_apart() -> None:
    """By what the decision said of it."""
    assert known(told={CONTINUED: 1.0}).continued


@pytest.mark.parametrize(
    "changes",
    [
        {"status": 400},
        {"told": {UNIT: -1.0}},
        {"told": {UNIT: 1.0}},
        {"told": {UNIT: "0.5"}},
        {"told": {EPOCH: 1.0}},
    ],
)
def test_what_says_nothing_of_a_version_is_no_sample(changes: dict[str, Any]) -> None:
    """Nobody's failure, and metadata that is not ours."""
    assert sample(**changes) is None


def test_an_endpoint_of_another_pool_is_no_sample() -> None:
    """Somebody answered who is not, or no more, of the version's pool."""
    assert sample_of(served(), "", "ok") is None
    assert sample_of(served(destination="", status=503, flags=("UF",)), "", "failed") is not None


def test_without_an_epoch_there_is_no_sample() -> None:
    """A request that was decided without a rollout, or whose client chose the version."""
    told = {key: value for key, value in METADATA.items() if key != EPOCH}
    assert sample_of(served(metadata=told), "b", "ok") is None


def test_a_length_that_was_counted_by_bytes_counts() -> None:
    """Where usage was not asked for; it tells no time of a token."""
    one = sample_of(served(**CUT), "b", "ok", counted=33.0)
    assert one is not None
    assert (one.output_tokens, one.tpot_s) == (33.0, -1.0)
