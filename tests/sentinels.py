"""A master, its replica and three sentinels, as real processes: what a fleet with Sentinel has."""

import contextlib
import time
from collections.abc import Sequence
from urllib.parse import quote

import redis
from tests.servers import Program, Server, Startable, valkey9

NAME = "warm"
"""How the sentinels call the master."""
_COUNT = 3
_DOWN_AFTER_MS = 500
_READY_S = 30.0


class _Sentinel(Server):
    """One sentinel; it writes what it learns into its configuration."""

    def __init__(self, program: Program, watched: Server, lines: str, tls: Sequence[str]) -> None:
        super().__init__(program, tls=tls)
        if tls:
            options = dict(zip(tls[::2], tls[1::2], strict=True)) | {"--tls-port": str(self.tls_port)}
            lines += "".join(f"{name.removeprefix('--')} {value}\n" for name, value in options.items())
            lines += "tls-replication yes\n"
        (self.folder / "sentinel.conf").write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\nprotected-mode no\n"
            f"sentinel monitor {NAME} 127.0.0.1 {watched.shown_port} 2\n"
            f"sentinel down-after-milliseconds {NAME} {_DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {NAME} 3000\n{lines}"
        )

    def _command(self) -> list[str]:
        return [str(self.program.path), str(self.folder / "sentinel.conf"), "--sentinel"]


class SentinelFleet(Startable):
    """Starts all five and waits until the sentinels know each other; use it as a context manager.

    The master is noticed to be down after half a second; the replica takes over a second or two later.

    Args:
        password: of the data servers' default user; none when empty.
        sentinel_lines: further lines of the sentinels' configuration.
        program: what to start.
        tls: command line arguments that tell certificates, see `certificates.tls_arguments`: replication, the
            sentinels' talk and the store URL then use TLS.
    """

    def __init__(
        self,
        password: str = "",
        sentinel_lines: str = "",
        program: Program | None = None,
        tls: Sequence[str] = (),
    ) -> None:
        program = program or valkey9()
        guarded = ("--requirepass", password, "--masterauth", password) if password else ()
        settings = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", *guarded)
        if tls:
            settings = (*settings, "--tls-replication", "yes")
        if password:
            sentinel_lines += f"sentinel auth-pass {NAME} {password}\n"
        self._password = password or None
        first = Server(program, arguments=settings, tls=tls)
        follow = ("--replicaof", "127.0.0.1", str(first.shown_port))
        self.servers = [first, Server(program, arguments=(*settings, *follow), tls=tls)]
        self.sentinels = [_Sentinel(program, first, sentinel_lines, tls) for _ in range(_COUNT)]

    @property
    def url(self) -> str:
        """Store URL that names all sentinels."""
        scheme = "rediss" if self.sentinels[0].tls_port else "redis"
        hosts = ",".join(f"127.0.0.1:{each.shown_port}" for each in self.sentinels)
        login = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"{scheme}+sentinel://{login}{hosts}/{NAME}/0"

    @property
    def password(self) -> str | None:
        """Of the data servers' default user."""
        return self._password

    def master(self) -> Server:
        """The server that is a master and answers; with two of them, the one that most sentinels name."""
        votes: dict[int, int] = {}
        for sentinel in self.sentinels:
            with contextlib.suppress(redis.RedisError, OSError), sentinel.client(socket_timeout=1.0) as client:
                port = client.sentinel_get_master_addr_by_name(NAME)[1]
                votes[port] = votes.get(port, 0) + 1
        return max(self.servers, key=lambda each: votes.get(each.shown_port, 0))

    def others(self) -> list[Server]:
        """Data servers that are not the master."""
        master = self.master()
        return [each for each in self.servers if each is not master]

    def promoted(self, before: Server) -> bool:
        """Whether the sentinels name another master than `before`, which says itself that it is one."""
        master = self.master()
        return master is not before and _role(master, self._password) == "master"

    def start(self) -> None:
        """Start them. Raises TimeoutError when they do not find each other."""
        for each in (*self.servers, *self.sentinels):
            each.start()
        give_up = time.monotonic() + _READY_S
        while not (self._replicating() and all(_complete(each) for each in self.sentinels)):
            if time.monotonic() > give_up:
                raise TimeoutError("the sentinels do not know the replica and each other")
            time.sleep(0.05)

    def _replicating(self) -> bool:
        with self.servers[1].client(password=self._password) as client:
            return bool(client.info("replication").get("master_link_status") == "up")

    def stop(self) -> None:
        """End all of them."""
        for each in (*self.sentinels, *self.servers):
            each.stop()


def _role(server: Server, password: str | None) -> str:
    with contextlib.suppress(redis.RedisError, OSError), server.client(password=password, socket_timeout=1.0) as client:
        return str(client.info("replication")["role"])
    return ""


def _complete(sentinel: Server) -> bool:
    """Whether a sentinel knows the replica and both other sentinels, and sees the master alive."""
    with contextlib.suppress(redis.AuthenticationError), sentinel.client() as client:
        state = client.sentinel_master(NAME)
        alive = not state["is_sdown"] and not state["is_odown"]
        return bool(alive and state["num-slaves"] >= 1 and state["num-other-sentinels"] == _COUNT - 1)
    return True
