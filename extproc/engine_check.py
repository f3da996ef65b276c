"""`warmpath check --engines`: asks all engines what they serve, and judges it as the start of a rollout does.

Every endpoint is asked for its list of models alone. A version whose engines do not serve it is a mistake whatever its
weight: a rollout could go there. So is one none of whose engines can be reached. Where a list does not tell, that is a
warning.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import aiohttp
import msgspec

from extproc.admin.serving import doubts, hindrances
from extproc.config import Config, split_address
from extproc.engines.cards import MODELS_PAGE, cards
from extproc.envoy.validate import Findings
from extproc.errors import EngineError
from extproc.fleet.asking import fetch, new_session
from extproc.fleet.membership import Membership, Pools, system_resolver
from extproc.state.endpoint import EndpointState

ANSWER_S: Final = 2.0
_MOST_AT_ONCE: Final = 256
_GONE: Final = frozenset({"unreachable", "silent", "broken"})
"""Faults of engines that do not answer; all others come from one that does."""
_MOST_NAMED: Final = 3


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What engines said.

    Attributes:
        pools: destination by endpoint id, by pool.
        states: by pool and endpoint id, what it said of itself.
        faults: by pool and endpoint id, why there is no list of what it serves.
        lost: names of hosts that cannot be resolved.
    """

    pools: Pools
    states: Mapping[str, Mapping[str, EndpointState]]
    faults: Mapping[str, Mapping[str, str]]
    lost: frozenset[str] = frozenset()


def findings(config: Config) -> Findings:
    """Ask all engines of the configuration, and judge what they say."""
    heard = asyncio.run(ask(config))
    errors = [f"{place}: {text}" for place, text in mistakes(config, heard)]
    return Findings(
        asked=sum(map(len, heard.pools.values())),
        errors=errors,
        warnings=[f"{place}: {text}" for place, text in warnings(config, heard)],
    )


async def ask(config: Config, answer_s: float = ANSWER_S) -> Heard:
    """Ask every endpoint of every pool for its list of models, all at once, each for so many seconds at most."""
    lost: set[str] = set()

    async def resolve(host: str) -> Sequence[str]:
        try:
            async with asyncio.timeout(answer_s):
                return await system_resolver(host)
        except (OSError, UnicodeError):  # UnicodeError: a label longer than DNS allows
            lost.add(host)
            return ()

    membership = Membership(resolve)
    await membership.apply(config)
    pools, room = membership.current(), asyncio.Semaphore(_MOST_AT_ONCE)
    async with new_session("check") as session:

        async def one(destination: str) -> tuple[EndpointState, str]:
            async with room:
                return await _asked(session, destination, answer_s)

        keys = [(pool, endpoint) for pool, members in pools.items() for endpoint in members]
        told = await asyncio.gather(*(one(pools[pool][endpoint]) for pool, endpoint in keys))
    states: dict[str, dict[str, EndpointState]] = {pool: {} for pool in pools}
    faults: dict[str, dict[str, str]] = {pool: {} for pool in pools}
    for (pool, endpoint), (state, fault) in zip(keys, told, strict=True):
        states[pool][endpoint] = state
        if fault:
            faults[pool][endpoint] = fault
    return Heard(pools=pools, states=states, faults=faults, lost=frozenset(lost))


async def _asked(session: aiohttp.ClientSession, destination: str, answer_s: float) -> tuple[EndpointState, str]:
    """What an engine says of itself, and why it does not where that is so."""
    state = EndpointState(destination=destination, scraped_at=1.0)
    try:
        async with asyncio.timeout(answer_s):
            found = cards(await fetch(session, destination, MODELS_PAGE))
    except EngineError as error:
        return msgspec.structs.replace(state, reachable=error.fault not in _GONE), str(error)
    except TimeoutError:
        return msgspec.structs.replace(state, reachable=False), f"no answer within {answer_s:g} s"
    kind = "" if found.kind == "auto" else found.kind
    fault = "" if found.models or found.adapters else "the list is empty"
    return msgspec.structs.replace(state, kind=kind, models=found.models, adapters=found.adapters), fault


def mistakes(config: Config, heard: Heard) -> Iterator[tuple[str, str]]:
    """What cannot serve, by what the engines said: the place in the file, and the text."""
    for model, version, pool in _versions(config):
        members, states = heard.pools.get(pool, {}), heard.states.get(pool, {})
        for text in hindrances(config, model, version, members, states):
            gone = not any(state.reachable for state in states.values())
            remedy = f": start an engine there, or correct `pools.{pool}.endpoints`" if gone else ""
            yield _place(model, version), f"{text}{remedy}"


def warnings(config: Config, heard: Heard) -> Iterator[tuple[str, str]]:
    """What speaks against versions that can serve, and what cannot be told."""
    for pool, settings in config.pools.items():
        hosts = dict.fromkeys(split_address(each)[0] for each in settings.endpoints)
        if gone := [host for host in hosts if host in heard.lost]:
            yield f"pools.{pool}.endpoints", f"names that cannot be resolved: {_some(gone)}: correct them, or mend DNS"
        states = heard.states.get(pool, {})
        silent = [f"{name} ({fault})" for name, fault in heard.faults.get(pool, {}).items() if states[name].reachable]
        if silent:
            yield (
                f"pools.{pool}.endpoints",
                f"what these serve cannot be told, as GET {MODELS_PAGE} does not say: {_some(silent)}: look there",
            )
    for model, version, pool in _versions(config):
        members, states = heard.pools.get(pool, {}), heard.states.get(pool, {})
        if hindrances(config, model, version, members, states):
            continue
        for text in doubts(config, model, version, members, states):
            yield _place(model, version), text
        adapter, configured = config.models[model].by_version[version].adapter, config.pools[pool].engine
        kinds = {state.kind for state in states.values()} if configured == "auto" else {configured}
        if adapter and "tensorrt_llm" in kinds:
            yield (
                f"{_place(model, version)}.adapter",
                f"TensorRT-LLM lists no adapters: whether it can load `{adapter.name}` shows with the first request",
            )


def _versions(config: Config) -> Iterator[tuple[str, str, str]]:
    """Model, version and pool of all versions: those of shadows are among them."""
    for model, settings in config.models.items():
        for version, each in settings.by_version.items():
            yield model, version, each.pool


def _place(model: str, version: str) -> str:
    return f"models.{model}.versions.{version}" if version else f"models.{model}"


def _some(told: Sequence[str]) -> str:
    more = len(told) - _MOST_NAMED
    return ", ".join(told[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
