"""Token ids of requests: off the event loop, cached, inside a time budget, and never a reason for a request to fail."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import aiohttp
import msgspec

from extproc.clock import Clock
from extproc.config import Config, EngineKind, Model, TokenSettings
from extproc.request.model import Request
from extproc.state.exact_blocks import TokenPrompt
from extproc.tokens import asked as bodies
from extproc.tokens.http import new_session
from extproc.tokens.patience import Patience
from extproc.tokens.sources import Making, source_of
from extproc.tokens.values import Asked, Given, Made, NoTokensError, Source, Tally, Whole, Why

THREADS: Final = 2
MAX_RUNNING: Final = 32
"""Prompts that one worker works on at a time, those that nobody waits for any more among them."""
MAX_SHOWING: Final = 8
"""Of these, prompts with images, sounds or films: a server loads and measures each of them first."""
FORGIVEN_S: Final = 1.0
"""A prompt tokenized here that took no longer was only new and long."""
_INLINE_BYTES: Final = 32 << 10
"""Bodies up to here are read at once, in under 0.1 ms; a hop to a thread and back costs as much."""

_KINDS: Final[tuple[EngineKind, ...]] = ("vllm", "sglang", "tensorrt_llm")
_NAMELESS: Final = frozenset({"sglang", "tensorrt_llm"})
"""Engines whose events tell media in ways that no route tells beforehand: SGLang puts numbers that it makes of an image
in the place of its tokens."""

log = logging.getLogger(__name__)


class Recorder(Tally, Protocol):
    """Who counts what became of prompts."""

    def asked(self, pool: str, outcome: str, seconds: float) -> None:
        """A request waited so long for token ids; `outcome` is `ok` or one of `values.Why`."""
        ...


class Engines(msgspec.Struct, frozen=True):
    """What is known of the pools' engines.

    Attributes:
        endpoints: by pool name, `ip:port` of the engines that can be asked now.
        adapters: by pool name, names of LoRA adapters that its engines list.
        kinds: by pool name, kinds of engines that were recognised, as `EngineKind` has them.
    """

    endpoints: Callable[[str], Sequence[str]]
    adapters: Callable[[str], Collection[str]] = lambda _: ()
    kinds: Callable[[str], Collection[str]] = lambda _: ()

    def kind(self, pool: str) -> EngineKind:
        """What all recognised engines of a pool are; `auto` where none is, or they differ."""
        found = {*self.kinds(pool)}
        return next((kind for kind in _KINDS if found == {kind}), "auto")


class _Pool:
    """One pool's source, and how it is doing: with media, which take longer, apart."""

    def __init__(self, settings: TokenSettings, engine: EngineKind, source: Source) -> None:
        self.settings = settings
        self.engine: EngineKind = engine
        self.source = source
        self.patience = Patience()
        self.patience_with_media = Patience()


class _Work:
    """One prompt that is worked on.

    Attributes:
        path: the request's path.
        body: its body.
        request: what was read of it before.
        patience: how its source is doing with such prompts, as far as the body was read.
        media: whether it shows images, sounds or films.
        by_source: whether the pool's source was asked.
    """

    def __init__(self, path: str, body: bytes, request: Request, patience: Patience) -> None:
        self.path = path
        self.body = body
        self.request = request
        self.patience = patience
        self.media = False
        self.by_source = False


