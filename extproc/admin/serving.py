"""Whether a version can serve, by its settings and by what keepers published of its engines. Plain functions."""

from collections.abc import Iterator, Mapping
from typing import Final

from extproc.config import Config
from extproc.state.endpoint import EndpointState

_MOST_NAMED: Final = 3


def hindrances(
    config: Config, model: str, version: str, members: Mapping[str, str], states: Mapping[str, EndpointState]
) -> list[str]:
    """Why a version of a model cannot take traffic now, one line each; empty when it can.

    Args:
        config: the configuration.
        model: the model.
        version: its version; empty for the only one of a model without any.
        members: destination by id of the endpoints that the version's pool has.
        states: what was published of them, by id; those that were never read are absent.
    """
    pool = config.models[model].by_version[version].pool
    if pool not in config.pools:
        return [f"{_of(version)}there is no pool `{pool}` here yet: restart `warmpath serve` with it"]
    if not members:
        return [f"{_of(version)}pool `{pool}` has no endpoints: its addresses cannot be resolved"]
    ill = _ill(members, states)
    if len(ill) == len(members):
        return [f"{_of(version)}no endpoint of pool `{pool}` can serve: {_some(ill)}"]
    healthy = {name: states[name] for name in members if name not in ill}
    return list(_unlisted(config, model, version, healthy, strict=True))


def doubts(
    config: Config, model: str, version: str, members: Mapping[str, str], states: Mapping[str, EndpointState]
) -> list[str]:
    """What speaks against a version although it can take traffic, one line each; arguments as of `hindrances`."""
    ill = _ill(members, states)
    pool, well = config.models[model].by_version[version].pool, len(members) - len(ill)
    told = f"{_of(version)}{well} of {len(members)} endpoints of pool `{pool}` can serve: {_some(ill)}"
    healthy = {name: states[name] for name in members if name not in ill}
    return ([told] if ill else []) + list(_unlisted(config, model, version, healthy, strict=False))


def _ill(members: Mapping[str, str], states: Mapping[str, EndpointState]) -> dict[str, str]:
    """Endpoints that cannot serve, each with why."""
    return {name: told for name in sorted(members) if (told := _ailment(states.get(name)))}


def _ailment(state: EndpointState | None) -> str:
    """Why an endpoint cannot serve; empty when it can, for all that is known."""
    if state is None:
        return "was not read yet"
    if not state.reachable:
        return "cannot be reached"
    if state.asleep:
        return "is asleep"
    if state.draining:
        return "takes no new sessions"
    if state.stalled_s:
        return f"has stood still for {state.stalled_s:.0f} s"
    # Before its first page nothing is known; one whose page is none of ours answers all the same.
    return "" if state.scraped_at or (state.stale and not state.misses) else "was not read yet"


def _unlisted(
    config: Config, model: str, version: str, healthy: Mapping[str, EndpointState], *, strict: bool
) -> Iterator[str]:
    """Engines that list what they serve, and not this version.

    vLLM refuses a name that it does not list, and so does SGLang an adapter (`strict`). The model's name is not checked
    by SGLang and TensorRT-LLM: they may be what is meant, or serve other weights.
    """
    settings = config.models[model].by_version[version]
    adapter = settings.adapter
    what, name = ("LoRA adapter", adapter.name) if adapter else ("model", settings.served_as or model)
    missing = [
        f"{endpoint} (it lists {', '.join(sorted(state.models + state.adapters)[:_MOST_NAMED])})"
        for endpoint, state in sorted(healthy.items())
        if state.models and name not in state.models + state.adapters
        # TensorRT-LLM loads an adapter when a request brings its path, and lists none.
        if not (adapter and _kind(config, settings.pool, state) == "tensorrt_llm")
        if strict == (bool(adapter) or _kind(config, settings.pool, state) == "vllm")
    ]
    if missing:
        remedy = (
            "load it there, or correct `adapter.name`"
            if adapter
            else f"set `served_as`{' of the version' if version else ''}"
        )
        yield f"{_of(version)}{what} `{name}` is not listed by {_first(missing)}: {remedy}"


def _of(version: str) -> str:
    """What lines about a version begin with; nothing for the only one of a model without any."""
    return f"version `{version}`: " if version else ""


def _kind(config: Config, pool: str, state: EndpointState) -> str:
    engine = config.pools[pool].engine
    return state.kind if engine == "auto" else engine


def _some(ill: Mapping[str, str]) -> str:
    return _first([f"{name} {why}" for name, why in ill.items()])


def _first(told: list[str]) -> str:
    more = len(told) - _MOST_NAMED
    return ", ".join(told[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
