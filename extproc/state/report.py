"""What a Redis tells of itself, and what of that is wrong for a store like ours."""

from typing import Final

import msgspec

# Redis 6.2 and Valkey 7.2 are the oldest that the tests run on; the scripts need what they have.
_OLDEST: Final = {"redis": (6, 2), "valkey": (7, 2)}
_NEARLY_FULL: Final = 0.9
# Pins are the one kind of key that may go; those used longest ago, or least, are the ones nobody misses.
_GOOD_POLICIES: Final = frozenset({"volatile-lru", "volatile-lfu"})


class Report(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One server's own account, from its INFO. What it does not tell is 0 or empty.

    Attributes:
        kind: `redis` or `valkey`.
        version: as the server writes it.
        role: `master` or `replica`.
        used_bytes: memory that its data and buffers take.
        max_bytes: `maxmemory`; 0 for no limit.
        policy: `maxmemory-policy`.
        evicted_keys: keys that it evicted since its start.
        connected_clients: connections, replicas' left out.
        uptime_s: seconds since its start.
    """

    kind: str = "redis"
    version: str = ""
    role: str = ""
    used_bytes: int = 0
    max_bytes: int = 0
    policy: str = ""
    evicted_keys: int = 0
    connected_clients: int = 0
    uptime_s: int = 0


def parse_info(text: bytes) -> Report:
    """Read a reply to INFO: lines of `name:value`, `#` before headings. Unknown lines are passed over."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    told = {name: value.strip() for name, colon, value in lines if colon and not name.startswith("#")}
    valkey = told.get("valkey_version", "")
    role = told.get("role", "")
    return Report(
        kind="valkey" if valkey else "redis",
        version=valkey or told.get("redis_version", ""),
        role="replica" if role == "slave" else role,
        used_bytes=_count(told, "used_memory"),
        max_bytes=_count(told, "maxmemory"),
        policy=told.get("maxmemory_policy", ""),
        evicted_keys=_count(told, "evicted_keys"),
        connected_clients=_count(told, "connected_clients"),
        uptime_s=_count(told, "uptime_in_seconds"),
    )


def too_old(report: Report) -> str:
    """What to do about a version that is too old, in words; empty for one that will do, or that is not told."""
    oldest = _OLDEST[report.kind]
    parts = report.version.split(".")[:2]
    if not all(part.isdigit() for part in parts) or tuple(int(part) for part in parts) >= oldest:
        return ""
    return f"{report.kind} {report.version} is too old: use Redis 6.2 or Valkey 7.2 at least"


def findings(report: Report) -> tuple[str, ...]:
    """What of a report is wrong for the shared store, each with its remedy; empty when nothing is."""
    return tuple(text for _, text in _judged(report))


def words(report: Report) -> set[str]:
    """What of a report makes the server unfit for a ledger, in a word each; a cache at its cap that drops pins is fit.

    Of `old_version`, `read_only`, `nearly_full` with a policy that refuses writes then, and `bad_policy`.
    """
    return {word for word, _ in _judged(report) if word}


def _judged(report: Report) -> list[tuple[str, str]]:
    """Word and text of each finding; the word is empty for what deserves a line in the log and no more."""
    found = []
    if old := too_old(report):
        found.append(("old_version", old))
    if report.role == "replica":
        text = "it is a read-only replica: let redis.url name the master, or use redis+sentinel://"
        found.append(("read_only", text))
    return [*found, *_of_memory(report)] if report.max_bytes else found


def _of_memory(report: Report) -> list[tuple[str, str]]:
    found, full = [], report.used_bytes >= _NEARLY_FULL * report.max_bytes
    if report.policy == "noeviction":
        text = "it refuses every write once it is full: set maxmemory-policy to volatile-lru"
        found.append(("nearly_full" if full else "", text))
    elif report.policy and report.policy not in _GOOD_POLICIES:
        text = f"maxmemory-policy {report.policy} may evict the ledger: set it to volatile-lru"
        found.append(("bad_policy", text))
    if full:
        share = 100 * report.used_bytes // report.max_bytes
        found.append(("", f"it is {share} % full: raise maxmemory, or lower routing.session.max and redis.feed_cap"))
    return found


def _count(told: dict[str, str], name: str) -> int:
    value = told.get(name, "")
    return int(value) if value.isdigit() else 0
