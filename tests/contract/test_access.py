"""Who may come in, on real servers: passwords, users that may only what we need, TLS, replicas that take no writes."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import StoreError
from extproc.state.redis import RedisStore
from extproc.state.trouble import Trouble, UnreachableError, trouble_of
from tests.certificates import Authority, tls_arguments
from tests.ports import free_port
from tests.servers import Server, or_skip, redis7
from tests.valkey import Valkey
from tests.verbs import every_verb
from tests.waiting import until_async

PATIENT_MS = 10_000.0
REPOSITORY = Path(__file__).parents[2]

# What a user of ours needs, and nothing that it does not; docs/operating.md has the same.
COMMANDS = frozenset(
    {
        *("ping", "info", "client|setname", "eval", "evalsha", "time"),
        *("get", "mget", "set", "del", "unlink", "exists", "pexpire", "persist", "pttl"),
        *("hset", "hget", "hmget", "hgetall", "hvals", "hlen", "hexists", "hscan", "hdel"),
        *("zadd", "zcard", "zrange", "zrangebyscore", "zpopmin", "zrem", "zremrangebyscore"),
        *("xadd", "xread", "xrevrange", "xtrim"),
    }
)
# A database other than 0, and a cluster, need these besides.
ELSEWHERE = frozenset({"select", "cluster|slots", "asking", "auth", "sentinel"})
# Commands that only mend what is damaged, or whose turn comes by age or number: not met by calling each verb once.
SELDOM = frozenset({"del", "hmget", "hvals", "mget", "pttl", "zcard", "zpopmin", "zrem", "zremrangebyscore"})


def rule(commands: frozenset[str], prefix: str = "warmpath") -> tuple[str, ...]:
    """Arguments of ACL SETUSER for the user `warmpath`."""
    allowed = (f"+{command}" for command in sorted(commands))
    return ("warmpath", "reset", "on", ">secret", f"~{prefix}:*", "-@all", *allowed)


@pytest.fixture(params=["valkey", "redis6_server", "redis7_server"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Each kind of server in turn, its users put back afterwards."""
    running: Server = request.getfixturevalue(request.param)
    yield running
    with running.client() as client:
        client.execute_command("ACL", "DELUSER", "warmpath")


