"""Token ids from servers: a render server (`vllm launch render`), or the pool's own engines."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from extproc.clock import Clock
from extproc.config import EngineKind
from extproc.request.model import RouteKind
from extproc.tokens.cache import TokenCache
from extproc.tokens.exchanged import Bodies, bodies_of, of_render, of_tokenize
from extproc.tokens.http import Answer, Client
from extproc.tokens.values import Asked, Made, NoTokensError, Tally, Whole, Why

_ROUTES: Final = {
    RouteKind.CHAT: "/v1/chat/completions",
    RouteKind.COMPLETION: "/v1/completions",
    RouteKind.MESSAGES: "/v1/messages",
    RouteKind.RESPONSES: "/v1/responses",
}
_LACKING: Final = frozenset({401, 403, 404, 405, 501})
"""Answers of a server without the route: vLLM gives 403 without `--enable-scale-out`, older ones 404, and 401 with
`--api-key`, which leaves `/tokenize` open."""
_LACKING_S: Final = 300.0
"""How long that is remembered: an engine may be started again with the flag."""
_TRIES: Final = 2


class Known:
    """Whole prompts that a server was asked for before.

    Args:
        cache: where their ids are kept.
        pool: name of the pool, for the tally.
        tally: who counts what was found.
    """

    def __init__(self, cache: TokenCache, pool: str, tally: Tally) -> None:
        self._cache = cache
        self._pool = pool
        self._tally = tally

    def get(self, key: bytes) -> Made | None:
        """A prompt by its hash."""
        made = self._cache.get(key)
        if made is not None:
            self._tally.reused(self._pool, len(made.ids), 0)
        return made

    def keep(self, key: bytes, made: Made, *, lasting: bool) -> Made:
        """Keep a prompt and return it; one whose media may change behind their names is not kept."""
        if lasting or not made.media:
            self._cache.put(key, made)
        self._tally.reused(self._pool, 0, len(made.ids))
        return made


class Render:
    """A render server: exact for every conversation that its vLLM takes. Implements `values.Source`.

    It names images as the engines do where it was started with their version, model path and options of processing.

    Args:
        client: HTTP client.
        url: `http://host:port` of the server.
        known: prompts asked for before.
    """

    incremental = False

    def __init__(self, client: Client, url: str, known: Known) -> None:
        self._client = client
        self._url = url.rstrip("/")
        self._known = known

    async def made(self, asked: Asked) -> Made:
        """See `values.Source.made`."""
        bodies = await self._client.apart(bodies_of, asked, "vllm")
        if (made := self._known.get(bodies.key)) is not None:
            return made
        answer = await _rendered(self._client, asked, self._url, bodies)
        if answer.status in _LACKING and asked.kind not in (RouteKind.CHAT, RouteKind.COMPLETION):
            raise NoTokensError(Why.UNSUPPORTED)
        made = await self._client.apart(of_render, asked, answer)
        return self._known.keep(bodies.key, made, lasting=asked.lasting)


class Engines:
    """The pool's own engines. Implements `values.Source`.

    vLLM's render route where it answers, else `/tokenize` of vLLM and SGLang: exact for messages, tools and variables
    of the template, but it does not know whether an engine leaves tools out for a `tool_choice` of none, and does not
    name images. TensorRT-LLM tokenizes plain texts only.

    Args:
        client: HTTP client.
        known: prompts asked for before.
        endpoints: `ip:port` of the engines that can be asked now.
        kind: what they are.
        clock: when a missing route is looked for again.
    """

    incremental = False

    def __init__(
        self,
        client: Client,
        known: Known,
        endpoints: Callable[[], Sequence[str]],
        kind: Callable[[], EngineKind],
        clock: Clock,
    ) -> None:
        self._client = client
        self._known = known
        self._endpoints = endpoints
        self._kind = kind
        self._clock = clock
        self._lacking: dict[str, float] = {}
        self._turn = itertools.count()

    async def made(self, asked: Asked) -> Made:
        """See `values.Source.made`."""
        engine = self._kind()
        bodies = await self._client.apart(bodies_of, asked, engine)
        if (made := self._known.get(bodies.key)) is not None:
            return made
        plain = "/_internal/tokenize" if engine == "tensorrt_llm" else "/tokenize"
        for destination in self._turns():
            try:
                made = await self._ask(asked, f"http://{destination}", bodies, plain)
                return self._known.keep(bodies.key, made, lasting=asked.lasting)
            except NoTokensError as error:
                if error.why is not Why.FAILED:
                    raise
        raise NoTokensError(Why.FAILED)

    def _turns(self) -> Iterator[str]:
        """The engines to ask, one after another: another first one each time."""
        endpoints = self._endpoints()
        first = next(self._turn)
        for number in range(min(_TRIES, len(endpoints))):
            yield endpoints[(first + number) % len(endpoints)]

    async def _ask(self, asked: Asked, engine: str, bodies: Bodies, plain: str) -> Made:
        client, now = self._client, self._clock.monotonic()
        render = engine + _ROUTES[asked.kind]
        if bodies.render is not None and now >= self._lacking.get(render, 0.0):
            answer = await _rendered(client, asked, engine, bodies)
            if answer.status not in _LACKING:
                return await client.apart(of_render, asked, answer)
            self._lacking = {url: until for url, until in self._lacking.items() if until > now}
            self._lacking[render] = now + _LACKING_S
        if bodies.tokenize is None:
            raise NoTokensError(Why.IMAGES if asked.media else Why.UNSUPPORTED)
        return await client.apart(of_tokenize, await client.post(engine + plain, bodies.tokenize))


async def _rendered(client: Client, asked: Asked, server: str, bodies: Bodies) -> Answer:
    """Ask a render route. Versions that know no way to leave the tensors of images out send megabytes of them."""
    shows_media = asked.media or isinstance(asked.wanted, Whole)
    too_long = Why.IMAGES if shows_media else Why.FAILED
    return await client.post(f"{server}{_ROUTES[asked.kind]}/render", bodies.render or b"", too_long)
