"""What is allowed of versions, shadows, rollouts and their operators, and still hardly meant: for `warmpath check`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from extproc.admin.entry import is_loopback, read_token
from extproc.config import Config, Model, Shadow, split_address
from extproc.errors import ConfigError

_OTHERS: Final = 0o007
_OF_COMPARISONS: Final = (
    "timeout_s",
    "keep",
    "folder",
    "max_results",
    "keep_s",
    "refusals",
    "embed_url",
)


def warnings(config: Config) -> Iterator[str]:
    """One line each, that names the place, the reason and the remedy.

    Raises ConfigError when the token of the operator API cannot be used.
    """
    yield from _operators(config)
    for name, model in config.models.items():
        if model.versions:
            yield from _splitting(config, f"models.{name}", model)
        if model.shadow is not None:
            yield from _shadow(f"models.{name}.shadow", model, model.shadow)
            yield from _mirrored_name(f"models.{name}.shadow", name, model, model.shadow)
    if any(model.versions for model in config.models.values()):
        yield from _rollouts(config)


def _operators(config: Config) -> Iterator[str]:
    """A token that others can read, and an API that nobody can call."""
    sidecar = config.gateway.sidecar
    key = "gateway.sidecar.admin_token"
    if sidecar.admin_token:
        path = Path(sidecar.admin_token)
        read_token(path)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(f"{key}: {path}: cannot be read ({error.strerror})") from error
        if mode & _OTHERS:
            yield f"{key}: every user of this host may use {path}: `chmod o= {path}`"
    elif any(model.versions for model in config.models.values()) and not is_loopback(split_address(sidecar.admin)[0]):
        yield (
            f"{key}: is empty, and gateway.sidecar.admin ({sidecar.admin}) is not on loopback: `warmpath rollout` is "
            "refused: name a file with a token"
        )


def _splitting(config: Config, place: str, model: Model) -> Iterator[str]:
    """Traffic that cannot be divided as it is meant."""
    auth = config.gateway.auth
    if model.split_by == "tenant" and not auth.keys and not auth.jwt.jwks:
        yield (
            f"{place}.split_by: tenant, but gateway.auth has neither keys nor jwt: all clients are one tenant, and get "
            "one version all together: set one of them, or split by session"
        )
    if model.split_by == "request":
        yield (
            f"{place}.split_by: request: turns of one conversation get different versions, and find no cache: split by "
            "session unless requests are single"
        )
    if len(model.versions) == 1:
        yield f"{place}.versions: there is one alone, so there is nothing to choose: write `pool` in its place"
    for version, settings in model.versions.items():
        adapter, engine = settings.adapter, config.pools[settings.pool].engine
        if engine == "auto" and adapter is not None and bool(adapter.id) != bool(adapter.path):
            yield (
                f"{place}.versions.{version}.adapter: has one of `id` and `path`: TensorRT-LLM wants both, the others "
                f"neither: set pools.{settings.pool}.engine, or both"
            )
    told = sorted({config.pools[settings.pool].engine for settings in model.versions.values()} - {"auto"})
    if len(told) > 1:
        yield f"{place}.versions: run on different engines ({', '.join(told)}): gates compare those as well as weights"


def _shadow(place: str, model: Model, shadow: Shadow) -> Iterator[str]:
    weight = model.versions[shadow.version].weight
    if weight > 0.0:
        yield (
            f"{place}.version: `{shadow.version}` has weight {weight:g}: its engines have clients of their own, which "
            "wait for what is mirrored: give it weight 0"
        )
    if shadow.mode == "mirror":
        default = Shadow(version=shadow.version)
        for key in _OF_COMPARISONS:
            if getattr(shadow, key) != getattr(default, key):
                yield f"{place}.{key}: has no effect while mode is mirror, which drops answers: write `mode: compare`"
    if shadow.embed_model and not shadow.embed_url:
        yield f"{place}.embed_model: has no effect without embed_url: name the engine that has it, or remove it"
    if shadow.share == 0.0:
        yield f"{place}.share: is 0: nothing is sent to version `{shadow.version}`: raise it, or remove `shadow`"


def _mirrored_name(place: str, name: str, model: Model, shadow: Shadow) -> Iterator[str]:
    """A mirrored body, which is made for the client's engines, names a model that the shadow's do not know."""
    if shadow.mode != "mirror":
        return
    served = {
        version: settings.adapter.name if settings.adapter else settings.served_as or name
        for version, settings in model.versions.items()
    }
    for version, told in served.items():
        if version != shadow.version and model.versions[version].weight > 0.0 and told != served[shadow.version]:
            yield (
                f"{place}.mode: mirror sends what engines of `{version}` get, and these know the model as `{told}`, "
                f"those of `{shadow.version}` as `{served[shadow.version]}`: serve both under one name, or write "
                "`mode: compare`"
            )


def _rollouts(config: Config) -> Iterator[str]:
    """Steps that prove nothing, gates that cannot see, testers that nobody is."""
    rollouts, auth = config.rollouts, config.gateway.auth
    if rollouts.min_samples == 0:
        yield "rollouts.min_samples: is 0: a step may end without a single answer of the canary: raise it"
    if rollouts.hold_s <= rollouts.settle_s:
        yield (
            f"rollouts.hold_s: {rollouts.hold_s:g} is not above settle_s ({rollouts.settle_s:g}), within which nothing "
            "counts: raise it"
        )
    if rollouts.on_failure == "report":
        yield "rollouts.on_failure: is report: a canary that fails its gates goes on to 100 %: write rollback or pause"
    if rollouts.gates.broken.enabled:
        yield from _unseen(config)
    if set(rollouts.testers) - {"*"} and not auth.keys and not auth.jwt.jwks:
        yield "rollouts.testers: gateway.auth has neither keys nor jwt, so no request has a tenant: set one of them"


def _unseen(config: Config) -> Iterator[str]:
    """Streams of clients that ask for no usage, which look whole when they were cut."""
    for name, model in config.models.items():
        silent = [settings.pool for settings in model.versions.values() if not config.pools[settings.pool].ask_usage]
        if silent:
            yield (
                f"rollouts.gates.broken: of model {name} it sees no cut in streams whose clients ask for no usage: set "
                f"ask_usage: true in the pools {', '.join(silent)}"
            )
