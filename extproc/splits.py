"""The versions of each model as they are now: by the configuration, and by the rollout where one is under way."""

from collections.abc import Mapping
from typing import Final

from extproc.choose.fleet import Fleet, Pool
from extproc.config import Config, Model
from extproc.rollout.split import Split
from extproc.rollout.state import ACTIVE, Rollout, governs, weights

_MOST_EARLIER: Final = 8
"""Changes of the file's weights whose conversations stay where they began."""


def splits_of(
    config: Config, rollouts: Mapping[str, Rollout], before: Mapping[str, Split] | None = None
) -> Mapping[str, Split]:
    """The versions of models that have several.

    Args:
        config: current configuration.
        rollouts: by model, the last that is known of its rollout.
        before: what this returned before, and returns again when nothing changed; None at first. Where the file's
            weights have changed since, conversations stay on the version where they began, unless its weight is 0 now.
    """
    found = {}
    for name, model in config.models.items():
        if len(model.versions) < 2:
            continue
        rollout = rollouts.get(name)
        split = _by_rollout(name, model, rollout) if rollout is not None else None
        found[name] = split or _by_file(name, model, (before or {}).get(name))
    return found if before is None or found != before else before


def fleet_of(pools: Mapping[str, Pool], config: Config, splits: Mapping[str, Split]) -> Fleet:
    """The fleet of these pools and versions. A model's requests that belong to nobody go to its main version now."""
    models = {
        name: splits[name].pools[splits[name].main] if name in splits else model.main_pool
        for name, model in config.models.items()
    }
    aliases = {alias: name for name, model in config.models.items() for alias in model.aliases}
    return Fleet(pools, models, next(iter(models.values())), aliases, splits)


def with_splits(fleet: Fleet, config: Config, rollouts: Mapping[str, Rollout]) -> Fleet:
    """The fleet with versions as they are now; the same object when they did not change."""
    splits = splits_of(config, rollouts, fleet.splits)
    return fleet if splits is fleet.splits else fleet_of(fleet.pools, config, splits)


def _by_rollout(name: str, model: Model, rollout: Rollout) -> Split | None:
    """By a rollout; None where it no longer governs, or gives everything to a version that is gone."""
    configured = {version: each.weight for version, each in model.versions.items()}
    if not governs(rollout, configured):
        return None

    def known(share: float) -> dict[str, float]:
        return {version: part for version, part in weights(rollout, share).items() if version in configured}

    now = known(rollout.share)
    if not any(part > 0.0 for part in now.values()):
        return None
    epoch = rollout.epoch if rollout.phase in ACTIVE else ""
    return _split(name, model, now, tuple(known(share) for share in rollout.earlier), epoch)


def _by_file(name: str, model: Model, before: Split | None) -> Split:
    now = {version: each.weight for version, each in model.versions.items()}
    used = {version for version, part in now.items() if part > 0.0}
    earlier: list[Mapping[str, float]] = []
    for each in (before.weights, *before.earlier) if before is not None and len(used) > 1 else ():
        # Weight 0 takes a version out of use at once, with all its conversations.
        kept = {version: part for version, part in each.items() if version in used and part > 0.0}
        if kept and kept not in earlier and kept != {version: now[version] for version in used}:
            earlier.append(kept)
    return _split(name, model, now, tuple(earlier[:_MOST_EARLIER]), "")


def _split(
    name: str, model: Model, now: Mapping[str, float], earlier: tuple[Mapping[str, float], ...], epoch: str
) -> Split:
    return Split(
        model=name,
        pools={version: each.pool for version, each in model.versions.items()},
        weights=now,
        earlier=earlier,
        split_by=model.split_by,
        epoch=epoch,
        main=max(model.versions, key=lambda version: now.get(version, 0.0)),
    )
