"""Watches `warmpath.yaml` while it is in use: a good change is taken, a bad one is refused and said."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

import msgspec
import yaml

from extproc.config import Config, Model
from extproc.config_file import load, parse
from extproc.errors import ConfigError
from extproc.overrides import overlay

_EVERY_S = 0.5
_STILL_S = 0.05
"""A changed file is taken once it has been the same for so long."""
_FIXED = ("gateway", "redis", "timeouts", "retries", "relay")
_ENVOYS = (
    ("breakers", ("max_requests", "max_pending")),
    ("rate_limits", ("local_requests_per_s", "before_body")),
)
"""What of these sections Envoy's own configuration alone has."""
_PRIORS = ("prefill_tokens_per_s", "kv_tokens", "bytes_per_token")

log = logging.getLogger(__name__)


def read(path: Path, settings: Sequence[str]) -> Config:
    """The file with the command line's overrides laid over it. Raises ConfigError."""
    return overlay(load(path), settings)


def read_or(path: Path, settings: Sequence[str], last_good: Path | None) -> Config:
    """As `read`, but a file that is bad now is replaced by the copy that was in use last.

    A process that dies while somebody is editing must be able to start again. Raises ConfigError as `read` when there
    is no such copy.
    """
    try:
        return read(path, settings)
    except ConfigError as error:
        if last_good is None or not last_good.is_file():
            raise
        log.error("the configuration is refused, the one in use before stays", extra={"error": str(error)})
        return load(last_good)


def keep(config: Config, last_good: Path) -> None:
    """Write a copy for `read_or`, readable by this user alone: it may hold the store's password."""
    fresh = last_good.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False), encoding="utf-8")
    fresh.replace(last_good)


def needs_restart(old: Config, new: Config) -> list[str]:
    """What of a change cannot be taken while running: what Envoy's own configuration or a learnt number began with."""
    parts = [section for section in _FIXED if getattr(old, section) != getattr(new, section)]
    if old.routing.block_tokens != new.routing.block_tokens:
        parts.append("routing.block_tokens")
    if old.telemetry.access_log_flush_ms != new.telemetry.access_log_flush_ms:
        parts.append("telemetry.access_log_flush_ms")
    # Envoy removes the header until it is rendered anew; switched off, it is passed over at once, by the workers.
    if new.overload.client_priority and not old.overload.client_priority:
        parts.append("overload.client_priority")
    for section, keys in _ENVOYS:
        before, after = getattr(old, section), getattr(new, section)
        parts += [f"{section}.{key}" for key in keys if getattr(before, key) != getattr(after, key)]
    parts += [
        f"pools.{name}.{prior}"
        for name, pool in old.pools.items()
        for prior in _PRIORS
        if name in new.pools and getattr(pool, prior) != getattr(new.pools[name], prior)
    ]
    parts += [f"models.{name}.shadow" for name in _unknown_shadows(old, new)]
    return parts + ([] if set(old.pools) == set(new.pools) else ["the set of pools"])


class Watcher:
    """Follows one file. Its content is compared, not its time: some file systems and mounts keep times coarse."""

    def __init__(
        self, path: Path, settings: Sequence[str], config: Config, apply: Callable[[Config], Awaitable[None]]
    ) -> None:
        """`config` is what the file said at the start; `apply` takes each good change."""
        self._path = path
        self._settings = settings
        self._config = config
        self._apply = apply
        # Nothing yet: the file may have changed since `config` was read.
        self._seen: bytes | None = None

    async def run(self) -> None:
        """Look twice a second until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Take the file's new content if it changed and is good."""
        content = await asyncio.to_thread(_content, self._path)
        if content == self._seen:
            return
        await asyncio.sleep(_STILL_S)
        if content != await asyncio.to_thread(_content, self._path):
            return  # Still being written: half a list of endpoints is good YAML too. The next look sees it whole.
        self._seen = content
        try:
            changed = self._read(content)
        except ConfigError as error:
            log.error("the changed configuration is refused, the old one stays", extra={"error": str(error)})
            return
        if fixed := needs_restart(self._config, changed):
            log.warning("these changes are taken at the next restart only", extra={"sections": fixed})
            changed = _without_fixed(self._config, changed)
        if changed == self._config:
            return
        self._config = changed
        await self._apply(changed)
        log.info("the changed configuration is in use", extra={"pools": sorted(changed.pools)})

    def _read(self, content: bytes) -> Config:
        """What was compared is what is parsed.

        A file that is read again may be half-written by then, and the refusal would stand although the next look finds
        nothing new. Raises ConfigError.
        """
        if not content:
            return read(self._path, self._settings)  # says whether the file is empty or gone
        return overlay(parse(content, self._path), self._settings)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _served(model: Model, pools: Collection[str]) -> bool:
    """Whether all pools of a model are there."""
    return all(each.pool in pools for each in model.by_version.values())


def _unknown_shadows(old: Config, new: Config) -> list[str]:
    """Models whose shadow Envoy cannot serve as it was rendered; what it mirrors would be counted, and go nowhere."""
    known = {_envoys_part(model) for model in old.models.values()}
    return [name for name, model in new.models.items() if model.shadow and _envoys_part(model) not in known]


def _envoys_part(model: Model) -> tuple[object, ...]:
    """What of a model's shadow is in Envoy's own configuration."""
    shadow = model.shadow
    if shadow is None:
        return ()
    if shadow.mode == "compare":
        return (shadow.mode,)
    return (shadow.mode, model.by_version[shadow.version].pool, shadow.max_concurrent, shadow.timeout_s)


def _with_known_shadow(old: Config, name: str, model: Model) -> Model:
    """A model with the shadow that Envoy knows of it; with none where its versions leave no room for that."""
    before = old.models.get(name)
    shadow = before.shadow if before else None
    if before and shadow and model.versions.get(shadow.version) != before.versions[shadow.version]:
        shadow = None
    return msgspec.structs.replace(model, shadow=shadow)


def _without_fixed(old: Config, new: Config) -> Config:
    """The new configuration as far as it can be taken now: its endpoints, policies and weights.

    A model that moves to a pool which is not there yet stays where it is until then.
    """
    pools = {name: new.pools.get(name, pool) for name, pool in old.pools.items()}
    unknown = _unknown_shadows(old, new)
    models = {
        name: _with_known_shadow(old, name, model) if name in unknown else model for name, model in new.models.items()
    }
    models = {
        name: model if _served(model, pools) else old.models[name]
        for name, model in models.items()
        if _served(model, pools) or name in old.models
    }
    return Config(
        models=models or old.models,
        pools=pools,
        gateway=old.gateway,
        redis=old.redis,
        routing=new.routing,
        timeouts=old.timeouts,
        retries=old.retries,
        relay=old.relay,
        rollouts=new.rollouts,
        overload=msgspec.structs.replace(
            new.overload, client_priority=new.overload.client_priority and old.overload.client_priority
        ),
        telemetry=new.telemetry,
        **{
            section: msgspec.structs.replace(
                getattr(new, section), **{key: getattr(getattr(old, section), key) for key in keys}
            )
            for section, keys in _ENVOYS
        },
    )
