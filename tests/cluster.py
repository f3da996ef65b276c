"""A real cluster of Redis or Valkey nodes, formed without the command line client."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis
from extproc.state.keys import Keys
from extproc.state.slots import SLOTS, slot_of
from tests.ports import free_port
from tests.servers import Program, Server, Startable, valkey9

_READY_S = 30.0
_NODE_TIMEOUT_MS = 1000


class ClusterFleet(Startable):
    """Masters that share the slots evenly, in order, and their replicas; use it as a context manager.

    The slots of a node that died without a replica are not served; those of the others are.

    Args:
        masters: nodes with slots.
        replicas: replicas of each of them.
        program: what to start; Redis 7 or Valkey.
        tls: command line arguments that tell certificates, see `certificates.tls_arguments`; each node then has a port
            for TLS besides the one in the clear, and the nodes use it among themselves.
    """

    def __init__(
        self, masters: int = 3, replicas: int = 0, program: Program | None = None, tls: tuple[str, ...] = ()
    ) -> None:
        self._masters = masters
        self.nodes = [
            Server(
                program or valkey9(),
                arguments=(
                    *("--cluster-enabled", "yes", "--cluster-node-timeout", str(_NODE_TIMEOUT_MS)),
                    *("--cluster-port", str(free_port()), "--cluster-require-full-coverage", "no"),
                    *("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"),
                    *(("--tls-cluster", "yes") if tls else ()),
                ),
                tls=tls,
            )
            for _ in range(masters * (1 + replicas))
        ]

    @property
    def url(self) -> str:
        """Store URL that names all nodes."""
        scheme = "rediss" if self.nodes[0].tls_port else "redis"
        return f"{scheme}+cluster://" + ",".join(f"127.0.0.1:{node.shown_port}" for node in self.nodes)

    def client(self) -> Any:
        """A client of redis-py that finds the node of each key."""
        return redis.RedisCluster("127.0.0.1", self.nodes[0].port)

    def owner(self, pool: str, prefix: str = "warmpath") -> Server:
        """The node that has the pool now, as the first living node sees it."""
        slot = slot_of(Keys(prefix).pool(pool).load)
        for node in self.nodes:
            with contextlib.suppress(redis.RedisError, OSError), _client(node) as client:
                for first, last, (_, port, *_), *_ in client.execute_command("CLUSTER SLOTS"):
                    if first <= slot <= last:
                        return next(each for each in self.nodes if each.port == port)
        raise RuntimeError(f"no living node knows who has slot {slot}")

    def pools_apart(self) -> tuple[str, str]:
        """Names of two pools that lie on two nodes."""
        names = [f"pool-{number}" for number in range(100)]
        first = names[0]
        return first, next(name for name in names if self.owner(name) is not self.owner(first))

    def move(self, pool: str, to: Server, prefix: str = "warmpath") -> None:
        """Give the pool's slot to another node at once, with what is in it."""
        slot, source = slot_of(Keys(prefix).pool(pool).load), self.owner(pool, prefix)
        with _client(source) as old, _client(to) as new:
            ours, theirs = old.execute_command("CLUSTER MYID"), new.execute_command("CLUSTER MYID")
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ours)
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", theirs)
            while keys := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                old.execute_command("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)
            for client in (new, old):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", theirs)

    def half_move(self, pool: str, to: Server, prefix: str = "warmpath") -> None:
        """Begin to move the pool's slot and stop when no key is left at the old owner: it answers ASK."""
        slot, source = slot_of(Keys(prefix).pool(pool).load), self.owner(pool, prefix)
        with _client(source) as old, _client(to) as new:
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old.execute_command("CLUSTER MYID"))
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new.execute_command("CLUSTER MYID"))
            while keys := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                old.execute_command("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)

    def start(self) -> None:
        """Start the nodes and make them one cluster. Raises TimeoutError when they do not become one."""
        for node in self.nodes:
            node.start()
        clients = [_client(node) for node in self.nodes]
        share = SLOTS // self._masters
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            if number < self._masters:
                end = SLOTS if number == self._masters - 1 else (number + 1) * share
                client.execute_command("CLUSTER ADDSLOTS", *range(number * share, end))
        for other in self.nodes[1:]:
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", other.port, _bus_port(other))
        _until(lambda: all(_known(client) == len(clients) for client in clients), "know each other")
        for number, client in enumerate(clients[self._masters :]):
            master = clients[number % self._masters].execute_command("CLUSTER MYID")
            _until(partial(_follow, client, master), "take a replica")
        _until(lambda: all(_state(client) == "ok" for client in clients), "be one cluster")
        for client in clients[self._masters :]:
            _until(partial(_in_step, client), "replicate")
        for client in clients:
            client.close()

    def stop(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.stop()


def _client(node: Server) -> Any:
    return node.client(socket_timeout=5.0, decode_responses=True)


def _bus_port(node: Server) -> int:
    with _client(node) as client:
        return int(client.config_get("cluster-port")["cluster-port"])


def _known(client: Any) -> int:
    """Nodes that this one has shaken hands with, itself included."""
    lines = client.execute_command("CLUSTER NODES")
    rows = lines.values() if isinstance(lines, dict) else lines.splitlines()
    return sum("handshake" not in str(row) for row in rows)


def _state(client: Any) -> str:
    return str(client.execute_command("CLUSTER INFO")["cluster_state"])


def _follow(client: Any, master: str) -> bool:
    """Become a replica; False while the master is not known here yet."""
    with contextlib.suppress(redis.ResponseError):
        client.execute_command("CLUSTER REPLICATE", master)
        return True
    return False


def _in_step(client: Any) -> bool:
    return bool(client.info("replication").get("master_link_status") == "up")


def _until(check: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + _READY_S
    while not check():
        if time.monotonic() > give_up:
            raise TimeoutError(f"the nodes do not {what}")
        time.sleep(0.02)
