"""TLS on the public listener of a real Envoy: versions, protocols, clients' certificates, files that change."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from extproc.config import Gateway
from extproc.config_gateway import Tls
from tests.certificates import Authority, Pair
from tests.waiting import until_async
from tests.wire.gateway import CHAT, Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Files:
    """The files that a gateway reads, and who issued them."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "first")
        self.other = Authority(folder, "other")
        self.clients = Authority(folder, "clients")
        self.certificate, self.key = folder / "live.pem", folder / "live.key"
        self.client = self.clients.issue("client.example")
        self.stranger = self.other.issue("stranger.example")
        self.put(self.authority.issue("127.0.0.1"))

    def put(self, pair: Pair) -> None:
        """Replace certificate and key as tools for certificates do: by moving new files over the old ones."""
        for new, place in ((pair.key, self.key), (pair.certificate, self.certificate)):
            fresh = place.with_suffix(".new")
            fresh.write_bytes(new.read_bytes())
            fresh.replace(place)

    def trusting(self, authority: Authority, shown: Pair | None = None) -> ssl.SSLContext:
        """How a client speaks that trusts one authority, and shows a certificate of its own or none."""
        context = ssl.create_default_context(cafile=str(authority.file))
        if shown:
            context.load_cert_chain(shown.certificate, shown.key)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """One set of files."""
    return Files(tmp_path_factory.mktemp("tls"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(files: Files) -> AsyncIterator[Running]:
    """A gateway that speaks TLS 1.3 only and asks for no certificate."""
    tls = Tls(certificate=str(files.certificate), key=str(files.key), min_version="1.3")
    async with running_gateway(Gateway(tls=tls), trust=files.trusting(files.authority)) as running:
        yield running


async def offered(running: Running, context: ssl.SSLContext) -> tuple[str | None, str | None]:
    """Version of TLS and protocol that a connection agrees on."""
    host, port = running.address
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="127.0.0.1")
    try:
        spoken: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return spoken.version(), spoken.selected_alpn_protocol()
    finally:
        writer.close()


async def test_requests_pass_over_tls(gateway: Running) -> None:
    """The engine learns that the client came over TLS; nothing else changes."""
    answer = await gateway.ask()
    assert answer.status == 200
    assert answer.json["headers"]["X-Forwarded-Proto"] == "https"


@pytest.mark.parametrize(("offer", "chosen"), [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), ([], None)])
async def test_both_protocols_are_offered(gateway: Running, files: Files, offer: list[str], chosen: str | None) -> None:
    """A client that speaks HTTP/2 gets it; one that says nothing speaks HTTP/1.1."""
    context = files.trusting(files.authority)
    if offer:
        context.set_alpn_protocols(offer)
    assert await offered(gateway, context) == ("TLSv1.3", chosen)


async def test_an_older_version_is_refused(gateway: Running, files: Files) -> None:
    """`min_version` binds."""
    context = files.trusting(files.authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await offered(gateway, context)


async def test_plain_http_is_not_answered_there(gateway: Running) -> None:
    """What is no TLS is closed without a word."""
    assert await gateway.raw(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n") == b""


async def test_new_files_are_shown_to_new_connections_and_cut_no_stream(gateway: Running, files: Files) -> None:
    """Certificates are replaced every few weeks, answers take minutes."""
    url = f"{gateway.envoy.url}{CHAT}?stream=2"
    old, new = files.trusting(files.authority), files.trusting(files.other)
    async with aiohttp.ClientSession() as http, http.post(url, data=b"{}", ssl=old) as streaming:
        files.put(files.other.issue("127.0.0.1"))

        async def new_one_is_shown() -> bool:
            try:
                return await offered(gateway, new) == ("TLSv1.3", None)
            except ssl.SSLCertVerificationError:
                return False

        await until_async(new_one_is_shown)
        with pytest.raises(ssl.SSLCertVerificationError):
            await offered(gateway, old)
        text = await streaming.text()
    assert text.endswith("data: [DONE]\n\n")
    files.put(files.authority.issue("127.0.0.1"))
    await until_async(lambda: shown(gateway, old))


async def shown(running: Running, context: ssl.SSLContext) -> bool:
    """Whether a client that trusts so can connect."""
    try:
        await offered(running, context)
    except ssl.SSLCertVerificationError:
        return False
    return True


async def test_files_that_are_no_pair_leave_the_old_ones_in_use(gateway: Running, files: Files) -> None:
    """Whoever replaces a key breaks nothing until its certificate is there as well."""
    wrong = files.other.issue("127.0.0.1")
    fresh = files.key.with_suffix(".new")
    fresh.write_bytes(wrong.key.read_bytes())
    fresh.replace(files.key)

    async def envoy_has_seen_it() -> bool:
        return await gateway.stat("sds.warmpath-certificate.key_rotation_failed") > 0

    await until_async(envoy_has_seen_it)
    assert await shown(gateway, files.trusting(files.authority))


async def test_clients_must_show_a_certificate_of_the_right_authority(files: Files) -> None:
    """With `client_ca`, nobody else gets as far as a request."""
    files.put(files.authority.issue("127.0.0.1"))
    tls = Tls(certificate=str(files.certificate), key=str(files.key), client_ca=str(files.clients.file))
    trust = files.trusting(files.authority, files.client)
    async with running_gateway(Gateway(tls=tls), trust=trust) as running:
        assert (await running.ask()).status == 200
        for context in (files.trusting(files.authority), files.trusting(files.authority, files.stranger)):
            async with aiohttp.ClientSession() as http:
                with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                    await http.post(f"{running.envoy.url}{CHAT}", data=b"{}", ssl=context)
        assert len(running.desk.calls) == 1