def allow(server: Server, *arguments: str) -> None:
    """Set a user."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", *arguments)


@pytest.fixture
async def stores() -> AsyncIterator[list[RedisStore]]:
    """Stores to be closed at the end."""
    opened: list[RedisStore] = []
    yield opened
    for store in opened:
        await store.close()


def at(server: Server, login: str = "warmpath:secret@", prefix: str = "warmpath") -> RedisStore:
    """A store of that user."""
    return RedisStore(f"redis://{login}127.0.0.1:{server.port}", PATIENT_MS, prefix)


async def ready(store: RedisStore) -> bool:
    """Whether the store can be used by now."""
    try:
        await store.ping()
    except StoreError:
        return False
    return True


async def trouble(store: RedisStore) -> tuple[Trouble, str]:
    """What a call fails with, once a connection was tried."""
    with pytest.raises(StoreError) as caught:
        await store.ping()
    return trouble_of(caught.value), str(caught.value)


def test_the_rule_names_what_the_sources_send() -> None:
    """No command is sent, by scripts or by Python, that the rule leaves out; and it allows none that is not sent."""
    scripts = "\n".join(path.read_text() for path in (REPOSITORY / "redis").glob("*.lua"))
    modules = "\n".join(path.read_text() for path in (REPOSITORY / "extproc" / "state").glob("*.py"))
    sent = {name.lower() for name in re.findall(r"redis\.p?call\('([A-Z]+)'", scripts)}
    for name, second in re.findall(r'\(\s*"([A-Z]{3,})"(?:, "([A-Z]+)")?', modules):
        sent.add(f"{name}|{second}".lower() if name in {"CLIENT", "CLUSTER"} else name.lower())
    sent.discard("block")
    assert sent == COMMANDS | ELSEWHERE


async def test_a_user_with_our_keys_and_commands_can_do_everything(server: Server, stores: list[RedisStore]) -> None:
    """The rule suffices for every verb, and the user can do nothing outside of our keys."""
    allow(server, *rule(COMMANDS, "mine"))
    stores.append(at(server, prefix="mine"))
    await stores[0].ping()
    assert await every_verb(stores[0]) == {}
    stores.append(at(server, prefix="theirs"))
    failed = await every_verb(stores[1])
    assert {trouble_of(error) for error in failed.values()} == {Trouble.NO_PERMISSION}
    assert failed.keys() >= {"reserve", "append", "read", "states", "put_snapshot", "documents", "put_part", "record"}


@pytest.mark.parametrize("missing", sorted(COMMANDS))
async def test_a_missing_permission_is_told_as_such(server: Server, missing: str, stores: list[RedisStore]) -> None:
    """Each command may be left out alone: what needs it fails with `no_permission`, all else is served."""
    allow(server, *rule(COMMANDS - {missing}))
    with server.client() as client:
        client.script_flush()
    stores.append(at(server))
    assert await ready(stores[0]) is (missing != "ping")
    failed = await every_verb(stores[0])
    assert {trouble_of(error) for error in failed.values()} <= {Trouble.NO_PERMISSION}
    assert failed or missing in SELDOM | {"client|setname"}


async def test_a_wrong_password_heals_when_it_is_put_right(
    server: Server, stores: list[RedisStore], caplog: pytest.LogCaptureFixture
) -> None:
    """The remedy is logged without either password; once the server knows the password the same store works."""
    allow(server, *rule(COMMANDS))
    allow(server, "warmpath", "resetpass", ">another")
    stores.append(at(server))
    kind, text = await trouble(stores[0])
    assert kind is Trouble.WRONG_PASSWORD
    assert "refused the login (WRONGPASS): correct user and password in redis.url" in text
    logged = " ".join(str(record.__dict__) for record in caplog.records)
    assert "correct user and password" in logged
    assert "secret" not in logged
    allow(server, "warmpath", ">secret")
    await until_async(lambda: ready(stores[0]))


async def test_a_password_that_is_missing_or_too_much_is_told(server: Server, stores: list[RedisStore]) -> None:
    """A server that wants a password, and one that wants none, each name their own remedy."""
    stores.append(at(server, ":surplus@"))
    kind, text = await trouble(stores[0])
    assert kind is Trouble.WRONG_PASSWORD
    assert "leave the password out" in text or "correct user and password" in text
    with Server(server.program, arguments=("--requirepass", "wanted")) as guarded:
        lacking = at(guarded, "")
        kind, text = await trouble(lacking)
        await lacking.close()
    assert kind is Trouble.WRONG_PASSWORD
    assert "asks for a password (NOAUTH): write redis://user:password@host" in text


async def test_a_database_that_is_not_there_is_told(valkey: Valkey, stores: list[RedisStore]) -> None:
    """A number that the server does not have is a mistake of the URL."""
    stores.append(RedisStore(f"redis://127.0.0.1:{valkey.port}/99", PATIENT_MS))
    _, text = await trouble(stores[0])
    assert "refused the database of redis.url (ERR): choose one that it has" in text


async def test_a_replica_takes_no_writes_and_says_so(server: Server, stores: list[RedisStore]) -> None:
    """Writes fail as `read_only` by command and by script; once it is a master again the same store works."""
    stores.append(at(server, ""))
    await stores[0].ping()
    with server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", free_port())
        try:
            failed = await every_verb(stores[0])
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")
    assert {
        trouble_of(failed[verb]) for verb in ("reserve", "append", "put_states", "heartbeat", "put_document", "record")
    } == {Trouble.READ_ONLY}
    await until_async(lambda: ready(stores[0]))
    assert await every_verb(stores[0]) == {}


async def test_a_full_server_says_so(server: Server, stores: list[RedisStore]) -> None:
    """`maxmemory` with `noeviction`: what takes memory fails as `full`, by command and by script."""
    stores.append(at(server, ""))
    await stores[0].ping()
    with server.client() as client:
        client.config_set("maxmemory", 1)
        try:
            failed = await every_verb(stores[0])
        finally:
            client.config_set("maxmemory", 0)
    assert {trouble_of(failed[verb]) for verb in ("reserve", "append", "put_states", "put_document", "record")} == {
        Trouble.FULL
    }
    assert await every_verb(stores[0]) == {}


class Guarded:
    """A server with TLS, and the authority that signed its certificate."""

    def __init__(self, folder: Path, *hosts: str, clients: str = "no") -> None:
        self.authority = Authority(folder)
        certificates = tls_arguments(self.authority, self.authority.issue(*hosts), clients)
        self.server = Server(or_skip(redis7), tls=certificates)

    def store(self, **parameters: Any) -> RedisStore:
        """A store with these parameters of the URL, the authority's file among them unless it is another one."""
        parameters.setdefault("ssl_ca_certs", self.authority.file)
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        return RedisStore(f"rediss://127.0.0.1:{self.server.tls_port}?{query}", PATIENT_MS)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A server whose certificate is for the address it is reached at."""
    made = Guarded(tmp_path, "127.0.0.1", "localhost")
    with made.server:
        yield made


async def test_every_verb_works_over_tls(guarded: Guarded, stores: list[RedisStore]) -> None:
    """With the authority's file, certificate and address are verified, and all verbs work."""
    stores.append(guarded.store())
    await stores[0].ping()
    assert await every_verb(stores[0]) == {}


