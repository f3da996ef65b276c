"""Bodies that a real router fits to the engine it picks, behind a real Envoy: engines get them whole, retries too."""

import io
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import ManualClock
from extproc.config import Config, EngineKind, Model, ModelAdapter
from extproc.config import Pool as PoolSettings
from extproc.envoy.contract import Call, Decision
from extproc.learner import usage_source
from extproc.router import Router, Surroundings
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from tests.wire.standins import Engine
from tests.wire.test_new_bodies import length_at_engine
from tests.wire.test_served_elsewhere import Unheard
from tests.wire.test_services import Desk, Stack, eventually, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SQL = ModelAdapter(name="sql", id=7, path="/adapters/sql")
BASE = Model(pool="main", served_as="org/base")


class Untold:
    """Tells nobody."""

    def publish(self, pool: str, delta: object) -> None:
        """See `router.Publisher`."""


class RoutedDesk(Desk):
    """A desk at which a real router decides, over the stack's engines and the models of the test."""

    def __init__(self) -> None:
        super().__init__()
        numbers = itertools.count()
        self.around = Surroundings(
            config=Config(models={"m": BASE}, pools={"main": PoolSettings(endpoints=["x:1"])}),
            fleet=Fleet({}, {}, "main"),
            knowledge={"main": PoolKnowledge(Priors())},
            store=MemoryStore(ManualClock()),
            replica="r1",
            new_charge_id=lambda: f"f{next(numbers)}",
        )
        self._router = Router(self.around, Untold(), Unheard(), ManualClock())

    def serve(
        self, stack: Stack, *kinds: str, model: Model = BASE, engine: EngineKind = "auto", usage: bool = False
    ) -> None:
        """Let the endpoints be of these kinds, and `m` be this model; the first is preferred, then the second."""
        pool = PoolSettings(endpoints=["x:1"], engine=engine, ask_usage=usage)
        models = {"base": BASE, "m": model}
        self.around.config = Config(models=models, pools={"main": pool})
        each = zip(stack.addresses, kinds, strict=False)
        members = tuple(Endpoint(f"e{at}", place, 1e6 / 1e6**at, kind=kind) for at, (place, kind) in enumerate(each))
        self.around.fleet = Fleet(
            {"main": Pool("main", "predicted_ttft", members)}, dict.fromkeys(models, "main"), "main"
        )

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        self.outcome = await self._router.decide(call)
        return await super().decide(call)

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""
        await self._router.settle(decision, served)
        await super().settle(decision, served)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "duplex"])
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """One stack in each body mode."""
    async with running_stack(request.param, RoutedDesk()) as running:
        yield running


def desk(stack: Stack) -> RoutedDesk:
    """The stack's desk."""
    assert isinstance(stack.desk, RoutedDesk)
    return stack.desk


async def send(stack: Stack, path: str, body: bytes, query: str = "") -> tuple[int, dict[str, Any]]:
    """Send a body with its length; status and JSON of the answer, or nothing of a stream."""
    async with stack.http.post(f"{stack.envoy.url}{path}{query}", data=io.BytesIO(body)) as answer:
        text = await answer.text()
        return answer.status, {} if "stream" in query else json.loads(text)


def check(stack: Stack, engine: Engine, body: bytes) -> None:
    """The engine got these bytes, under a length that is right."""
    assert engine.last_body == body
    assert engine.lengths[-1] == length_at_engine(stack, len(body))


@pytest.mark.parametrize("words", [3, 40_000])
@pytest.mark.parametrize("name", ["x", "a name that is far longer than the client's"])
async def test_an_alias_reaches_the_engine_and_nothing_else_changes(stack: Stack, words: int, name: str) -> None:
    """Shorter or longer, in a small body and in one of many pieces."""
    desk(stack).serve(stack, "vllm", model=Model(pool="main", served_as=name))
    messages = [{"role": "user", "content": 'my "model":"m" ü\n' * words}]
    body = b' {"messages" : ' + json.dumps(messages, ensure_ascii=False).encode() + b',\n "model" : "m" , "seed":1 }\n'
    assert (await send(stack, CHAT, body))[0] == 200
    check(stack, stack.engines[0], body.replace(b'"model" : "m" ,', b'"model" : ' + json.dumps(name).encode() + b" ,"))


