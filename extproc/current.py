"""What follows from a configuration and a fleet: made once for each, used by every decision."""

from collections.abc import Mapping

import msgspec

from extproc import deciding
from extproc.choose.fleet import Fleet
from extproc.choose.policies import POLICIES, Weights
from extproc.config import Config
from extproc.fitting import Fitting
from extproc.request.volatile import Rules, rules_of
from extproc.state.knowledge import PoolKnowledge
from extproc.versions import Around


class Current(msgspec.Struct, frozen=True):
    """What follows from one configuration and one fleet.

    Attributes:
        config: the configuration.
        fleet: the fleet.
        weights: its weights.
        volatile: what hashing passes over.
        whole: every pool's policy looks at prompts, so bodies are read whole at once.
        fitting: what engines get in place of bodies.
        around: what a version is chosen by.
    """

    config: Config
    fleet: Fleet
    weights: Weights
    volatile: Rules
    whole: bool
    fitting: Fitting
    around: Around


def current_of(config: Config, fleet: Fleet, knowledge: Mapping[str, PoolKnowledge], last: Current | None) -> Current:
    """What follows from `config` and `fleet`; of `last` all that still holds is kept."""
    if last is not None and last.config is config and last.fleet is fleet:
        return last
    kept = last if last is not None and last.config is config else None
    return Current(
        config=config,
        fleet=fleet,
        weights=kept.weights if kept else deciding.weights_of(config),
        volatile=kept.volatile if kept else rules_of(config.routing.volatile),
        fitting=kept.fitting if kept else Fitting(config),
        around=Around(fleet, knowledge, config),
        whole=all(POLICIES[pool.policy].prefix for pool in fleet.pools.values()),
    )
