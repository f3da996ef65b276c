"""Whether a rollout may start, what speaks against it, and what it is going to do. Plain functions of values."""

from collections.abc import Iterator, Mapping

from extproc.admin import serving
from extproc.admin.planning import known
from extproc.config import Config, Model
from extproc.errors import RolloutError, UnknownCanaryError, UnknownModelError
from extproc.rollout.preview import preview as needs_of
from extproc.rollout.state import ACTIVE, Plan, Rollout, governs
from extproc.state.endpoint import EndpointState

Pools = Mapping[str, Mapping[str, str]]
"""Destination by endpoint id, by pool."""
States = Mapping[str, Mapping[str, EndpointState]]
"""What was published of endpoints, by id, by pool."""


def model_of(config: Config, name: str) -> tuple[str, Model]:
    """A model by its name or an alias. Raises UnknownModelError."""
    for own, model in config.models.items():
        if name == own or name in model.aliases:
            return own, model
    raise UnknownModelError(f"no model `{name[:256]}`: {known(name, config.models, 'models are')}")


def expect_version(name: str, model: Model, version: str) -> None:
    """Raise unless the model has this version: RolloutError where it has none at all, else UnknownCanaryError."""
    if not model.versions:
        raise RolloutError(
            f"model `{name}` has one version alone: give it `versions` in warmpath.yaml, each with a pool of its own, "
            "and restart `warmpath serve` for the new pool"
        )
    if version not in model.versions:
        told = known(version, model.versions, "versions are")
        raise UnknownCanaryError(f"model `{name}` has no version `{version[:256]}`: {told}")


def base_of(model: Model) -> dict[str, float]:
    """Weights of all versions, as the file has them."""
    return {version: settings.weight for version, settings in model.versions.items()}


def expect_no_other(name: str, base: Mapping[str, float], last: Rollout | None) -> None:
    """Raise RolloutError unless the model's last rollout leaves room for another one."""
    if last is None:
        return
    if last.phase in ACTIVE:
        remedy = "wait for its end, abort it, or promote it once more to end what the old version still has"
        raise RolloutError(
            f"a rollout of model `{name}` to version `{last.canary}` is {last.phase} (step {last.step + 1} of "
            f"{len(last.plan.steps)}): {remedy if last.phase == 'promoted' else 'wait for its end, or abort it'}"
        )
    if last.phase == "retired" and governs(last, base):
        # Its canary has all traffic, though the file says otherwise: whatever began now would forget that at its end.
        raise RolloutError(
            f"model `{name}` was promoted to version `{last.canary}`, and warmpath.yaml does not say so yet: give it "
            "all the weight there, on all hosts, and start this rollout then"
        )


def hindrances(config: Config, name: str, version: str, pools: Pools, states: States) -> list[str]:
    """Why a version cannot take the model's traffic now; empty when it can."""
    pool = config.models[name].by_version[version].pool
    return serving.hindrances(config, name, version, pools.get(pool, {}), states.get(pool, {}))


def warnings(config: Config, name: str, version: str, plan: Plan, pools: Pools, states: States) -> list[str]:
    """What speaks against a rollout that may start, one line each."""
    model = config.models[name]
    told: list[str] = []
    for each, settings in model.by_version.items():
        if each == version or settings.weight > 0.0:
            members, published = pools.get(settings.pool, {}), states.get(settings.pool, {})
            told += serving.doubts(config, name, each, members, published)
    return [*told, *_of_plan(config, model, version, plan)]


def _of_plan(config: Config, model: Model, version: str, plan: Plan) -> Iterator[str]:
    if model.shadow is not None and model.shadow.version == version and model.shadow.share > 0.0:
        yield f"version `{version}` is the shadow too: its engines have mirrored requests beside the canary's"
    silent = [
        each.pool
        for each in model.by_version.values()
        if each.pool in config.pools and not config.pools[each.pool].ask_usage
    ]
    if plan.gates.broken.enabled and silent:
        yield (
            f"gate `broken`: streams whose clients ask for no usage look whole when they are cut, unless all pools of "
            f"the model have ask_usage: true; `{'`, `'.join(silent)}` have not"
        )
    if plan.on_failure == "report":
        yield "on_failure is `report`: a failed gate is written down, and stops nothing"
    kinds = {config.pools[each.pool].engine for each in model.by_version.values() if each.pool in config.pools}
    if len(kinds - {"auto"}) > 1:
        yield f"versions run on different engines ({', '.join(sorted(kinds - {'auto'}))}): gates compare those too"


def preview(rollout: Rollout) -> list[str]:
    """What a rollout is going to do that begins so, a line each."""
    plan, needs = rollout.plan, needs_of(rollout.plan)
    lines = []
    for at, step in enumerate(needs.steps[rollout.step :]):
        who = f"version `{rollout.canary}` of model `{rollout.model}` gets" if at == 0 else "then"
        when = " of new conversations now" if at == 0 else ""
        some = f" and some {step.requests:,} requests of the model" if step.requests else ""
        least = f"for {plan.hold_s:g} s{some} at least"
        lines.append(f"{who} {_percent(step.share)}{when}, {least}")
    if plan.require_verdict:
        lines.append("each step waits for a good verdict too")
    resting = next((step.rests for step in needs.steps if step.rests), ())
    if rollout.share >= 1.0:
        # Rates are compared with the baseline of the steps before, and there is none.
        resting = needs.gates
    if resting:
        lines.append(f"at 100 % no baseline is left for the gates {', '.join(resting)}, which rest")
    does = {"rollback": "takes everything from it at once", "pause": "stops where it is", "report": "is written down"}
    lines.append(
        f"a gate that fails {does[plan.on_failure]}; chance of a false alarm, of all gates and steps together: "
        f"{_percent(plan.false_alarms)}"
    )
    lines.append(f"{plan.retire_after_s:g} s after the last step, conversations leave the other versions")
    return lines


def _percent(share: float) -> str:
    return f"{100.0 * share:g} %"
