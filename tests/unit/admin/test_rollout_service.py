"""The operator API over gRPC, on a real server, as a client of the published proto calls it."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import Message

from extproc._pb.warmpath.v1 import rollouts_pb2 as pb
from extproc.admin import values
from extproc.admin.entry import Entry
from extproc.admin.rollout_service import SERVICE, handler, peer_of
from extproc.admin.rollouts import RolloutCalls
from extproc.errors import StoreError
from extproc.rollout.gates import Gate, Judgement
from extproc.rollout.state import Event, Plan, Rollout
from tests.unit.admin.stage import POOLS, Stage, stage

TOKEN = "0123456789abcdef"  # noqa: S105 -- of these tests
METHODS = {each.name: each for each in pb.DESCRIPTOR.services_by_name["Rollouts"].methods}


class Client:
    """A client of the service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __call__(self, method: str, request: Message | bytes, metadata: Sequence[tuple[str, str]] = ()) -> Any:
        """One call by the name of its method."""
        reply = getattr(pb, METHODS[method].output_type.name)
        call: Any = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            lambda asked: asked if isinstance(asked, bytes) else asked.SerializeToString(),
            reply.FromString,
        )
        return await call(request, metadata=tuple(metadata), timeout=10.0)


@contextlib.asynccontextmanager
async def serving(
    at: Stage,
    *,
    calls: RolloutCalls | None = None,
    token: Path | None = None,
    host: str = "127.0.0.1",
    address: str = "",
) -> AsyncIterator[Client]:
    """The service on a free port, or at an address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler(calls or at.calls, Entry(token, host)),))
    port = server.add_insecure_port(address or "127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address or f"127.0.0.1:{port}") as channel:
            yield Client(channel)
    finally:
        await server.stop(0)


async def refused(client: Client, method: str, request: Message | bytes, *metadata: tuple[str, str]) -> tuple[Any, str]:
    """Code and text of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client(method, request, metadata)
    return caught.value.code(), caught.value.details() or ""


