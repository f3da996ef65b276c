"""Changes of `warmpath.yaml` while it is in use."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from extproc import reload
from extproc.config import Config
from extproc.config_file import parse
from extproc.config_rules import first_contradiction
from extproc.errors import ConfigError
from tests.unit.top.parts import document, write
from tests.waiting import until

TWO_POOLS = {"main": {"endpoints": ["10.0.0.1:80"]}, "big": {"endpoints": ["10.0.0.2:80"]}}


class Bench:
    """A watcher over a file, and what it applied."""

    def __init__(self, folder: Path, content: dict[str, Any] | None = None, *settings: str) -> None:
        self.path = write(folder / "warmpath.yaml", content or document())
        self.applied: list[Config] = []
        self.first = reload.read(self.path, settings)
        self.watcher = reload.Watcher(self.path, settings, self.first, self.apply)

    async def apply(self, config: Config) -> None:
        """Take a change."""
        self.applied.append(config)

    async def change(self, **sections: Any) -> Config | None:
        """Write another file; returns what was applied of it."""
        before = len(self.applied)
        write(self.path, document(**sections))
        await self.watcher.look()
        assert len(self.applied) <= before + 1
        return self.applied[-1] if len(self.applied) > before else None


async def test_a_file_that_stays_the_same_is_not_applied(tmp_path: Path) -> None:
    """Neither the first look nor a comment is a change."""
    bench = Bench(tmp_path)
    await bench.watcher.look()
    bench.path.write_text(bench.path.read_text() + "\n# a comment\n")
    await bench.watcher.look()
    assert bench.applied == []


async def test_a_change_before_the_first_look_is_seen(tmp_path: Path) -> None:
    """A process reads its file, then starts for seconds: what changes meanwhile is not lost."""
    path = write(tmp_path / "warmpath.yaml", document())
    config = reload.read(path, [])
    write(path, document(routing={"tie_ms": 7}))
    applied: list[Config] = []

    async def apply(changed: Config) -> None:
        applied.append(changed)

    await reload.Watcher(path, [], config, apply).look()
    assert [changed.routing.tie_ms for changed in applied] == [7]


async def test_endpoints_models_and_weights_are_taken(tmp_path: Path) -> None:
    """What decisions are made of changes while running, again and again."""
    bench = Bench(tmp_path, document(pools=TWO_POOLS))
    more = {"main": {"endpoints": ["10.0.0.3:80", "10.0.0.4:80"]}, "big": TWO_POOLS["big"]}
    changed = await bench.change(pools=more, models={"n": {"pool": "big"}}, routing={"tie_ms": 9})
    assert changed is not None
    assert changed.pools["main"].endpoints == ["10.0.0.3:80", "10.0.0.4:80"]
    assert {name: model.pool for name, model in changed.models.items()} == {"n": "big"}
    assert changed.routing.tie_ms == 9
    assert await bench.change(pools=TWO_POOLS) == bench.first


async def test_overrides_lie_over_the_changed_file_too(tmp_path: Path) -> None:
    """What the command line said stays said."""
    bench = Bench(tmp_path, None, "routing.tie_ms=5")
    changed = await bench.change(routing={"tie_ms": 9, "running_ms": 3})
    assert changed is not None
    assert (changed.routing.tie_ms, changed.routing.running_ms) == (5, 3)


@pytest.mark.parametrize("broken", ["models: {", "pools: {}\n", "", "models: {m: {pool: nowhere}}\npools: {main: 1}"])
async def test_a_bad_change_is_refused_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str) -> None:
    """The old configuration stays, the log says why once, and the next good change is taken."""
    bench = Bench(tmp_path)
    bench.path.write_text(broken)
    await bench.watcher.look()
    await bench.watcher.look()
    assert bench.applied == []
    (record,) = [each for each in caplog.records if each.message.startswith("the changed configuration is refused")]
    assert str(bench.path) in record.error  # type: ignore[attr-defined]
    assert await bench.change(routing={"tie_ms": 9})


async def test_a_file_that_vanishes_and_returns_changes_nothing(tmp_path: Path) -> None:
    """Editors and mounts take files away for a moment."""
    bench = Bench(tmp_path)
    content = bench.path.read_bytes()
    bench.path.unlink()
    await bench.watcher.look()
    bench.path.write_bytes(content)
    await bench.watcher.look()
    assert bench.applied == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"redis": {"timeout_ms": 7}}, "redis"),
        ({"timeouts": {"request_s": 7}}, "timeouts"),
        ({"retries": {"max": 1}}, "retries"),
        ({"breakers": {"max_requests": 7}}, "breakers.max_requests"),
        ({"breakers": {"max_pending": 7}}, "breakers.max_pending"),
        ({"overload": {"client_priority": True}}, "overload.client_priority"),
        ({"gateway": {"max_body_bytes": 4096}}, "gateway"),
        ({"routing": {"block_tokens": 128}}, "routing.block_tokens"),
        ({"telemetry": {"access_log_flush_ms": 50}}, "telemetry.access_log_flush_ms"),
        ({"pools": {"main": {"endpoints": ["10.0.0.1:80"], "kv_tokens": 5}}}, "pools.main.kv_tokens"),
        ({"pools": TWO_POOLS}, "the set of pools"),
    ],
)
async def test_what_needs_a_restart_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sections: dict[str, Any], said: str
) -> None:
    """Nobody is left to believe that such a change is in use."""
    await Bench(tmp_path).change(**sections)
    (record,) = [each for each in caplog.records if "next restart" in each.message]
    assert record.sections == [said]  # type: ignore[attr-defined]


async def test_the_rest_of_a_change_is_taken_all_the_same(tmp_path: Path) -> None:
    """Endpoints are taken although a fixed section changed with them; the fixed one stays as it was."""
    bench = Bench(tmp_path)
    changed = await bench.change(pools={"main": {"endpoints": ["10.0.0.9:80"]}}, redis={"timeout_ms": 7})
    assert changed is not None
    assert changed.pools["main"].endpoints == ["10.0.0.9:80"]
    assert changed.redis == bench.first.redis


async def test_breakers_stay_as_the_file_has_them_when_something_else_is_fixed(tmp_path: Path) -> None:
    """A change that waits for a restart does not put other sections back to their defaults."""
    bench = Bench(tmp_path, document(breakers={"strikes": 9}))
    changed = await bench.change(breakers={"strikes": 8, "max_requests": 7}, redis={"timeout_ms": 7})
    assert changed is not None
    assert (changed.breakers.strikes, changed.breakers.max_requests) == (8, 0)


async def test_a_model_that_moves_to_a_new_pool_is_served_where_it_was(tmp_path: Path) -> None:
    """The new pool waits for a restart: until then the model must not become unknown."""
    bench = Bench(tmp_path)
    assert await bench.change(models={"m": {"pool": "big"}, "n": {"pool": "big"}}, pools=TWO_POOLS) is None
    changed = await bench.change(
        models={"m": {"pool": "big"}, "n": {"pool": "big"}}, pools=TWO_POOLS, routing={"tie_ms": 9}
    )
    assert changed is not None
    assert {name: model.pool for name, model in changed.models.items()} == {"m": "main"}
    assert set(changed.pools) == {"main"}


def versions(**weights: float) -> dict[str, Any]:
    """Model `m` with a version in each pool."""
    return {"m": {"versions": {pool: {"pool": pool, "weight": weight} for pool, weight in weights.items()}}}


async def test_versions_get_other_weights_while_they_run(tmp_path: Path) -> None:
    """Also when another part of the change has to wait; so do the rules of rollouts."""
    bench = Bench(tmp_path, document(models=versions(main=1.0, big=0.0), pools=TWO_POOLS))
    fixed = {"redis": {"timeout_ms": 7}, "rollouts": {"hold_s": 5, "testers": ["t"]}}
    changed = await bench.change(models=versions(main=0.5, big=0.5), pools=TWO_POOLS, **fixed)
    assert changed is not None
    assert [each.weight for each in changed.models["m"].by_version.values()] == [0.5, 0.5]
    assert (changed.rollouts.hold_s, changed.rollouts.testers) == (5, ["t"])
    assert changed.redis.timeout_ms == bench.first.redis.timeout_ms


async def test_a_version_in_a_new_pool_waits_and_its_model_stays_as_it_was(tmp_path: Path) -> None:
    """Until Envoy knows the pool no version of it may be chosen: the other versions keep what they had."""
    before = {**versions(main=1.0, big=1.0), "n": {"pool": "main"}}
    bench = Bench(tmp_path, document(models=before, pools=TWO_POOLS))
    more = {**TWO_POOLS, "new": {"endpoints": ["10.0.0.3:80"]}}
    after = {**versions(main=1.0, big=1.0, new=1.0), "n": {"pool": "big"}}
    changed = await bench.change(models=after, pools=more)
    assert changed is not None
    assert list(changed.models["m"].by_version) == ["main", "big"]
    assert changed.models["n"].pool == "big"


def shadowed(shadow: dict[str, Any] | None, **weights: float) -> dict[str, Any]:
    """Sections of model `m` with a version in each pool, of which `big` may be the shadow."""
    model = versions(**(weights or {"main": 1.0, "big": 0.0}))["m"]
    return {"models": {"m": {**model, **({"shadow": shadow} if shadow else {})}}, "pools": TWO_POOLS}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {"version": "big"}),
        (None, {"version": "big", "mode": "compare"}),
        ({"version": "big"}, {"version": "big", "mode": "compare"}),
        ({"version": "big", "mode": "compare"}, {"version": "big"}),
        ({"version": "big"}, {"version": "big", "max_concurrent": 99}),
    ],
)
async def test_a_shadow_that_envoy_was_not_rendered_with_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: dict[str, Any] | None, after: dict[str, Any]
) -> None:
    """It is said, what was there goes on, and the rest of the model's change is taken."""
    bench = Bench(tmp_path, document(**shadowed(before)))
    changed = await bench.change(**shadowed(after, main=0.5, big=0.0))
    (record,) = [each for each in caplog.records if "next restart" in each.message]
    assert record.sections == ["models.m.shadow"]  # type: ignore[attr-defined]
    assert changed is not None
    assert changed.models["m"].versions["main"].weight == 0.5
    assert changed.models["m"].shadow == bench.first.models["m"].shadow


