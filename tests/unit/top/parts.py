"""What tests of the top-level modules share: small configurations, a worker's surroundings, commands as processes."""

import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from extproc.choose.explain import CandidateCost, Explanation
from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import ManualClock
from extproc.config import Config
from extproc.processes import Child
from extproc.router import Surroundings
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from tests.ports import free_ports


def document(**sections: Any) -> dict[str, Any]:
    """A small `warmpath.yaml`: model `m` in pool `main` with one endpoint; sections replace those of their names."""
    base = {"models": {"m": {"pool": "main"}}, "pools": {"main": {"endpoints": ["10.0.0.1:80"]}}}
    return {**base, **sections}


def config(**sections: Any) -> Config:
    """The same as a value."""
    return msgspec.convert(document(**sections), Config)


def free_sidecar(workers: int = 1, **more: Any) -> dict[str, Any]:
    """A `gateway` section whose sidecar listens on free TCP ports."""
    first, *_, keeper, admin = free_ports(workers + 2)
    sidecar = {"workers": workers, "worker_port": first, "keeper_port": keeper, "drain_s": 1}
    return {"sidecar": {**sidecar, "admin": f"127.0.0.1:{admin}", **more}}


def explanation(**fields: Any) -> Explanation:
    """An explanation of a small pool: `b` is picked for 25 ms before `a`, `c` sleeps; fields replace those given."""
    base: dict[str, Any] = {
        "at": 1_800_000_000.0,
        "charge_id": "",
        "request_id": "",
        "replica": "r1",
        "pool": "main",
        "policy": "predicted_ttft",
        "kind": "chat",
        "flaw": "",
        "prompt_tokens": 1234.5,
        "answers": 1,
        "output_tokens": 4.0,
        "pin": "none",
        "pinned_to": "",
        "pick": "b",
        "why": "cheapest",
        "tie_ms": 3.0,
        "break_out_ms": 1000.0,
        "candidates": [
            CandidateCost("a", "", 0.0, 1234.5, {"prefill": 246.9, "backlog": 10.0}, 256.9, 133.0),
            CandidateCost("b", "", 1111.0, 123.5, {"prefill": 24.7, "backlog": 0.3}, 25.0, 12.5, "precise"),
            CandidateCost("c", "asleep", 0.0, 1234.5, {}, None, None),
        ],
    }
    return Explanation(**{**base, **fields})


def surroundings(*endpoints: Endpoint, pool: str = "main", settings: Config | None = None) -> Surroundings:
    """Surroundings of one worker over the memory store, with these endpoints in one pool."""
    numbers = itertools.count()
    return Surroundings(
        config=settings or config(),
        fleet=Fleet({pool: Pool(pool, "predicted_ttft", endpoints)}, {"m": pool}, pool),
        knowledge={pool: PoolKnowledge(Priors())},
        store=MemoryStore(ManualClock()),
        replica="r1",
        new_charge_id=lambda: f"c{next(numbers)}",
    )


class Running:
    """One command as a child process, with what it printed."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        command = [sys.executable, "-m", "extproc", *arguments]
        self.child = Child(arguments[0], command, lambda _, line: self.lines.append(line))

    @property
    def text(self) -> str:
        """All it printed."""
        return "\n".join(self.lines)

    def said(self, message: str) -> list[dict[str, Any]]:
        """Its log lines with this message."""
        logged = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [line for line in logged if line["message"] == message]


@contextlib.asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[Running]:
    """Run `warmpath` with these arguments; stopped at the end."""
    running = Running(*arguments)
    await running.child.start()
    try:
        yield running
    finally:
        await running.child.stop()


def write(path: Path, content: Mapping[str, Any]) -> Path:
    """Write a configuration in one step."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
    new.replace(path)
    return path
