"""Entries of running requests with limits, and the stage whose limit ended a request."""

from typing import Any

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2 as al
from envoy.service.accesslog.v3 import als_pb2
from hypothesis import given
from hypothesis import strategies as st

from extproc.envoy.access_log import AccessLog, served_from
from extproc.envoy.contract import Running, Served
from extproc.envoy.running import running_from
from tests.unit.envoy.gateway import Notebook


class Watchman:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.seen: list[Running] = []
        self.ended: list[Served] = []

    def running(self, running: Running) -> None:
        """See `Watcher.running`."""
        self.seen.append(running)

    def over(self, served: Served) -> None:
        """See `Watcher.over`."""
        self.ended.append(served)


def entry(kind: Any = al.DownstreamPeriodic, **limits: float) -> Any:
    """An entry as Envoy writes it 3.5 s after a request came, and 3 s after the endpoint got it."""
    made = al.HTTPAccessLogEntry()
    common = made.common_properties
    common.access_log_type = kind
    common.start_time.FromMilliseconds(1_796_039_494_855)
    common.custom_tags["emitted_s"] = "1796039498.355"
    common.custom_tags["sent_us"] = "500000"
    common.upstream_request_attempt_count = 1
    common.metadata.filter_metadata["warmpath"].update({"charge_id": "c-1", "pool": "llama", "kind": "chat", **limits})
    made.response.response_body_bytes = 521
    return made


def take(watcher: Watchman | None, *entries: Any) -> AccessLog:
    """An access log that was given one batch."""
    log = AccessLog(Notebook(), watcher)
    message = als_pb2.StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    log.take(message.SerializeToString())
    return log


def test_a_running_request_is_read() -> None:
    """Its limits, its bytes, and since when the endpoint of this try has it."""
    approximately: Any = pytest.approx(3.0, abs=1e-3)
    assert running_from(entry(first_token_s=5.0, stall_s=2.0)) == Running(
        charge_id="c-1",
        pool="llama",
        kind="chat",
        attempt=1,
        sent_bytes=521,
        at=1796039498.355,
        age_s=approximately,
        first_token_s=5.0,
        stall_s=2.0,
    )


@pytest.mark.parametrize("tag", [None, "-", ""])
def test_a_request_that_no_endpoint_has_has_no_age(tag: str | None) -> None:
    """Envoy writes no time, or a dash, while it connects."""
    made = entry(first_token_s=5.0)
    del made.common_properties.custom_tags["sent_us"]
    if tag is not None:
        made.common_properties.custom_tags["sent_us"] = tag
    found = running_from(made)
    assert found is not None
    assert found.age_s == -1.0


def test_a_request_without_limits_is_not_watched() -> None:
    """Neither one without a limit, nor one that we did not decide."""
    assert running_from(entry()) is None
    assert running_from(entry(first_token_s=0.0)) is None
    assert running_from(al.HTTPAccessLogEntry()) is None


@pytest.mark.parametrize("text", ["x", "1.2.3", "-5", "٣", "1e3"])
def test_a_tag_that_is_no_number_is_an_error_that_names_it(text: str) -> None:
    """It is counted as malformed, and ends nothing."""
    made = entry(first_token_s=5.0)
    made.common_properties.custom_tags["sent_us"] = text
    with pytest.raises(ValueError, match="sent_us"):
        running_from(made)
    watcher = Watchman()
    assert take(watcher, made, entry(stall_s=1.0)).counts.malformed == 1
    assert len(watcher.seen) == 1


@given(st.binary(max_size=300))
def test_whatever_comes_as_an_entry_ends_nothing(junk: bytes) -> None:
    """Bytes that parse as an entry are watched, passed over or counted; no other error leaves."""
    made = al.HTTPAccessLogEntry()
    try:
        made.MergeFromString(junk)
    except Exception:  # noqa: BLE001  # what is no message never comes so far
        return
    take(Watchman(), made)


def test_entries_go_where_they_belong() -> None:
    """A running request to the watcher; one that is over to both; one at a second try to the observer as well."""
    watcher = Watchman()
    again, over = entry(stall_s=2.0), entry(al.DownstreamEnd, stall_s=2.0)
    again.common_properties.upstream_request_attempt_count = 2
    log = take(watcher, entry(stall_s=2.0), again, entry(), over)
    assert [each.attempt for each in watcher.seen] == [1, 2]
    assert [each.charge_id for each in watcher.ended] == ["c-1"]
    notebook: Any = log._observer
    assert (len(notebook.tried), len(notebook.seen)) == (1, 1)
    assert (log.counts.intermediate, log.counts.entries) == (3, 1)


@pytest.mark.parametrize(
    ("details", "stage"),
    [
        ("via_upstream", ""),
        ("upstream_per_try_timeout", "headers"),
        ("warmpath_time_limit_first_token", "first_token"),
        ("warmpath_time_limit_stall", "stall"),
        ("warmpath_time_limit", "request"),
        ("response_timeout", "request"),
        ("max_duration_timeout", "request"),
        ("stream_idle_timeout", "idle"),
    ],
)
def test_details_tell_the_stage(details: str, stage: str) -> None:
    """Each limit that ended a request has its own name, whoever enforced it."""
    made = entry(al.DownstreamEnd)
    made.response.response_code_details = details
    assert served_from(made).stage == stage