async def test_the_rest_of_a_shadow_changes_while_it_runs(tmp_path: Path) -> None:
    """Its share and what is kept; and it ends at once when it is taken out."""
    bench = Bench(tmp_path, document(**shadowed({"version": "big", "mode": "compare"})))
    changed = await bench.change(**shadowed({"version": "big", "mode": "compare", "share": 0.5, "keep": "all"}))
    assert changed is not None
    shadow = changed.models["m"].shadow
    assert shadow is not None
    assert (shadow.share, shadow.keep) == (0.5, "all")
    changed = await bench.change(**shadowed(None))
    assert changed is not None
    assert changed.models["m"].shadow is None


async def test_a_shadow_whose_version_is_gone_is_not_kept(tmp_path: Path) -> None:
    """What waits for a restart never leaves a model with a shadow that it has no version for."""
    bench = Bench(tmp_path, document(**shadowed({"version": "big"})))
    after = {"versions": {"main": {"pool": "main", "weight": 1.0}, "other": {"pool": "big", "weight": 0.0}}}
    changed = await bench.change(
        models={"m": {**after, "shadow": {"version": "other", "mode": "compare"}}}, pools=TWO_POOLS
    )
    assert changed is not None
    assert changed.models["m"].shadow is None


async def test_a_removed_pool_stays_until_the_restart(tmp_path: Path) -> None:
    """Envoy still has its cluster; only its models are gone."""
    bench = Bench(tmp_path, document(models={"m": {"pool": "main"}, "n": {"pool": "big"}}, pools=TWO_POOLS))
    changed = await bench.change()
    assert changed is not None
    assert set(changed.pools) == {"main", "big"}
    assert set(changed.models) == {"m"}


