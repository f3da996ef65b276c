"""What models with versions, their shadows and rollouts must agree on."""

from collections.abc import Iterator

from extproc.config import Config, Model
from extproc.config_mistakes import Mistake, nearest


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
        if model.shadow is not None and model.shadow.version not in model.versions:
            versions = nearest(model.shadow.version, model.versions, "versions are")
            yield Mistake(f"{path}.shadow.version", f"no version `{model.shadow.version}`: {versions}")
    if config.rollouts.steps != sorted(set(config.rollouts.steps)) or config.rollouts.steps[-1] != 100.0:
        yield Mistake("$.rollouts.steps", "go up, and end with 100: write them so, as [1, 5, 25, 100]")


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
