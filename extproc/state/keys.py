"""Names of the keys in Redis.

All keys of a pool, and all of a group of documents, carry one hash tag, so that Redis Cluster keeps them on one shard.
"""

from functools import lru_cache


class PoolKeys:
    """The keys of one pool.

    Attributes:
        load: hash endpoint -> five little-endian doubles: the leaky bucket (tokens, seconds, tokens a second), and what
            is in flight (sequences, output tokens).
        leases: sorted set replica -> end of its lease, milliseconds since the epoch.
        pins: sorted set session -> last use of its pin, milliseconds since the epoch; by it pins are bounded in number.
        counted: mark that the charges in flight were counted anew within the last lease.
        born: mark of the first heartbeat: another one than before says that everything was lost meanwhile.
        breakers: hash endpoint -> its breaker, see `redis/breaker.lua`.
        states: hash endpoint -> latest published state.
        feed: stream of deltas.
        snapshots: hash of what there is a snapshot of -> its head, see `redis/snapshot.lua`.
        part_prefix: what comes before the generation in the name of a part of a snapshot.
        flight_prefix: what comes before the replica in the name of its flight hash.
        pin_prefix: what comes before the session in the name of its pin.
    """

    __slots__ = (
        "_base",
        "born",
        "breakers",
        "counted",
        "feed",
        "flight_prefix",
        "leases",
        "load",
        "part_prefix",
        "pin_prefix",
        "pins",
        "snapshots",
        "states",
    )

    def __init__(self, prefix: str, pool: str) -> None:
        self._base = base = f"{prefix}:{{{pool}}}:"
        self.load = base + "load"
        self.leases = base + "leases"
        self.pins = base + "pins"
        self.counted = base + "counted"
        self.born = base + "born"
        self.breakers = base + "breakers"
        self.states = base + "states"
        self.feed = base + "feed"
        self.snapshots = base + "snapshots"
        self.part_prefix = base + "snapshot:"
        self.flight_prefix = base + "flight:"
        self.pin_prefix = base + "pin:"

    def flight(self, replica: str) -> str:
        """Hash charge id -> packed record: the open charges of one replica."""
        return self.flight_prefix + replica

    def pin(self, session: str) -> str:
        """String with the endpoint that a session is pinned to; `session` is already hashed."""
        return self.pin_prefix + session

    def part(self, generation: str, number: int) -> str:
        """String with one part of a snapshot."""
        return f"{self.part_prefix}{generation}:{number}"

    def holders(self, group: str) -> str:
        """Sorted set holder -> end of its lease, milliseconds since the epoch: those who share the work `group`."""
        return f"{self._base}hold:{group}:leases"

    def holdings(self, group: str) -> str:
        """String with who has which part of the work `group`, see `redis/hold.lua`."""
        return f"{self._base}hold:{group}"

    def quota(self, bucket: str) -> str:
        """String with how much of a limit is used, see `redis/quota.lua`; `bucket` is already hashed."""
        return f"{self._base}quota:{bucket}"

    def claim(self, key: str) -> str:
        """String with who has a key; `key` is already hashed."""
        return f"{self._base}claim:{key}"

    def void(self, charge_id: str) -> str:
        """Mark of a charge that was settled before its reservation arrived."""
        return f"{self._base}void:{charge_id}"


class GroupKeys:
    """The keys of a group of documents.

    Attributes:
        documents: hash name -> revision and payload of a document, see `redis/document.lua`.
    """

    __slots__ = ("_base", "documents")

    def __init__(self, prefix: str, group: str) -> None:
        self._base = base = f"{prefix}:{{{shard(group)}}}:"
        self.documents = base + "documents"

    def parts(self, name: str) -> str:
        """Hash writer -> its part of something."""
        return f"{self._base}parts:{name}"

    def records(self, name: str) -> str:
        """Stream of records, oldest first."""
        return f"{self._base}records:{name}"


def shard(group: str) -> str:
    """What stands in a group's keys where a pool stands in others: no pool has this name."""
    return f"documents/{group}"


class Keys:
    """The keys of all pools and groups under one prefix."""

    def __init__(self, prefix: str = "warmpath") -> None:
        if not prefix or set(prefix) & set("{}"):
            raise ValueError(f"key prefix {prefix!r}: use a non-empty text without braces")
        self._pool = lru_cache(maxsize=256)(lambda pool: PoolKeys(prefix, pool))
        self._prefix = prefix

    def pool(self, name: str) -> PoolKeys:
        """Keys of the pool `name`. Raises ValueError for a name that would break the hash tag."""
        if not name or set(name) & set("{}"):
            raise ValueError(f"pool name {name!r}: use a non-empty text without braces")
        return self._pool(name)

    def group(self, name: str) -> GroupKeys:
        """Keys of the group `name`. Raises ValueError for a name that would break the hash tag."""
        if not name or set(name) & set("{}"):
            raise ValueError(f"group {name!r}: use a non-empty text without braces")
        return GroupKeys(self._prefix, name)


def parse_feed_id(text: str) -> tuple[int, int]:
    """Milliseconds and sequence number of a feed id. Raises ValueError for a text that is no feed id."""
    millis, _, sequence = text.partition("-")
    try:
        return int(millis), int(sequence or 0)
    except ValueError:
        raise ValueError("feed id: pass one that `append` or `read` returned, or '0'") from None
