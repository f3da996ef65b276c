"""Routes that engines have in common, and the shape of a table of them."""

from collections.abc import Callable
from urllib.parse import parse_qs

import msgspec

from extproc.sim.wire import JSON, Exchange, Request

Route = Callable[[Request, Exchange], None]
Routes = dict[bytes, dict[bytes, Route]]
"""Path, then method, to what answers."""

TEXT = b"text/plain; charset=utf-8"


def answer(exchange: Exchange, value: object, status: int = 200) -> None:
    """Answer with JSON."""
    exchange.send(status, msgspec.json.encode(value), JSON)


def query(request: Request, name: str, default: str) -> str:
    """Return the last value of a parameter of the query."""
    values = parse_qs(request.target.partition(b"?")[2].decode("latin-1")).get(name)
    return values[-1] if values else default


def constant(value: object) -> Route:
    """Return a route that always answers with the same JSON."""
    body = msgspec.json.encode(value)

    def route(request: Request, exchange: Exchange) -> None:
        del request
        exchange.send(200, body)

    return route


def healthy(request: Request, exchange: Exchange) -> None:
    """Answer 200 without a body."""
    del request
    exchange.send(200, b"", b"")


def words(text: bytes) -> Route:
    """Return a route that always answers with the same plain text."""

    def route(request: Request, exchange: Exchange) -> None:
        del request
        exchange.send(200, text, TEXT)

    return route
