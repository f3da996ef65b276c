"""What models with versions, their shadows and rollouts must agree on."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from extproc.config import Config, Model, Shadow
from extproc.config_mistakes import Mistake, nearest
from extproc.config_rollouts import CAPTURE_CLUSTER, SHADOW_CLUSTERS
from extproc.shadow import refusals


def shadow_clusters_are_free(config: Config) -> Iterator[Mistake]:
    """Pools are Envoy clusters, and shadows need some of their own."""
    for name in config.pools:
        if name == CAPTURE_CLUSTER or name.startswith(SHADOW_CLUSTERS):
            yield Mistake(f"$.pools.{name}", f"`{name}` is an Envoy cluster of Warmpath's own: name the pool otherwise")


def no_model(config: Config, name: str) -> str:
    """What is said of a name that is no model's own: rules name models, not their aliases."""
    for model, settings in config.models.items():
        if name in settings.aliases:
            return f"`{name}` is an alias of model `{model}`: write `{model}`, which counts for all of its names"
    return f"no model `{name}`: {nearest(name, config.models, 'models are')}"


def versions_agree(config: Config) -> Iterator[Mistake]:
    """Versions of a model are told apart by their pools, and some of them has traffic."""
    names: dict[str, str] = {name: name for name in config.models}
    for name, model in config.models.items():
        path = f"$.models.{name}"
        if model.versions:
            yield from _versions_of(path, model)
        for index, alias in enumerate(model.aliases):
            if alias in names:
                yield Mistake(f"{path}.aliases[{index}]", f"`{alias}` is model `{names[alias]}` already: drop one")
            names[alias] = name
        if model.shadow is not None:
            yield from _shadow_of(f"{path}.shadow", model, model.shadow)
    if told := steps_mistake(config.rollouts.steps):
        yield Mistake("$.rollouts.steps", told)


def steps_mistake(steps: Sequence[float]) -> str:
    """What is wrong with the steps of a rollout, in percent; empty when nothing is."""
    if list(steps) == sorted(set(steps)) and steps[-1:] == [100.0]:
        return ""
    return "go up, and end with 100: write them so, as [1, 5, 25, 100]"


def _versions_of(path: str, model: Model) -> Iterator[Mistake]:
    for field in ("pool", "served_as", "adapter"):
        if getattr(model, field) is not None:
            yield Mistake(f"{path}.{field}", "stands with each of `versions` where there are any: move it there")
    if all(version.weight <= 0.0 for version in model.versions.values()):
        yield Mistake(f"{path}.versions", "all have weight 0: give one that serves a greater one")
    seen: dict[str, str] = {}
    for version, settings in model.versions.items():
        if settings.pool in seen:
            other = seen[settings.pool]
            text = f"is the pool of version `{other}` too: each version has its own, by which it is told apart"
            yield Mistake(f"{path}.versions.{version}.pool", text)
        seen[settings.pool] = version


def _shadow_of(path: str, model: Model, shadow: Shadow) -> Iterator[Mistake]:
    if shadow.version not in model.versions:
        known = nearest(shadow.version, model.versions, "versions are") if model.versions else "the model has none"
        remedy = known if model.versions else f"{known}: give it `versions`, one of them with weight 0"
        yield Mistake(f"{path}.version", f"no version `{shadow.version}`: {remedy}")
    if shadow.folder and not PurePosixPath(shadow.folder).is_absolute():
        text = f"found {shadow.folder!r}: write an absolute path; the sidecar runs in another folder"
        yield Mistake(f"{path}.folder", text)
    for index, pattern in enumerate(shadow.refusals):
        if text := refusals.flaw(pattern):
            yield Mistake(f"{path}.refusals[{index}]", text)
    if shadow.embed_url and not shadow.embed_model:
        yield Mistake(f"{path}.embed_model", "is missing: name the model that `embed_url` is asked for")
