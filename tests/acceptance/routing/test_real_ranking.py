"""What a replay says of policies holds for the real stack: Envoy, sidecar, store and engines over HTTP.

Each workload is scaled down to four engines, so that two cores carry it: fewer prefixes and conversations, smaller
caches. Prompts are shorter and more of them than in the defaults, for with 260 requests chance alone moved the cached
share of `least_tokens` by 5 points from run to run.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import permutations

import msgspec
import pytest

from extproc.replay import bench, command
from extproc.replay.compare import Compared, compare
from extproc.replay.generate import generated
from extproc.replay.rows import Trace
from extproc.replay.summary import Replayed

POLICIES = ("round_robin", "least_tokens", "predicted_ttft")
APART = 1.15
"""Ratio of two mean TTFTs in a replay from which their order is held to be the policies' doing."""
TRIES = 3
CACHED = 0.06
"""How far the shares of cached tokens may lie apart. KV blocks have 64 tokens in a replay, and 16 in a real run."""


class Scaled(msgspec.Struct, frozen=True):
    """A workload for four engines.

    Attributes:
        settings: changes to the workload's defaults.
        kv_tokens: cache of an engine.
    """

    settings: Mapping[str, object]
    kv_tokens: int


WORKLOADS = {
    "shared_prefixes": Scaled(
        {
            "groups": 60,
            "rate": 24.0,
            "seconds": 20.0,
            "prefix_tokens": 1750,
            "question_tokens": (100, 250),
            "answer_tokens": (25, 75),
        },
        32_768,
    ),
    "multi_turn": Scaled(
        {
            "rate": 5.0,
            "seconds": 16.0,
            "turns": (4, 6),
            "think_s": (0.2, 1.0),
            "systems": 8,
            "system_tokens": 1200,
            "answer_tokens": (50, 150),
        },
        49_152,
    ),
}


def apart(replayed: Mapping[str, Replayed]) -> Iterator[tuple[str, str]]:
    """Pairs of policies of which the first was clearly the faster one."""
    for fast, slow in permutations(replayed, 2):
        if ttft(replayed[slow]) > APART * ttft(replayed[fast]):
            yield fast, slow


def ttft(result: Replayed | bench.Benched) -> float:
    """Mean TTFT in milliseconds."""
    assert result.ttft_ms.mean is not None
    return result.ttft_ms.mean


def side_by_side(trace: Trace, replayed: Mapping[str, Replayed], real: Mapping[str, bench.Benched]) -> str:
    """Both tables, for people."""
    title = f"{trace.name}, {trace.requests} requests, 4 engines"
    doubts = "".join(f"{line}\n" for line in bench.doubts(real))
    return f"{title}, replayed\n{command.table(replayed)}\n{title}, through the real stack\n{bench.table(real)}{doubts}"


async def benched(trace: Trace, wanted: Compared) -> Mapping[str, bench.Benched]:
    """The real runs. Those that the bench itself calls into doubt, for the machine had other work, are repeated."""
    results: dict[str, bench.Benched] = {}
    for _ in range(TRIES):
        left = [policy for policy in POLICIES if policy not in results or results[policy].late]
        results |= await bench.bench(trace, msgspec.structs.replace(wanted, policies=left))
    return results


@pytest.mark.parametrize("name", WORKLOADS)
async def test_the_real_stack_ranks_the_policies_as_the_replay_does(name: str, measured: list[str]) -> None:
    """Wherever a replay finds one policy's mean TTFT over 15 % lower, it is lower in reality; caches agree too."""
    scaled = WORKLOADS[name]
    trace = generated(name, 1, **scaled.settings)
    wanted = Compared(policies=POLICIES, engines=4, kv_tokens=scaled.kv_tokens)
    replayed = compare(trace, wanted)
    pairs = list(apart(replayed))
    assert ("predicted_ttft", "round_robin") in pairs

    real = await benched(trace, wanted)

    measured.append(side_by_side(trace, replayed, real))
    assert {policy: dict(result.failures) for policy, result in real.items()} == {policy: {} for policy in POLICIES}
    if doubts := bench.doubts(real):
        pytest.skip("; ".join(doubts))
    assert [pair for pair in pairs if ttft(real[pair[0]]) >= ttft(real[pair[1]])] == []
    shares = {policy: (replayed[policy].cached_share, real[policy].cached_share) for policy in POLICIES}
    assert {policy: pair for policy, pair in shares.items() if abs(pair[0] - pair[1]) > CACHED} == {}


def test_the_command_prints_what_came_of_every_policy() -> None:
    """`warmpath bench --json` prints one object and nothing else; the exit code says whether to believe it."""
    words = ["bench", "hot_prefix", "--policies", "round_robin,predicted_ttft", "--limit", "20", "--json"]
    argv = [sys.executable, "-m", "extproc", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    policies = json.loads(done.stdout)["policies"]
    assert list(policies) == ["round_robin", "predicted_ttft"]
    for policy in policies.values():
        assert (policy["requests"], policy["errors"]) == (20, 0)
        assert policy["ttft_ms"]["mean"] > 0
        assert policy["regret_ms"] is None
    late = [name for name, policy in policies.items() if policy["late"]]
    assert done.returncode == (1 if late else 0), done.stderr
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == late
