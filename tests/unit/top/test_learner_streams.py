"""Which streams tell when their first token came."""

import pytest

from extproc.envoy.contract import Served
from extproc.learner import tells_ttft
from extproc.request.model import RouteKind


@pytest.mark.parametrize("kind", list(RouteKind))
@pytest.mark.parametrize("streamed", [0.0, 1.0])
def test_the_first_byte_of_a_stream_is_its_first_token_but_for_responses(kind: RouteKind, streamed: float) -> None:
    """Streams of the Responses API open with events that engines send before the prefill."""
    served = Served("c1", "main", "10.0.0.1:80", 200, ttft_s=0.01, metadata={"kind": kind.value, "streamed": streamed})
    assert tells_ttft(served) == (streamed == 1.0 and kind is not RouteKind.RESPONSES)