async def test_tensorrt_gets_no_field_that_it_refuses(stack: Stack) -> None:
    """What only others know is gone, the adapter is a field, and the priority is on its own scale."""
    desk(stack).serve(stack, "tensorrt_llm", model=Model(pool="main", adapter=SQL))
    body = b'{"model":"m","request_id":"r","prompt":"hi","priority":10,"session_id":"s","max_tokens":3}'
    assert (await send(stack, COMPLETIONS, body))[0] == 200
    wanted = b'{"lora_request":{"lora_name":"sql","lora_int_id":7,"lora_path":"/adapters/sql"},"model":"org/base",'
    check(stack, stack.engines[0], wanted + b'"prompt":"hi","priority":0.25,"max_tokens":3}')


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_retry_sends_the_fitted_body_again_and_only_to_its_kind(stack: Stack, size: int) -> None:
    """The pick is full: the next endpoint of its kind gets the same bytes, the one of another kind gets nothing."""
    desk(stack).serve(stack, "sglang", "vllm", "sglang", model=Model(pool="main", adapter=SQL))
    first, other, second = stack.engines
    first.last_body = other.last_body = second.last_body = b""
    body = b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * size + b'"}],"priority":-3}'
    status, told = await send(stack, CHAT, body, f"?full={first.address}")
    assert (status, told["endpoint"]) == (200, second.address)
    wanted = body.replace(b'"m"', b'"org/base:sql"').replace(b"-3", b"3")
    for engine in (first, second):
        check(stack, engine, wanted)
    assert other.last_body == b""


async def test_a_salt_that_would_be_lost_is_a_clear_error(stack: Stack) -> None:
    """The client reads what it asked for and what to do; no engine reads anything, and nothing is charged."""
    desk(stack).serve(stack, "tensorrt_llm", model=BASE)
    stack.engines[0].last_body = b""
    decided = len(desk(stack).around.recent)
    body = b'{"model":"m","prompt":"hi","cache_salt":"tenant-1"}'
    async with stack.http.post(f"{stack.envoy.url}{COMPLETIONS}", data=io.BytesIO(body)) as answer:
        told = await answer.json()
        assert (answer.status, answer.headers["x-warmpath-reason"]) == (400, "engine_cannot")
    assert "cache_salt" in told["error"]["message"]
    assert "tenant-1" not in told["error"]["message"]
    assert stack.engines[0].last_body == b""
    assert len(desk(stack).around.recent) == decided


async def test_usage_is_asked_for_and_the_access_log_says_so(stack: Stack) -> None:
    """The engine is asked in the client's place, and its report comes back as one that was asked for."""
    desk(stack).serve(stack, "vllm", model=Model(pool="main"), engine="vllm", usage=True)
    stack.desk.seen.clear()
    body = b'{"model":"m","messages":[],"stream":true}'
    assert (await send(stack, CHAT, body, "?stream=0"))[0] == 200
    check(stack, stack.engines[0], b'{"stream_options":{"include_usage":true},' + body[1:])
    await eventually(lambda: bool(stack.desk.seen))
    served = stack.desk.seen[-1]
    assert (served.output_tokens, usage_source(served, -1.0)) == (5, "asked")


async def test_fitted_bodies_leave_nothing_unexpected(stack: Stack) -> None:
    """Nothing that a real Envoy said in this module was outside the phase table, and everything was settled."""
    await eventually(lambda: stack.processor.counts.open == 0)
    await stack.processor.settled()
    assert stack.processor.counts.unexpected == stack.processor.counts.unreadable == 0
    assert stack.processor.counts.failed_open == 0
    assert stack.processor.counts.settled == stack.processor.counts.decided
