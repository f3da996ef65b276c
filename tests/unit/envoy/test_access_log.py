"""Envoy's access-log entries become observations, and nothing malformed harms."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.data.accesslog.v3 import accesslog_pb2 as al
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from hypothesis import given
from hypothesis import strategies as st

from extproc.envoy.access_log import AccessLog, LogCounts, is_intermediate, served_from
from extproc.envoy.contract import Served
from extproc.envoy.replies import on_headers
from extproc.envoy.server import bind, make_server
from tests.unit.envoy.gateway import PICK, Notebook, connected, until_true

USAGE_BYTES = bytes.fromhex("080112016d1a02086422020805 2a02086932040a020840 420208694801")
"""What Envoy 1.40 published for prompt 100, output 5, cached 64, model "m"."""


def entry() -> Any:
    """A whole entry, as Envoy writes one for a streamed answer: headers at 15 ms, first body byte at 314 ms."""
    made = al.HTTPAccessLogEntry()
    common = made.common_properties
    common.time_to_last_rx_byte.nanos = 4_000_000
    common.time_to_first_upstream_rx_byte.nanos = 15_000_000
    common.duration.FromMilliseconds(1500)
    common.custom_tags["first_body_us"] = "314000"
    common.upstream_remote_address.socket_address.address = "10.0.0.1"
    common.upstream_remote_address.socket_address.port_value = 8000
    common.upstream_cluster = "cluster-of-envoy"
    common.upstream_request_attempt_count = 2
    common.response_flags.downstream_connection_termination = True
    common.response_flags.upstream_connection_failure = True
    reply = ext_proc.ProcessingResponse.FromString(on_headers(PICK))
    common.metadata.filter_metadata["warmpath"].CopyFrom(reply.dynamic_metadata.fields["warmpath"].struct_value)
    usage = common.metadata.typed_filter_metadata["envoy.ai.token_usage"]
    usage.type_url = "type.googleapis.com/envoy.data.ai.v3.TokenUsage"
    usage.value = USAGE_BYTES
    made.request.request_body_bytes = 700
    made.response.response_body_bytes = 900
    made.response.response_code.value = 200
    return made


def test_whole_entry() -> None:
    """Every field of an entry lands where it belongs, and the decision's metadata comes back as it was sent."""
    approximately: Any = pytest.approx(0.310)
    assert served_from(entry()) == Served(
        charge_id="c-1",
        pool="llama",
        destination="10.0.0.1:8000",
        status=200,
        attempts=2,
        flags=("UF", "DC"),
        ttft_s=approximately,
        duration_s=1.5,
        request_bytes=700,
        response_bytes=900,
        prompt_tokens=100,
        output_tokens=5,
        cached_tokens=64,
        metadata=PICK.metadata,
    )


def test_bare_entry() -> None:
    """A request that never reached an endpoint: what is unknown says so."""
    assert served_from(al.HTTPAccessLogEntry()) == Served(attempts=0)


@pytest.mark.parametrize("tag", ["", "-", None])
def test_ttft_without_the_tag_is_the_first_byte_of_the_headers(tag: str | None) -> None:
    """Without a body byte seen (`-`, or no tag) the endpoint's first byte stands in."""
    made = entry()
    del made.common_properties.custom_tags["first_body_us"]
    if tag is not None:
        made.common_properties.custom_tags["first_body_us"] = tag
    assert served_from(made).ttft_s == pytest.approx(0.011)


def test_ttft_is_never_negative() -> None:
    """An endpoint that answers before the request has come whole took no time, not less."""
    made = entry()
    made.common_properties.time_to_last_rx_byte.seconds = 3
    assert served_from(made).ttft_s == 0.0


def test_every_flag_has_a_short_name() -> None:
    """Each response flag of the official message is reported by Envoy's short name, in upper case."""
    made = al.HTTPAccessLogEntry()
    flags = made.common_properties.response_flags
    for field in flags.DESCRIPTOR.fields:
        if field.message_type is None:
            setattr(flags, field.name, True)
    flags.unauthorized_details.reason = 1
    names = served_from(made).flags
    assert len(names) == len(set(names)) == len(flags.DESCRIPTOR.fields)
    assert all(name.isupper() and name.isalpha() for name in names)


@pytest.mark.parametrize(("host", "expected"), [("::1", "[::1]:8000"), ("10.0.0.1", "10.0.0.1:8000")])
def test_address_forms(host: str, expected: str) -> None:
    """IPv6 addresses are written in brackets."""
    made = entry()
    made.common_properties.upstream_remote_address.socket_address.address = host
    assert served_from(made).destination == expected


