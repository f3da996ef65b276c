"""Reads one endpoint: finds out what engine it is and which of its pages carries its load, and remembers both.

What was found holds while it can be read; where the kind has a better page, that is tried now and then, because some
tell nothing before the engine's first request. After a lost connection, or `FORGET_AFTER` failures in a row, everything
is looked for anew: another version, or another engine, may have taken the address. Looking asks several pages, and is
done every `LOOK_EVERY_S` at most; in the meantime one page is asked, so that connections that fail are still counted.
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from extproc.config import EngineKind
from extproc.engines.adapter import About, Adapter, Reading
from extproc.engines.cards import MODELS_PAGE, cards
from extproc.engines.detect import candidates
from extproc.errors import EngineError
from extproc.fleet.health import Failure, Outcome
from extproc.state.endpoint import STALE_AFTER, EndpointState

FORGET_AFTER: Final = 3
LOOK_EVERY_S: Final = 5.0
ABOUT_EVERY_S: Final = 10.0
BETTER_EVERY_S: Final = 10.0

Fetch = Callable[[str], Awaitable[bytes]]
"""Asks the endpoint for a path; raises EngineError."""

_FAILURES: Final = {"unreachable": Failure.UNREACHABLE, "silent": Failure.SILENT}


class Told(NamedTuple):
    """What one scrape of the load brought.

    Attributes:
        outcome: the numbers, or why there are none.
        fault: what was wrong, of `engines.adapter.Fault`; empty when nothing was.
        detail: the same in words.
    """

    outcome: Outcome
    fault: str = ""
    detail: str = ""


def changes(before: EndpointState, after: EndpointState, told: Told) -> Iterator[tuple[str, dict[str, str]]]:
    """What of a scrape is worth a line in the log, and the fields of the line."""
    if after.reachable != before.reachable:
        yield "an endpoint answers again" if after.reachable else "an endpoint cannot be connected to", {}
    if bool(after.stalled_s) != bool(before.stalled_s):
        yield "an engine stands still" if after.stalled_s else "an engine goes on", {}
    if after.reachable and after.unread == STALE_AFTER:
        yield "an engine's numbers cannot be read", {"reason": told.fault, "error": told.detail}
    if before.stale and before.reachable and not after.stale:
        yield "an engine's numbers can be read again", {"engine": after.kind, "page": after.page}


class Described(NamedTuple):
    """What the slow pages brought.

    Attributes:
        abouts: what they told, in the adapter's order.
        faults: what was wrong with those that could not be read. A page that is not there is none: versions differ.
    """

    abouts: Sequence[About]
    faults: Sequence[str]


class Reader:
    """See the module. Not more than one `load` and one `about` may run at a time."""

    def __init__(self, adapters: Sequence[Adapter], configured: EngineKind) -> None:
        """Make a reader of an endpoint of which nothing is known.

        Args:
            adapters: those that there are.
            configured: kind that the configuration says; `auto` to find out.
        """
        self._adapters = adapters
        self._configured = configured
        self._adapter: Adapter | None = None
        self._page = ""
        self._owned: EngineKind = "auto"
        self._failures = 0
        self._look_at = -math.inf
        self._about_at = -math.inf
        self._better_at = -math.inf

    @property
    def kind(self) -> str:
        """Kind of the engine; empty while it is unknown."""
        return self._adapter.kind if self._adapter else ""

    async def load(self, fetch: Fetch, at: float) -> Told:
        """Read the load.

        Args:
            fetch: asks the endpoint.
            at: monotonic time, seconds.
        """
        try:
            if self._adapter and self._page:
                better = await self._better(self._adapter, fetch, at)
                reading = better or await _read(self._adapter, self._page, fetch)
            else:
                reading = await self._look(fetch, at)
        except EngineError as error:
            self._failures += 1
            if error.fault == "unreachable":
                self._page, self._about_at = "", -math.inf
            elif self._failures >= FORGET_AFTER:
                self._page = ""
            return Told(_FAILURES.get(error.fault, Failure.UNREADABLE), error.fault, str(error))
        self._failures = 0
        return Told(reading)

    def restarted(self) -> None:
        """The engine was started anew: what it tells on slow pages may be other than before."""
        self._about_at = -math.inf

    def about_due(self, at: float) -> bool:
        """Whether it is time to call `about`."""
        return self._adapter is not None and at >= self._about_at

    async def about(self, fetch: Fetch, at: float, spread: float) -> Described:
        """Read the slow pages; the next time comes after `ABOUT_EVERY_S` or a little less.

        Args:
            fetch: asks the endpoint.
            at: monotonic time, seconds.
            spread: 0 to 1, at random: engines that were met together are not asked together for ever.
        """
        self._about_at = at + ABOUT_EVERY_S * (1.0 - spread / 2)
        abouts, faults = list[About](), list[str]()
        adapter = self._adapter
        if adapter is None:
            return Described((), ())
        for paths in adapter.about_pages:
            fault = ""
            for path in paths:
                try:
                    abouts.append(adapter.about(path, await fetch(path)))
                except EngineError as error:
                    fault = error.fault
                else:
                    fault = ""
                if fault != "not_found":
                    break
            if fault not in {"", "not_found"}:
                faults.append(fault)
            if fault in _FAILURES:
                break
        return Described(abouts, faults)

    async def _better(self, adapter: Adapter, fetch: Fetch, at: float) -> Reading | None:
        """What a better page than the one in use tells, which then comes into use; None when there is none to be read.

        Raises:
            EngineError: the endpoint cannot be connected to, or is silent.
        """
        pages = adapter.load_pages
        if at < self._better_at or self._page == pages[0]:
            return None
        self._better_at = at + BETTER_EVERY_S
        for path in pages[: pages.index(self._page)]:
            try:
                reading = await _read(adapter, path, fetch)
            except EngineError as error:
                if error.fault in _FAILURES:
                    raise
                continue
            self._page = path
            return reading
        return None

    async def _look(self, fetch: Fetch, at: float) -> Reading:
        """Find adapter and page; between two looks, see whether one page can be read.

        Raises:
            EngineError: no page could be read; the first of them that is there says why.
        """
        if at < self._look_at:
            # What is read now is believed, and the next round looks for a better page.
            _, reading = await self._try(candidates(self._adapters, self._configured, self._owned), _Pages(fetch, 1))
            self._look_at = -math.inf
            return reading
        self._look_at = at + LOOK_EVERY_S
        if self._configured == "auto":
            self._owned = await _owner(fetch)
        order = candidates(self._adapters, self._configured, self._owned)
        if order and order[0].kind in {self._configured, self._owned}:
            self._adapter = order[0]  # its slow pages may be there even where its load is not
        (self._adapter, self._page), reading = await self._try(order, _Pages(fetch))
        self._about_at, self._better_at = -math.inf, at + BETTER_EVERY_S
        return reading

    async def _try(self, order: Sequence[Adapter], pages: "_Pages") -> tuple[tuple[Adapter, str], Reading]:
        """The first adapter and page that can be read. Raises EngineError when there is none."""
        why: EngineError | None = None
        for adapter in order:
            for path in adapter.load_pages:
                try:
                    return (adapter, path), await _read(adapter, path, pages.fetch)
                except EngineError as error:
                    if error.fault in _FAILURES:
                        raise
                    if why is None or why.fault == "not_found":
                        why = error
        raise why or EngineError("there is no adapter for this kind of engine", "other_kind")


class _Pages:
    """Pages that are asked for once, however many adapters want to read them.

    Args:
        fetch: asks the endpoint.
        most: how many are asked for; all others count as not found.
    """

    def __init__(self, fetch: Fetch, most: int = 100) -> None:
        self._fetch = fetch
        self._most = most
        self._came: dict[str, bytes | EngineError] = {}

    async def fetch(self, path: str) -> bytes:
        """See `Fetch`."""
        if path not in self._came:
            if len(self._came) >= self._most:
                raise EngineError("the page was not asked for", "not_found")
            try:
                self._came[path] = await self._fetch(path)
            except EngineError as error:
                self._came[path] = error
        came = self._came[path]
        if isinstance(came, EngineError):
            raise came
        return came


async def _owner(fetch: Fetch) -> EngineKind:
    """Kind that the list of models names as its owner; `auto` where it names none. It takes nothing out of an engine.

    Raises:
        EngineError: the endpoint cannot be connected to, or is silent.
    """
    try:
        return cards(await fetch(MODELS_PAGE)).kind
    except EngineError as error:
        if error.fault in _FAILURES:
            raise
        return "auto"


async def _read(adapter: Adapter, path: str, fetch: Fetch) -> Reading:
    reading = adapter.read(path, await fetch(path))
    return msgspec.structs.replace(reading, kind=adapter.kind, page=path)
