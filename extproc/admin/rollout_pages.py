"""The operator API as JSON over HTTP: `/v1/rollouts` on a keeper's admin page."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from extproc.admin.entry import Asking, Entry, operator
from extproc.admin.rollouts import RolloutCalls
from extproc.admin.values import Change, Forget, Promote, Start, Verdict
from extproc.errors import BadQuestionError, BodyTooLargeError, StoreError, UnauthorizedError, WarmpathError

PREFIX: Final = "/v1/rollouts"
MOST_BODY: Final = 64 * 1024
_BODY_S: Final = 10.0
_WHOLE: Final = re.compile(r"\d{1,9}")
_MOST_TEXT: Final = 500
T = TypeVar("T")
Page = Callable[[web.Request], Awaitable[msgspec.Struct]]


def routes(calls: RolloutCalls, entry: Entry) -> list[web.RouteDef]:
    """All pages. Those that change something want POST and a JSON object, which may be left out where it is empty."""

    async def status(request: web.Request) -> msgspec.Struct:
        _query(request)
        return await calls.status(request.match_info.get("model", ""))

    async def history(request: web.Request) -> msgspec.Struct:
        query = _query(request, "limit", "before")
        limit = query.get("limit", "100")
        if not _WHOLE.fullmatch(limit):
            raise BadQuestionError("limit: write a whole number")
        return await calls.history(request.match_info["model"], int(limit), query.get("before", ""))

    def changing(kind: type[T], call: Callable[[str, T, str], Awaitable[msgspec.Struct]]) -> Page:
        read = msgspec.json.Decoder(kind).decode

        async def page(request: web.Request) -> msgspec.Struct:
            _query(request)
            ask = _read(read, await _body(request))
            return await call(request.match_info["model"], ask, operator(_headers(request)))

        return page

    changes: dict[str, Page] = {
        "start": changing(Start, calls.start),
        "promote": changing(Promote, calls.promote),
        "pause": changing(Change, calls.pause),
        "resume": changing(Change, calls.resume),
        "abort": changing(Change, calls.abort),
        "forget": changing(Forget, calls.forget),
        "verdict": changing(Verdict, calls.verdict),
    }
    model = PREFIX + "/{model}"
    return [
        web.get(PREFIX, _admitted(entry, status, changes=False)),
        web.get(model, _admitted(entry, status, changes=False)),
        web.get(f"{model}/history", _admitted(entry, history, changes=False)),
        *(web.post(f"{model}/{name}", _admitted(entry, page, changes=True)) for name, page in changes.items()),
    ]


def _admitted(entry: Entry, page: Page, *, changes: bool) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A page for those who may call it, with errors as the gateway writes them."""

    async def answer(request: web.Request) -> web.Response:
        try:
            # Before anything of the request is read.
            await entry.admit(Asking(request.remote or "-", _headers(request), changes=changes))
            body, status, headers = msgspec.json.encode(await page(request)), 200, {}
        except WarmpathError as error:
            body, status, headers = error.body(), status_of(error), {"x-warmpath-reason": error.reason}
            if isinstance(error, UnauthorizedError):
                headers["www-authenticate"] = "Bearer"
        headers |= {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return web.Response(status=status, body=body, content_type="application/json", headers=headers)

    return answer


def status_of(error: WarmpathError) -> int:
    """HTTP status of an error. Where a request goes on without the store, an operator's call cannot."""
    return 503 if isinstance(error, StoreError) else error.status


def _headers(request: web.Request) -> dict[str, str]:
    """Headers by lower-case name; one that was sent several times is no token, no host and no content type."""
    return {name.lower(): ", ".join(request.headers.getall(name)) for name in request.headers}


def _query(request: web.Request, *known: str) -> dict[str, str]:
    query = request.query
    if wrong := [name for name in query if name not in known or len(query.getall(name)) > 1]:
        takes = f"this page takes {' and '.join(known)}, each once" if known else "this page takes none"
        raise BadQuestionError(f"parameter `{wrong[0][:64]}` of the URL: {takes}")
    return dict(query)


async def _body(request: web.Request) -> bytes:
    """The body. Raises BodyTooLargeError, or BadQuestionError when it does not come within its time."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            while piece := await request.content.readany():
                body += piece
                if len(body) > MOST_BODY:
                    raise BodyTooLargeError(f"the body is longer than {MOST_BODY} bytes")
    except TimeoutError:
        raise BadQuestionError(f"the body did not arrive within {_BODY_S:g} s") from None
    except (web.RequestPayloadError, ConnectionError):
        raise BadQuestionError("the body is not what its headers say, or ends early") from None
    return bytes(body)


def _read(read: Callable[[bytes], T], body: bytes) -> T:
    try:
        return read(body or b"{}")
    except msgspec.MsgspecError as error:
        raise BadQuestionError(f"the body: {error}"[:_MOST_TEXT]) from None
    except (RecursionError, UnicodeDecodeError):
        raise BadQuestionError("the body: nested too deeply, or no UTF-8") from None