async def test_an_unknown_authority_is_refused_and_heals(
    guarded: Guarded, stores: list[RedisStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another authority's file: the log names the parameter; once the file is the right one the same store works."""
    other = Authority(tmp_path, "other")
    stores.append(guarded.store(ssl_ca_certs=other.file))
    kind, text = await trouble(stores[0])
    assert kind is Trouble.CERTIFICATE
    assert "give the one that did as ssl_ca_certs in redis.url" in text
    assert "ssl_ca_certs" in " ".join(str(getattr(record, "error", "")) for record in caplog.records)
    other.file.write_bytes(guarded.authority.file.read_bytes())
    await until_async(lambda: ready(stores[0]))


async def test_without_an_authority_the_systems_are_asked(guarded: Guarded, stores: list[RedisStore]) -> None:
    """A certificate is never believed for want of a file; only `ssl_cert_reqs=none` switches that off."""
    stores.append(RedisStore(f"rediss://127.0.0.1:{guarded.server.tls_port}", PATIENT_MS))
    assert (await trouble(stores[0]))[0] is Trouble.CERTIFICATE
    stores.append(RedisStore(f"rediss://127.0.0.1:{guarded.server.tls_port}?ssl_cert_reqs=none", PATIENT_MS))
    await stores[1].ping()


async def test_a_missing_file_is_named_as_a_trouble(guarded: Guarded, stores: list[RedisStore], tmp_path: Path) -> None:
    """A CA file that is not there, or is none, keeps the store waiting, not the process from starting."""
    stores.append(guarded.store(ssl_ca_certs=tmp_path / "absent.pem"))
    kind, text = await trouble(stores[0])
    assert kind is Trouble.CERTIFICATE
    assert "ssl_ca_certs" in text


async def test_a_certificate_for_another_host_is_refused(tmp_path: Path, stores: list[RedisStore]) -> None:
    """Signed by the right authority, for another name: refused, unless names are not to be checked."""
    guarded = Guarded(tmp_path, "redis.example")
    with guarded.server:
        stores.append(guarded.store())
        kind, text = await trouble(stores[0])
        assert kind is Trouble.CERTIFICATE
        assert "the certificate is for another host" in text
        stores.append(guarded.store(ssl_check_hostname="false"))
        await stores[1].ping()


async def test_a_server_may_ask_for_our_certificate(tmp_path: Path, stores: list[RedisStore]) -> None:
    """With `ssl_certfile` and `ssl_keyfile` it lets us in; without, the error names them."""
    guarded = Guarded(tmp_path, "127.0.0.1", clients="yes")
    with guarded.server:
        stores.append(guarded.store())
        kind, text = await trouble(stores[0])
        assert kind is Trouble.CERTIFICATE
        assert "ssl_certfile" in text
        pair = guarded.authority.issue("warmpath.example")
        stores.append(guarded.store(ssl_certfile=pair.certificate, ssl_keyfile=pair.key))
        await stores[1].ping()
        assert await every_verb(stores[1]) == {}


async def test_tls_and_clear_text_are_told_apart(guarded: Guarded, stores: list[RedisStore]) -> None:
    """The right server at the wrong port: each side of the mistake names the other form of the URL."""
    stores.append(RedisStore(f"rediss://127.0.0.1:{guarded.server.port}", PATIENT_MS))
    assert "by the port that speaks what it says, TLS or not" in (await trouble(stores[0]))[1]
    stores.append(RedisStore(f"redis://127.0.0.1:{guarded.server.tls_port}", PATIENT_MS))
    assert "write rediss:// in redis.url" in (await trouble(stores[1]))[1]


async def test_no_connection_is_no_other_trouble(stores: list[RedisStore]) -> None:
    """Nothing listens: `gone`."""
    stores.append(RedisStore(f"redis://127.0.0.1:{free_port()}", PATIENT_MS))
    with pytest.raises(UnreachableError) as caught:
        await stores[0].ping()
    assert caught.value.trouble is Trouble.GONE
