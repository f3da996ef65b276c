"""What the engines of a pool get in place of a client's body, by configuration and by what they turned out to be."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final, get_args

import msgspec

from extproc.choose.fleet import Pool
from extproc.config import Config, EngineKind
from extproc.engines.fit import Change, Fitted, Wanted, fit
from extproc.envoy.contract import Decision
from extproc.errors import UnfitRequestError
from extproc.request.model import Request

ASKED_USAGE: Final = "asked_usage"
"""Key of a decision's metadata that says that usage was asked for in the client's place."""

_KNOWN: Final[Mapping[str, EngineKind]] = {kind: kind for kind in get_args(EngineKind) if kind != "auto"}


class Fits(msgspec.Struct, frozen=True, gc=False):
    """The bodies of one request.

    Attributes:
        by_engine: what each kind of engine in the pool gets; None for the body as it is. Kinds that cannot serve the
            request are left out.
        kinds: by `ip:port`, the kind of each endpoint; empty where all are of one kind.
    """

    by_engine: Mapping[EngineKind, Fitted | None]
    kinds: Mapping[str, EngineKind] = {}

    def subset(self, hinted: AbstractSet[str] | None) -> AbstractSet[str] | None:
        """Who may be picked of those that the gateway hinted at; None for all."""
        able = frozenset(at for at, kind in self.kinds.items() if kind in self.by_engine)
        if len(able) == len(self.kinds):
            return hinted
        return able if hinted is None else able & hinted

    def applied(self, decision: Decision) -> tuple[Decision, tuple[Change, ...]]:
        """The decision with the body for the engine that was picked, and why that differs from the one that came.

        Whoever is tried after the pick gets the same body, so only its own kind is.
        """
        if self.kinds:
            engine = self.kinds[decision.destinations[0]]
            alike = tuple(at for at in decision.destinations if self.kinds[at] == engine)
            decision = msgspec.structs.replace(decision, destinations=alike)
        else:
            engine = next(iter(self.by_engine), "auto")
        found = self.by_engine.get(engine)
        if found is None:
            return decision, ()
        metadata = decision.metadata
        if "usage" in found.changes:
            metadata = {**metadata, ASKED_USAGE: 1.0}
        return msgspec.structs.replace(decision, body=found.body, metadata=metadata), found.changes


class _Kinds(msgspec.Struct, frozen=True, gc=False):
    """The kinds of engine in one snapshot of a pool.

    Attributes:
        pool: the snapshot.
        engines: each kind once; `auto` while none is known.
        each: by `ip:port`, the kind of each endpoint; empty where all are of one kind.
    """

    pool: Pool
    engines: tuple[EngineKind, ...]
    each: Mapping[str, EngineKind]


class Fitting:
    """What each model needs at each kind of engine; made once for each configuration."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._wanted: dict[tuple[str, str, EngineKind], Wanted] = {}
        self._kinds: dict[str, _Kinds] = {}

    def fits(self, request: Request, pool: Pool, body: bytes, named: str = "") -> Fits:
        """Make the bodies for the kinds of engine in a pool, of which there is nearly always one.

        Args:
            request: the request.
            pool: pool that serves it.
            body: its body so far; nothing is made of an empty one.
            named: further name that the body has for the model; empty where it has its own.

        Raises:
            UnfitRequestError: none of the engines can keep what the request asks for.
        """
        kinds = self._kinds.get(pool.name)
        if kinds is None or kinds.pool is not pool:
            kinds = self._kinds[pool.name] = kinds_of(self._config, pool)
        made: dict[EngineKind, Fitted | None] = {}
        refusal = None
        name = named or request.model
        for engine in kinds.engines:
            try:
                made[engine] = fit(body, request.kind, self.wanted(name, pool.name, engine)) if body else None
            except UnfitRequestError as error:
                refusal = error
        if refusal is not None and not made:
            raise refusal
        return Fits(made, kinds.each)

    def wanted(self, model: str, pool: str, engine: EngineKind) -> Wanted:
        """What requests for a model need at a kind of engine.

        Args:
            model: one that is configured, by any of its names, as the body has it; empty for none.
            pool: pool that serves it.
            engine: the kind.
        """
        key = model, pool, engine
        found = self._wanted.get(key)
        if found is None:
            found = self._wanted[key] = wanted_of(self._config, *key)
        return found


def kinds_of(config: Config, pool: Pool) -> _Kinds:
    """The kinds of engine in a pool: as configured, else as its endpoints turned out to be.

    One that could not be read yet is taken for what the others are; where those differ, for vLLM.
    """
    settings = config.pools.get(pool.name)
    if settings is not None and settings.engine != "auto":
        return _Kinds(pool, (settings.engine,), {})
    found = sorted({kind for each in pool.endpoints if (kind := _KNOWN.get(each.kind))})
    if len(found) < 2:
        return _Kinds(pool, tuple(found) or ("auto",), {})
    each = {endpoint.destination: _KNOWN.get(endpoint.kind, "vllm") for endpoint in pool.endpoints}
    return _Kinds(pool, tuple(dict.fromkeys(each.values())), each)


def wanted_of(config: Config, model: str, pool: str, engine: EngineKind) -> Wanted:
    """See `Fitting.wanted`."""
    pool_settings, own = config.pools.get(pool), own_name(config, model)
    settings = config.models.get(own)
    usage = pool_settings is not None and pool_settings.ask_usage
    if settings is None:
        return Wanted(engine, usage=usage)
    version = settings.in_pool(pool) or settings.by_version[settings.main]
    if version.adapter is None:
        served = version.served_as or own
        return Wanted(engine, served if served != model else "", usage=usage)
    return Wanted(engine, version.served_as or base_of(config, pool) or own, version.adapter, usage)


def own_name(config: Config, model: str) -> str:
    """A model's own name, by any of its names; one that is unknown stays as it is."""
    if model in config.models:
        return model
    return next((name for name, each in config.models.items() if model in each.aliases), model)


def base_of(config: Config, pool: str) -> str:
    """Name by which a pool's engines know their base model, that of its first model without an adapter; else empty."""
    bases = (
        version.served_as or name
        for name, each in config.models.items()
        if (version := each.in_pool(pool)) and not version.adapter
    )
    return next(bases, "")