@given(
    files=st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["p1", "p2", "p3"]), min_size=1, max_size=4),
        min_size=2,
        max_size=4,
    )
)
def test_whatever_changes_what_is_applied_is_a_whole_configuration(files: list[dict[str, str]]) -> None:
    """After any row of changes of models and pools: the pools of the start, and every model in one of them."""

    async def check() -> None:
        documents = [
            {
                "models": {name: {"pool": pool} for name, pool in models.items()},
                "pools": {pool: {"endpoints": [f"10.0.0.{number}:80"]} for pool in sorted(set(models.values()))},
            }
            for number, models in enumerate(files, 1)
        ]
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), documents[0])
            for content in documents[1:]:
                await bench.change(**content)
            for applied in bench.applied:
                assert first_contradiction(applied) is None
                assert set(applied.pools) == set(bench.first.pools)
                assert applied.models

    asyncio.run(check())


async def test_run_looks_by_itself(tmp_path: Path) -> None:
    """A watcher that runs takes a change without being asked, and one after a refused one."""
    bench = Bench(tmp_path)
    running = asyncio.create_task(bench.watcher.run())
    bench.path.write_text("models: {")
    await asyncio.sleep(0.6)
    write(bench.path, document(routing={"tie_ms": 9}))
    await until(lambda: bool(bench.applied))
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_reading_names_the_setting_that_is_wrong(tmp_path: Path) -> None:
    """Errors of the command line are told apart from those of the file."""
    path = write(tmp_path / "warmpath.yaml", document())
    with pytest.raises(ConfigError, match=r"^--set redis\.timeout_ms: "):
        reload.read(path, ["redis.timeout_ms=x"])


