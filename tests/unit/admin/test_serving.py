"""Whether a version can take traffic, by what was published of its engines."""

from typing import Any

import pytest

from extproc.admin.serving import doubts, hindrances
from extproc.config import Config
from extproc.state.endpoint import EndpointState
from tests.unit.admin.stage import POOLS, config, healthy

NEW = "10.0.0.2:80"
TWO = {NEW: NEW, "10.0.0.3:80": "10.0.0.3:80"}


def told(state: EndpointState | None, settings: Config | None = None) -> list[str]:
    """What hinders version v2 whose one engine has this state."""
    states = {} if state is None else {NEW: state}
    return hindrances(settings or config(), "chat", "v2", POOLS["new"], states)


def version(engine: str = "vllm", **settings: Any) -> Config:
    """Version v2 with these settings, its pool of this kind."""
    model = {"versions": {"v1": {"pool": "old", "weight": 1}, "v2": {"pool": "new", **settings}}}
    pools = {"old": {"endpoints": ["10.0.0.1:80"]}, "new": {"endpoints": [NEW], "engine": engine}}
    return config(model, pools=pools)


def test_a_healthy_engine_that_lists_the_model_hinders_nothing() -> None:
    """Nor is there a doubt."""
    assert told(healthy()) == []
    assert doubts(config(), "chat", "v2", POOLS["new"], {NEW: healthy()}) == []


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (None, "was not read yet"),
        (healthy(scraped_at=0.0), "was not read yet"),
        (healthy(reachable=False), "cannot be reached"),
        (healthy(asleep=True), "is asleep"),
        (healthy(draining=True), "takes no new sessions"),
        (healthy(stalled_s=12.3), "has stood still for 12 s"),
    ],
)
def test_no_engine_that_can_serve(state: EndpointState | None, why: str) -> None:
    """Version, pool, engine and reason are named."""
    assert told(state) == [f"version `v2`: no endpoint of pool `new` can serve: {NEW} {why}"]


def test_an_engine_without_a_page_of_ours_serves_all_the_same() -> None:
    """It answers, with something else than numbers: that is known after three scrapes."""
    assert told(healthy(scraped_at=0.0, unread=3, models=())) == []
    assert told(healthy(scraped_at=0.0, unread=3, misses=3, reachable=False))


def test_a_pool_without_endpoints_or_that_is_not_there() -> None:
    """Names that cannot be resolved, and a pool that only a restart would bring."""
    assert "has no endpoints" in hindrances(config(), "chat", "v2", {}, {})[0]
    settings = config({"versions": {"v1": {"pool": "old", "weight": 1}, "v2": {"pool": "none"}}})
    assert "restart `warmpath serve`" in hindrances(settings, "chat", "v2", {}, {})[0]


def test_one_healthy_engine_is_enough_and_the_others_are_a_doubt() -> None:
    """An engine may be down at any time."""
    states = {NEW: healthy(), "10.0.0.3:80": healthy(reachable=False)}
    assert hindrances(config(), "chat", "v2", TWO, states) == []
    [doubt] = doubts(config(), "chat", "v2", TWO, states)
    assert doubt == "version `v2`: 1 of 2 endpoints of pool `new` can serve: 10.0.0.3:80 cannot be reached"


def test_vllm_refuses_a_model_that_it_does_not_list() -> None:
    """So the rollout does, and tells what it lists; `served_as` is the name that counts."""
    [why] = told(healthy(models=("qwen",)))
    assert why == (f"version `v2`: model `chat` is not listed by {NEW} (it lists qwen): set `served_as` of the version")
    assert told(healthy(models=("qwen",)), version(served_as="qwen")) == []
    assert told(healthy(models=()), version(served_as="qwen")) == []


@pytest.mark.parametrize("engine", ["sglang", "tensorrt_llm"])
def test_engines_that_do_not_check_the_name_are_a_doubt(engine: str) -> None:
    """They answer whatever the name, perhaps with other weights."""
    settings, state = version(engine), healthy(kind=engine, models=("qwen",))
    assert told(state, settings) == []
    [doubt] = doubts(settings, "chat", "v2", POOLS["new"], {NEW: state})
    assert "model `chat` is not listed by" in doubt


def test_the_kind_that_an_engine_tells_counts_where_the_file_leaves_it_open() -> None:
    """`auto` is found out by the keeper."""
    assert told(healthy(models=("qwen",)), version("auto"))
    assert told(healthy(kind="sglang", models=("qwen",)), version("auto")) == []


def test_an_adapter_must_be_loaded_but_at_tensorrt_llm() -> None:
    """VLLM and SGLang answer 404 or 400 for one that is not; TensorRT-LLM loads it from its path."""
    adapter = {"adapter": {"name": "sql", "id": 1, "path": "/sql"}}
    for engine in ("vllm", "sglang"):
        [why] = told(healthy(kind=engine, adapters=("other",)), version(engine, **adapter))
        assert "LoRA adapter `sql` is not listed by" in why
        assert told(healthy(kind=engine, adapters=("sql",)), version(engine, **adapter)) == []
    assert told(healthy(kind="tensorrt_llm"), version("tensorrt_llm", **adapter)) == []


def test_many_engines_are_counted_not_listed() -> None:
    """A refusal stays one readable line."""
    members = {f"10.0.0.{at}:80": "" for at in range(9)}
    [why] = hindrances(config(), "chat", "v2", members, {})
    assert why.endswith("and 6 more")
