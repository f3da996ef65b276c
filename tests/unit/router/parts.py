"""A router with everything it touches at hand, real but for the network."""

import itertools
import json

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import ManualClock
from extproc.config import Config, Routing
from extproc.config import Model as ModelSettings
from extproc.config import Pool as PoolSettings
from extproc.deciding import Outcome
from extproc.envoy.contract import Call, Decision
from extproc.router import Router, Surroundings
from extproc.state.feed import Delta
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore

ROUTING = Routing()


class Notes:
    """Keeps what a router tells: deltas and outcomes."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.outcomes: list[Outcome] = []
        self.settled_pools: list[str] = []

    def publish(self, pool: str, delta: Delta) -> None:
        """See `router.Publisher`."""
        assert pool == "main"
        self.deltas.append(delta)

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""
        self.outcomes.append(outcome)

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""
        self.settled_pools.append(pool)


class Bench:
    """A router over endpoints a, b, c at 10,000 tokens a second, with everything it touches at hand."""

    def __init__(self, *members: Endpoint, policy: str = "predicted_ttft", routing: Routing = ROUTING) -> None:
        names = members or tuple(Endpoint(n, f"10.0.0.{i}:80", 10_000.0) for i, n in enumerate("abc"))
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.notes = Notes()
        numbers = itertools.count()
        self.around = Surroundings(
            config=Config(
                models={"m": ModelSettings(pool="main")},
                pools={"main": PoolSettings(endpoints=["x:1"])},
                routing=routing,
            ),
            fleet=Fleet({"main": Pool("main", policy, names)}, {"m": "main"}, "main"),
            knowledge={"main": PoolKnowledge(Priors())},
            store=self.store,
            replica="r1",
            new_charge_id=lambda: f"c{next(numbers)}",
        )
        self.router = Router(self.around, self.notes, self.notes, self.clock)

    def destination(self, endpoint: str) -> list[str]:
        """Where the endpoint is: one `ip:port`."""
        return [each.destination for each in self.around.fleet.pools["main"].endpoints if each.id == endpoint]

    async def chat(self, text: str, model: str = "m", **more: object) -> Decision:
        """Decide on a chat request; `session` among `more` becomes the header."""
        headers = {"x-session-id": str(more.pop("session"))} if "session" in more else {}
        subset = more.pop("subset", None)
        body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
        call = Call("POST", "/v1/chat/completions", headers, json.dumps(body).encode(), subset)  # type: ignore[arg-type]
        return await self.router.decide(call)


def endpoints(count: int) -> tuple[Endpoint, ...]:
    """So many equal endpoints, e0, e1 and so on."""
    return tuple(Endpoint(f"e{at}", f"10.0.0.{at}:80", 10_000.0) for at in range(count))


def text(tokens: int, seed: str = "w") -> str:
    """About `tokens` tokens of text that differs by seed from its beginning."""
    return "".join(f"{seed}{number:>7}" for number in range(tokens // 2))