def test_usage_without_cached_tokens_means_none_were_cached() -> None:
    """Usage that names no cached tokens reports 0, not unknown."""
    made = entry()
    made.common_properties.metadata.typed_filter_metadata["envoy.ai.token_usage"].value = bytes.fromhex("1a020864")
    served = served_from(made)
    assert (served.prompt_tokens, served.output_tokens, served.cached_tokens) == (100, -1, 0)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("type.googleapis.com/envoy.data.ai.v3.TokenUsage", b"\xff"),
        ("type.googleapis.com/something.Else", USAGE_BYTES),
        ("type.googleapis.com/envoy.data.ai.v3.TokenUsage", bytes.fromhex("4803")),
    ],
    ids=["broken", "another type", "extraction failed"],
)
def test_unreadable_usage_costs_only_the_usage(kind: str, value: bytes) -> None:
    """An entry whose usage cannot be read is used without it, and that is counted."""
    made = entry()
    usage = made.common_properties.metadata.typed_filter_metadata["envoy.ai.token_usage"]
    usage.type_url, usage.value = kind, value
    notebook = Notebook()
    log = AccessLog(notebook)
    log.take(batch(made))
    assert [(seen.prompt_tokens, seen.output_tokens, seen.cached_tokens) for seen in notebook.seen] == [(-1, -1, -1)]
    assert log.counts == LogCounts(entries=1, usage_unreadable=1)


def batch(*entries: Any) -> bytes:
    """A serialised batch."""
    message = als_pb2.StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    raw: bytes = message.SerializeToString()
    return raw


def test_intermediate_entries_are_left_out() -> None:
    """An entry of a request that still runs is recognised by its type or its mark, and not observed."""
    periodic, marked = entry(), entry()
    periodic.common_properties.access_log_type = al.DownstreamPeriodic
    marked.common_properties.intermediate_log_entry = True
    ended = entry()
    ended.common_properties.access_log_type = al.DownstreamEnd
    assert [is_intermediate(made) for made in (periodic, marked, ended)] == [True, True, False]
    notebook = Notebook()
    log = AccessLog(notebook)
    log.take(batch(periodic, marked, ended))
    assert len(notebook.seen) == 1
    assert log.counts == LogCounts(entries=1, intermediate=2)


@pytest.mark.parametrize(("attempts", "charge", "told"), [(0, "c-1", 0), (1, "c-1", 0), (2, "c-1", 1), (2, "", 0)])
def test_a_running_request_is_told_of_from_its_second_attempt_on(attempts: int, charge: str, told: int) -> None:
    """Then another endpoint may have it than the one that was charged; one without a charge concerns nobody."""
    periodic = entry()
    common = periodic.common_properties
    common.access_log_type = al.DownstreamPeriodic
    common.upstream_request_attempt_count = attempts
    common.metadata.filter_metadata["warmpath"].fields["charge_id"].string_value = charge
    notebook = Notebook()
    AccessLog(notebook).take(batch(periodic))
    assert not notebook.seen
    assert [seen.destination for seen in notebook.tried] == [served_from(periodic).destination] * told


def test_malformed_entry_spares_the_rest_of_its_batch() -> None:
    """A tag that is no number is counted; the entries beside it are observed."""
    broken = entry()
    broken.common_properties.custom_tags["first_body_us"] = "soon"
    notebook = Notebook()
    log = AccessLog(notebook)
    log.take(batch(entry(), broken, entry()))
    assert len(notebook.seen) == 2
    assert log.counts == LogCounts(entries=2, malformed=1)


@given(st.binary(max_size=200))
def test_no_bytes_raise(raw: bytes) -> None:
    """Any bytes in place of a batch are taken without an exception."""
    AccessLog(Notebook()).take(raw)


@given(st.binary(max_size=100), st.text(max_size=12))
def test_no_usage_or_tag_raises(value: bytes, tag: str) -> None:
    """Any bytes as usage and any text as tag leave the log standing, and the entry counted one way or the other."""
    made = entry()
    made.common_properties.metadata.typed_filter_metadata["envoy.ai.token_usage"].value = value
    made.common_properties.custom_tags["first_body_us"] = tag
    log = AccessLog(Notebook())
    log.take(batch(made))
    assert log.counts.entries + log.counts.malformed == 1


async def test_stream_survives_garbage_and_ends_on_close(tmp_path: Path) -> None:
    """Over real gRPC: a batch that cannot be read ends nothing; closing the service ends the stream cleanly."""
    notebook = Notebook()
    log = AccessLog(notebook)
    address = f"unix:{tmp_path / 'log.sock'}"
    server = make_server([log.handler()], max_body_bytes=1024)
    bind(server, address)
    await server.start()
    async with connected(address) as channel:
        call = channel.stream_unary("/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs")()
        await call.write(batch(entry()))
        await call.write(b"\xff\xff")
        await call.write(batch(entry(), entry()))
        await until_true(lambda: len(notebook.seen) == 3)
        log.close()
        assert await call == b""
        assert await call.code() is grpc.StatusCode.OK
    assert log.counts == LogCounts(entries=3, malformed=1)
    await server.stop(0)