async def test_a_rollout_from_start_to_abort() -> None:
    """Every method of the proto is served, with the values that HTTP has."""
    at = await stage()
    overrides = struct_pb2.Struct()
    overrides.update({"steps": [10, 100], "min_samples": 5, "gates": {"ttft": {"tolerance": 0.25}}})
    async with serving(at) as client:
        asked = pb.StartRequest(model="gpt", to="v2", overrides=overrides)
        told = await client("Start", asked, [("x-warmpath-operator", "ann")])
        assert (told.rollout.id, told.rollout.share, told.rollout.plan.min_samples) == ("r1", 0.1, 5)
        assert dict(told.rollout.base) == {"v1": 1.0, "v2": 0.0}
        assert told.rollout.plan.gates["ttft"]["tolerance"] == 0.25
        told = await client("Pause", pb.ChangeRequest(model="chat", text="look"))
        assert (told.rollout.phase, told.event.text) == ("paused", "look")
        await client("Resume", pb.ChangeRequest(model="chat"))
        await client("PostVerdict", pb.VerdictRequest(model="chat", verdict="pass", step=0))
        [status] = (await client("Status", pb.StatusRequest())).statuses
        assert [(each.name, each.share) for each in status.versions] == [("v1", 0.9), ("v2", 0.1)]
        assert (status.rollout.verdict, status.governs, status.HasField("judgement")) == ("pass", True, False)
        code, text = await refused(client, "Promote", pb.PromoteRequest(model="chat", step=1))
        assert (code, "is at step 1" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        promoted = await client("Promote", pb.PromoteRequest(model="chat", full=True, step=0, phase="running"))
        assert promoted.rollout.share == 1.0
        code, text = await refused(client, "Forget", pb.ForgetRequest(model="chat", force=True))
        assert (code, "abort it first" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        assert (await client("Abort", pb.ChangeRequest(model="chat", rollout="r1"))).rollout.phase == "aborted"
        assert (await client("Forget", pb.ForgetRequest(model="chat", text="tidy"))).rollout.phase == "forgotten"
        lines = (await client("History", pb.HistoryRequest(model="chat"))).events
        assert [(line.event.what, line.event.by) for line in lines][-1] == ("started", "ann")
        [line] = (await client("History", pb.HistoryRequest(model="chat", limit=1, before=lines[0].id))).events
        assert line == lines[1]


async def test_a_dry_run_changes_nothing() -> None:
    """As over HTTP."""
    at = await stage()
    async with serving(at) as client:
        told = await client("Start", pb.StartRequest(model="chat", to="v2", dry_run=True))
    assert told.dry_run
    assert told.preview[0].startswith("version `v2` of model `chat` gets 1 % of new conversations now, for 600 s")
    assert (await at.kept()).found == {}


@pytest.mark.parametrize(
    ("method", "request_", "code", "text"),
    [
        ("Start", pb.StartRequest(model="nobody", to="v2"), "NOT_FOUND", "no model `nobody`"),
        ("Start", pb.StartRequest(model="chat"), "INVALID_ARGUMENT", "missing required field `to`"),
        ("Start", pb.StartRequest(model="chat", to="v9"), "NOT_FOUND", "no version `v9`"),
        ("Pause", pb.ChangeRequest(model="chat"), "NOT_FOUND", "has no rollout"),
        ("Pause", pb.ChangeRequest(model="chat", text="x" * 1001), "INVALID_ARGUMENT", "length <= 1000"),
        ("PostVerdict", pb.VerdictRequest(model="chat", verdict="maybe"), "INVALID_ARGUMENT", "enum value"),
        ("PostVerdict", pb.VerdictRequest(model="chat", verdict="pass", step=-1), "INVALID_ARGUMENT", ">= 0"),
        ("History", pb.HistoryRequest(model="chat", limit=-1), "INVALID_ARGUMENT", "limit"),
        ("History", pb.HistoryRequest(model="chat", before="x"), "INVALID_ARGUMENT", "before"),
        # Field 15, which no message has.
        ("Abort", pb.ChangeRequest(model="chat").SerializeToString() + b"\x78\x01", "INVALID_ARGUMENT", "not know"),
    ],
)
async def test_each_refusal_has_its_code_and_a_text(method: str, request_: Any, code: str, text: str) -> None:
    """The codes that the proto tells."""
    async with serving(await stage()) as client:
        found, told = await refused(client, method, request_)
    assert (found, text in told) == (grpc.StatusCode[code], True), told


@pytest.mark.parametrize(
    "overrides", [{"hold": 1}, {"hold_s": float("nan")}, {"hold_s": float("inf")}, {"min_samples": 0.5}]
)
async def test_overrides_are_checked_as_over_http(overrides: dict[str, float]) -> None:
    """Also numbers that JSON could not write."""
    asked = pb.StartRequest(model="chat", to="v2")
    for name, value in overrides.items():
        asked.overrides.fields[name].number_value = value
    async with serving(await stage()) as client:
        code, _ = await refused(client, "Start", asked)
    assert code == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_conflict_is_a_failed_precondition_and_the_store_away_unavailable() -> None:
    """The one is the caller's to settle, the other passes."""

    class Away:
        async def documents(self, _group: str) -> None:
            raise StoreError("away")

    at = await stage()
    async with serving(at) as client:
        await client("Start", pb.StartRequest(model="chat", to="v2"))
        code, _ = await refused(client, "Start", pb.StartRequest(model="chat", to="v2"))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
    calls = RolloutCalls(Away(), lambda: at.config, lambda: POOLS, dict, str)  # type: ignore[arg-type]
    async with serving(at, calls=calls) as client:
        assert (await refused(client, "Status", pb.StatusRequest()))[0] == grpc.StatusCode.UNAVAILABLE


async def test_with_a_token_every_method_wants_it(tmp_path: Path) -> None:
    """In the metadata; one that is sent twice is none."""
    (tmp_path / "token").write_text(TOKEN)
    right = ("authorization", f"Bearer {TOKEN}")
    async with serving(await stage(), token=tmp_path / "token", host="0.0.0.0") as client:
        for name, method in METHODS.items():
            request = getattr(pb, method.input_type.name)(model="chat")
            for metadata in ((), (("authorization", "Bearer x"),), (right, right)):
                code, told = await refused(client, name, request, *metadata)
                assert code == grpc.StatusCode.UNAUTHENTICATED
                assert TOKEN not in told
        assert (await client("Status", pb.StatusRequest(), [right])).statuses


async def test_garbage_is_a_bad_question_of_whoever_may_ask(tmp_path: Path) -> None:
    """Who may not is told that alone: nothing of a request is read before."""
    (tmp_path / "token").write_text(TOKEN)
    right = ("authorization", f"Bearer {TOKEN}")
    async with serving(await stage(), token=tmp_path / "token") as client:
        for name in METHODS:
            assert (await refused(client, name, b"\xff" * 20))[0] == grpc.StatusCode.UNAUTHENTICATED
            code, told = await refused(client, name, b"\xff" * 20, right)
            assert (code, told) == (grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this method")


async def test_without_a_token_a_port_for_others_takes_no_calls() -> None:
    """Envoy on another host reaches the keeper there, and so does anybody who can reach that host."""
    async with serving(await stage(), host="0.0.0.0") as client:
        for name, method in METHODS.items():
            code, told = await refused(client, name, getattr(pb, method.input_type.name)(model="chat"))
            assert (code, "admin_token" in told) == (grpc.StatusCode.PERMISSION_DENIED, True)


async def test_a_unix_socket_says_itself_who_may_connect(tmp_path: Path) -> None:
    """Its file has owner, group and mode."""
    async with serving(await stage(), host="", address=f"unix:{tmp_path}/keeper.sock") as client:
        assert (await client("Status", pb.StatusRequest())).statuses


@pytest.mark.parametrize(
    ("told", "peer"),
    [
        ("ipv4:127.0.0.1:5123", "127.0.0.1"),
        ("ipv6:[::1]:5123", "::1"),
        ("ipv6:%5B::1%5D:5123", "::1"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:1", "::ffff:10.0.0.7"),
        ("unix:", ""),
        ("unix:/run/keeper.sock", ""),
        ("", "-"),
        ("ipv4:", "-"),
        ("ipv4:1", "-"),
        ("vsock:2:1", "-"),
    ],
)
def test_the_address_of_a_caller(told: str, peer: str) -> None:
    """As grpc writes it; what cannot be read is nobody of this host."""
    assert peer_of(told) == peer


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (pb.StartReply, values.Started),
        (pb.StatusReply, values.Statuses),
        (pb.RolloutStatus, values.Status),
        (pb.VersionNow, values.VersionNow),
        (pb.ChangeReply, values.Changed),
        (pb.HistoryReply, values.History),
        (pb.RolloutLine, values.Line),
        (pb.Rollout, Rollout),
        (pb.RolloutPlan, Plan),
        (pb.RolloutEvent, Event),
        (pb.RolloutJudgement, Judgement),
        (pb.RolloutGate, Gate),
    ],
)
def test_every_field_of_a_reply_is_one_of_the_values(message: type[Message], kind: type[msgspec.Struct]) -> None:
    """None is left empty for good because its name is another one."""
    assert {field.name for field in message.DESCRIPTOR.fields} <= set(kind.__struct_fields__)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (pb.StartRequest, values.Start),
        (pb.ChangeRequest, values.Change),
        (pb.PromoteRequest, values.Promote),
        (pb.VerdictRequest, values.Verdict),
    ],
)
def test_every_field_of_a_request_can_be_sent(message: type[Message], kind: type[msgspec.Struct]) -> None:
    """What HTTP takes, gRPC takes."""
    assert {field.name for field in message.DESCRIPTOR.fields} == {"model", *kind.__struct_fields__}
