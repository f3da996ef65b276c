"""What a request continues: the session, the conversation or the stored response it belongs to, and its pins.

Plain functions of values. Names that are stored are keyed hashes or digests; no session id leaves the process.
"""

import msgspec
import xxhash

from extproc.choose.fleet import Pool
from extproc.config import Config
from extproc.request.model import Request
from extproc.request.session import pin_key


class Pins(msgspec.Struct, frozen=True, gc=False):
    """Which pin a request honours and which it leaves behind; empty keys stand for none.

    Attributes:
        key: key whose pin is honoured.
        next_key: key that the pick is pinned under; `key` when empty.
        strict: whether the pin holds while its endpoint can serve, whatever it costs.
        stored: whether it is of a stored response, which one engine has and no other: kept whatever the policy.
    """

    key: str = ""
    next_key: str = ""
    strict: bool = False
    stored: bool = False


def turn_of(request: Request) -> bytes:
    """Name of the turn that the request's answer ends: of its stored response, else of its conversation."""
    return response_digest(request, request.response) if request.response else request.turn


def follows_of(request: Request) -> bytes:
    """Name of the turn that the request continues; empty for none."""
    return response_digest(request, request.previous_response) if request.previous_response else request.follows


def response_digest(request: Request, response: str) -> bytes:
    """A stored response as the tables of turns know it: 16 bytes; two tenants never share one."""
    return xxhash.xxh3_128_digest(f"{request.tenant}\0{response}".encode("utf-8", "surrogatepass"))


def pins_of(config: Config, pool: Pool, request: Request) -> Pins:
    """The pins of a request.

    A stored response lives in one engine, which alone can continue it: its pin is strict. A session that the client
    names has one pin. A conversation that nobody names is recognised by the turn that it follows.
    """
    session = config.routing.session
    if request.previous_response or request.response:
        return Pins(
            key=_pin_key(config, pool, request, "response", request.previous_response),
            next_key=_pin_key(config, pool, request, "response", request.response),
            strict=bool(request.previous_response),
            stored=True,
        )
    if request.session:
        return Pins(key=_pin_key(config, pool, request, "session", request.session), strict=session.strict)
    if session.infer and request.turn:
        return Pins(
            key=_pin_key(config, pool, request, "turn", request.follows.hex()),
            next_key=_pin_key(config, pool, request, "turn", request.turn.hex()),
            strict=session.strict,
        )
    return Pins()


def _pin_key(config: Config, pool: Pool, request: Request, kind: str, name: str) -> str:
    """Two tenants that happen to use one session id have two sessions."""
    if not name:
        return ""
    return pin_key(secret_of(config), pool.name, f"{kind}\0{request.tenant}\0{name}")


def secret_of(config: Config) -> bytes:
    """Key of the hashes that sessions and tenants are known by; it may be longer than BLAKE2b takes."""
    return (config.routing.session.secret or f"warmpath:{config.redis.key_prefix}").encode()