class Tokenizing:
    """Token ids for the requests of one worker. Lives in one event loop.

    Call `apply` with each configuration, and `close` at the end.

    Args:
        engines: what is known of engines.
        recorder: who counts.
        clock: time.
        replica: id of this worker, which servers may log.
    """

    def __init__(self, engines: Engines, recorder: Recorder, clock: Clock, replica: str) -> None:
        self._engines = engines
        self._recorder = recorder
        self._clock = clock
        self._replica = replica
        self._models: Mapping[str, Model] = {}
        self._pools: dict[str, _Pool] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._session: aiohttp.ClientSession | None = None
        self._running: set[asyncio.Task[TokenPrompt]] = set()
        self._showing = 0

    @property
    def running(self) -> int:
        """How many prompts are worked on."""
        return len(self._running)

    async def apply(self, config: Config) -> None:
        """Take a configuration: pools whose profiles may be precise get a source, others none.

        Sources that did not change keep what they know. A tokenizer is read in a thread, while requests go on without.
        """
        if self._session is None:
            self._session = new_session(self._replica)
        self._models = config.models
        pools = {}
        for name, pool in config.pools.items():
            old = self._pools.get(name)
            if pool.profiles == "estimated":
                continue
            if old is not None and (old.settings, old.engine) == (pool.tokens, pool.engine):
                pools[name] = old
                continue
            making = Making(
                self._session, self._threads, self._engines.endpoints, self._kind, self._clock, self._recorder
            )
            pools[name] = _Pool(pool.tokens, pool.engine, source_of(name, pool, making))
        self._pools = pools

    async def of(self, pool: str, path: str, body: bytes, request: Request) -> TokenPrompt | None:
        """The prompt of a request as its engines see it, within the pool's `tokens.budget_ms`.

        Args:
            pool: pool that serves it.
            path: its path.
            body: its body, without content encoding.
            request: what was read of it before.

        Returns:
            None when its token ids cannot be told exactly, or not in time; work on it then goes on for the next turn.
        """
        began = self._clock.monotonic()
        try:
            prompt, outcome = await self._in_time(pool, path, body, request), "ok"
        except NoTokensError as error:
            prompt, outcome = None, error.why
        self._recorder.asked(pool, outcome, self._clock.monotonic() - began)
        return prompt

    async def close(self) -> None:
        """Give up what is running, and let go of connections and threads."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            await self._session.close()

    async def _in_time(self, name: str, path: str, body: bytes, request: Request) -> TokenPrompt:
        pool = self._pools.get(name)
        if pool is None:
            raise NoTokensError(Why.NO_SOURCE)
        if self.running >= MAX_RUNNING:
            raise NoTokensError(Why.BUSY)
        began = self._clock.monotonic()
        resting = not pool.patience.allows(began)
        if resting and len(body) > _INLINE_BYTES:
            raise NoTokensError(Why.RESTING)
        work = _Work(path, body, request, pool.patience)
        task = asyncio.create_task(self._prompt(name, pool, work, resting=resting))
        self._running.add(task)
        task.add_done_callback(self._over)
        done, _ = await asyncio.wait({task}, timeout=pool.settings.budget_ms / 1000)
        if not done:
            work.patience.strike(self._clock.monotonic())
            task.add_done_callback(lambda late: self._came_late(pool, work, late, began))
            raise NoTokensError(Why.LATE)
        try:
            prompt = task.result()
        except NoTokensError as error:
            # One that refused, or was not asked, is well.
            if error.why is Why.FAILED:
                work.patience.strike(self._clock.monotonic())
            raise
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with tokens, the request is routed
            log.warning("token ids could not be made", extra={"pool": name, "error": type(error).__name__})
            work.patience.strike(self._clock.monotonic())
            raise NoTokensError(Why.FAILED) from None
        if work.by_source:
            work.patience.answered()
        return prompt

    def _over(self, task: asyncio.Task[TokenPrompt]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # Nobody may be waiting for it any more; what it raised was counted, or its request is gone.
            task.exception()

    def _came_late(self, pool: _Pool, work: _Work, task: asyncio.Task[TokenPrompt], began: float) -> None:
        if task.cancelled() or work.media:
            return
        error = task.exception()
        well = error is None or (isinstance(error, NoTokensError) and error.why is not Why.FAILED)
        if well and pool.source.incremental and self._clock.monotonic() - began <= FORGIVEN_S:
            work.patience.forgive()

    async def _prompt(self, name: str, pool: _Pool, work: _Work, *, resting: bool) -> TokenPrompt:
        """The prompt of a request."""
        engine, body = self._kind(name), work.body
        arguments = (work.request.kind, work.path, body, engine)
        if len(body) <= _INLINE_BYTES:
            asked = bodies.read(*arguments)
        else:
            asked = await asyncio.get_running_loop().run_in_executor(self._threads, bodies.read, *arguments)
        served, adapter = self._served(name, engine, asked, work.request.model)
        if isinstance(asked.wanted, Given):
            if asked.truncated:
                raise NoTokensError(Why.UNSUPPORTED)
            return TokenPrompt(asked.wanted.ids, adapter, asked.salt)
        if asked.media:
            if engine in _NAMELESS:
                raise NoTokensError(Why.IMAGES)
            work.media, work.patience = True, pool.patience_with_media
            resting = not work.patience.allows(self._clock.monotonic())
        if resting:
            raise NoTokensError(Why.RESTING)
        # An engine that has not loaded an adapter refuses its name; the base model's tokens are the same.
        named = "" if adapter and not isinstance(asked.wanted, Whole) else served
        work.by_source = True
        made = await self._made(pool.source, msgspec.structs.replace(asked, model=named))
        if made.media and engine in _NAMELESS:
            raise NoTokensError(Why.IMAGES)
        return TokenPrompt(made.ids, adapter, asked.salt, made.media)

    async def _made(self, source: Source, asked: Asked) -> Made:
        if not asked.media:
            return await source.made(asked)
        if self._showing >= MAX_SHOWING:
            raise NoTokensError(Why.BUSY)
        self._showing += 1
        try:
            return await source.made(asked)
        finally:
            self._showing -= 1

    def _kind(self, pool: str) -> EngineKind:
        configured = self._pools[pool].engine if pool in self._pools else "auto"
        return self._engines.kind(pool) if configured == "auto" else configured

    def _served(self, pool: str, engine: EngineKind, asked: Asked, name: str) -> tuple[str, str]:
        """The name that engines know a request's model by, and the LoRA adapter that it is; empty for none."""
        model = self._models.get(name)
        version = model.in_pool(pool) if model else None
        served = (version.served_as if version else None) or name
        if version and version.adapter:
            return version.adapter.name, version.adapter.name
        if asked.adapter:
            return served, asked.adapter
        if served in self._engines.adapters(pool):
            return served, served
        base, _, adapter = served.partition(":")
        if adapter and (engine == "sglang" or adapter in self._engines.adapters(pool)):
            return base, adapter
        return served, ""
