"""The hash slots of a cluster: which node has which."""

import binascii
from collections.abc import Iterable, Mapping
from typing import Any, Final

from extproc.state.where import Address, parse_address

SLOTS: Final = 16_384
_DIGITS: Final = 5
_NO_SLOTS: Final = "slots: no rows of first slot, last slot, host and port"


def slot_of(key: str) -> int:
    """Slot of a key: CRC16 (XMODEM) of what stands in its first pair of braces, or of all of it.

    The rule is that of the Redis Cluster specification, "Key distribution model" and "Hash tags".
    """
    _, brace, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    hashed = tag if brace and closed and tag else key
    return binascii.crc_hqx(hashed.encode(), 0) % SLOTS


def parse_slots(reply: Any, asked: Address) -> dict[int, Address]:
    """Master of each slot, from a reply to CLUSTER SLOTS.

    Args:
        reply: rows of first slot, last slot, master (host, port, ...), replicas. A host may be missing: the server
            knows none, and whoever reached it knows better.
        asked: the node that answered.

    Raises:
        ValueError: the reply is something else.
    """
    owners: dict[int, Address] = {}
    try:
        rows = [(range(first, last + 1), _node(host, port, asked)) for first, last, (host, port, *_), *_ in reply]
    except (TypeError, AttributeError, ValueError):
        raise ValueError(_NO_SLOTS) from None
    for slots, node in rows:
        if not slots or slots.start < 0 or slots.stop > SLOTS:
            raise ValueError(_NO_SLOTS)
        owners.update(dict.fromkeys(slots, node))
    return owners


def _node(host: bytes | None, port: int, asked: Address) -> Address:
    name = "" if host is None else host.decode()
    return Address(asked.host if name in {"", "?"} else name, int(port))


def parse_redirection(to: str, owners: Mapping[int, Address]) -> tuple[int, Address] | None:
    """Slot and node from what follows MOVED or ASK, as `3999 host:port`; None when it cannot be read.

    Args:
        to: what follows.
        owners: who was believed to have which slot, and was asked: an empty host means the host of that one.
    """
    number, _, place = to.partition(" ")
    host, _, port = place.rpartition(":")
    if not (number.isascii() and number.isdigit() and len(number) <= _DIGITS and int(number) < SLOTS):
        return None
    if not host and (asked := owners.get(int(number))) is not None:
        host = asked.host
    # IPv6 addresses come without brackets here.
    node = parse_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", 0)
    return None if node is None else (int(number), node)


def nodes(owners: Iterable[Address]) -> list[Address]:
    """Each node once, in the order in which they come."""
    return list(dict.fromkeys(owners))
