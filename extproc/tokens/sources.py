"""Which source a pool's token ids come from."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import aiohttp
import msgspec

from extproc.clock import Clock
from extproc.config import EngineKind, Pool
from extproc.errors import ConfigError
from extproc.tokens.cache import TokenCache
from extproc.tokens.http import Client
from extproc.tokens.remote import Engines, Known, Render
from extproc.tokens.settings import chosen
from extproc.tokens.values import Asked, Made, NoTokensError, Source, Tally, Why

log = logging.getLogger(__name__)


class Making(msgspec.Struct, frozen=True):
    """What sources are made of.

    Attributes:
        session: HTTP client.
        threads: where work is done that takes the processor.
        endpoints: by pool name, `ip:port` of the engines that can be asked now.
        kind: by pool name, what its engines are.
        clock: time.
        tally: who counts what was found in caches.
    """

    session: aiohttp.ClientSession
    threads: Executor
    endpoints: Callable[[str], Sequence[str]]
    kind: Callable[[str], EngineKind]
    clock: Clock
    tally: Tally


class Loading:
    """A tokenizer's folder, read in a thread while requests go on without it. Implements `values.Source`."""

    incremental = True

    def __init__(self, path: Path, cache: TokenCache, pool: str, making: Making) -> None:
        self._work = asyncio.get_running_loop().run_in_executor(making.threads, _load, path, cache, pool, making)
        # Who asks is told; where nobody does, the warning below was enough.
        self._work.add_done_callback(lambda work: None if work.cancelled() else work.exception())

    async def made(self, asked: Asked) -> Made:
        """See `values.Source.made`."""
        try:
            source = await self._work
        except ConfigError:
            raise NoTokensError(Why.FAILED) from None
        return await source.made(asked)


class ByMedia:
    """One source for prompts with media, and another for all others. Implements `values.Source`."""

    def __init__(self, others: Source, media: Source) -> None:
        self.incremental = others.incremental
        self._others = others
        self._media = media

    async def made(self, asked: Asked) -> Made:
        """See `values.Source.made`."""
        return await (self._media if asked.media else self._others).made(asked)


def _load(path: Path, cache: TokenCache, pool: str, making: Making) -> Source:
    # Only here: what it needs may not be installed, and takes 0.1 s to import.
    from extproc.tokens.local import load

    try:
        return load(path, cache, making.threads, pool, making.tally)
    except ConfigError as error:
        log.warning("a pool's tokenizer cannot be used", extra={"pool": pool, "error": str(error)})
        raise


def source_of(name: str, pool: Pool, making: Making) -> Source:
    """The source that a pool is configured to have; `auto` takes the first that can be.

    A tokenizer's folder turns no images into tokens: with `auto`, servers are asked for prompts that show some.
    """
    tokens, cache = pool.tokens, TokenCache(pool.tokens.cache_mb << 20)
    source = chosen(tokens)
    if source != "local":
        return _remote(name, pool, making, cache)
    local = Loading(Path(tokens.tokenizer), cache, name, making)
    return local if tokens.source == "local" else ByMedia(local, _remote(name, pool, making, cache))


def _remote(name: str, pool: Pool, making: Making, cache: TokenCache) -> Source:
    """The render server where one is configured and not passed over, else the engines."""
    client, known = Client(making.session, making.threads), Known(cache, name, making.tally)
    if pool.tokens.url and pool.tokens.source != "engine":
        return Render(client, pool.tokens.url, known)
    return Engines(client, known, lambda: making.endpoints(name), lambda: making.kind(name), making.clock)