def test_a_process_that_starts_while_the_file_is_bad_uses_what_was_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy stands in for a broken file and says why; without a copy the mistake is final."""
    path = write(tmp_path / "warmpath.yaml", document(routing={"tie_ms": 7}))
    in_use = reload.read_or(path, ["routing.running_ms=5"], None)
    copy = tmp_path / "last-good.yaml"
    reload.keep(in_use, copy)
    assert copy.stat().st_mode & 0o777 == 0o600
    path.write_text("models: {m: {pool: nope}}\npools: {}\n")
    assert reload.read_or(path, ["routing.running_ms=5"], copy) == in_use
    assert "the configuration is refused" in caplog.text
    with pytest.raises(ConfigError):
        reload.read_or(path, [], None)
    with pytest.raises(ConfigError):
        reload.read_or(path, [], tmp_path / "missing.yaml")


async def test_a_file_in_the_middle_of_being_written_is_left_alone(tmp_path: Path) -> None:
    """An editor that writes in pieces: the first half is good YAML with an endpoint less, and must not be taken."""
    bench = Bench(tmp_path, document(pools={"main": {"endpoints": ["10.0.0.9:80"]}}))
    whole = yaml.safe_dump(document(pools={"main": {"endpoints": ["10.0.0.1:80", "10.0.0.2:80"]}}), sort_keys=False)
    half = whole[: whole.index("  - 10.0.0.2:80")]
    assert parse(half.encode(), bench.path).pools["main"].endpoints == ["10.0.0.1:80"]
    bench.path.write_text(half)
    looking = asyncio.create_task(bench.watcher.look())
    await asyncio.sleep(0.02)
    bench.path.write_text(whole)
    await looking
    await bench.watcher.look()
    assert [list(config.pools["main"].endpoints) for config in bench.applied] == [["10.0.0.1:80", "10.0.0.2:80"]]


async def test_a_refusal_does_not_hide_the_same_file_made_whole(tmp_path: Path) -> None:
    """Rewritten again and again, a file is torn whenever it is looked at: in the end its content is in use."""
    bench = Bench(tmp_path)
    text = yaml.safe_dump(document(routing={"tie_ms": 7}), sort_keys=False)
    stop = asyncio.Event()

    async def rewrite() -> None:
        while not stop.is_set():
            with bench.path.open("w") as file:
                file.write(text[: len(text) // 2])
                file.flush()
                await asyncio.sleep(0.003)
                file.write(text[len(text) // 2 :])
            await asyncio.sleep(0.003)

    rewriting = asyncio.create_task(rewrite())
    for _ in range(20):
        await bench.watcher.look()
    stop.set()
    await rewriting
    await bench.watcher.look()
    assert [config.routing.tie_ms for config in bench.applied] == [7]


async def test_limits_of_use_are_taken_but_for_what_envoy_does_of_them(tmp_path: Path) -> None:
    """Rules apply at once; Envoy's own bucket, and whether it asks before the body, stay until the next restart."""
    rule = {"tenant": "*", "requests_per_minute": 10}
    bench = Bench(tmp_path)
    changed = await bench.change(rate_limits={"rules": [rule], "before_body": True, "local_requests_per_s": 5})
    assert changed is not None
    limits = changed.rate_limits
    assert (len(limits.rules), limits.before_body, limits.local_requests_per_s) == (1, False, None)
    whole = reload.read(bench.path, [])
    assert reload.needs_restart(bench.first, whole) == ["rate_limits.local_requests_per_s", "rate_limits.before_body"]


async def test_clients_priorities_are_switched_on_with_envoy_and_off_at_once(tmp_path: Path) -> None:
    """Envoy removes the header until it is started anew; that clients may no longer choose must not wait for it."""
    bench = Bench(tmp_path)
    changed = await bench.change(overload={"client_priority": True, "action": "queue"})
    assert changed is not None
    assert (changed.overload.action, changed.overload.client_priority) == ("queue", False)
    (tmp_path / "on").mkdir()
    bench = Bench(tmp_path / "on", document(overload={"client_priority": True}))
    changed = await bench.change(overload={"client_priority": False})
    assert changed is not None
    assert not changed.overload.client_priority
    assert not reload.needs_restart(bench.first, changed)
