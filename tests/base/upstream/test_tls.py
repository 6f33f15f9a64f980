"""Engines behind https: verified by default, by authority and by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from kvproxy.base.errors import ConnectError, ConnectTimeout
from kvproxy.base.tls.files import ClientTls
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool
from kvproxy.base.upstream.transport import PoolTransport
from tests.base.upstream.calls import OK, fetch, post, until
from tests.support.certificates import Certificate, make_certificate
from tests.support.scripted import Peer, answer, scripted


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1")


async def test_a_trusted_certificate_is_accepted(certificate: Certificate) -> None:
    """With its authority in ca_file; the connection is kept like any other."""
    url, ca_file = "https://127.0.0.1", str(certificate.certificate)
    async with (
        scripted(answer(OK), tls=certificate.server_context(), url=url, ca_file=ca_file) as upstream,
        UpstreamPool() as pool,
    ):
        assert [await fetch(pool, upstream.origin, b"x" * 300_000) for _ in range(2)] == [b"ok"] * 2
        assert len(upstream.peers) == 1


async def test_an_unknown_authority_is_refused(certificate: Certificate) -> None:
    """Nothing is sent to an engine that cannot prove its name."""
    url = "https://127.0.0.1"
    async with (
        scripted(answer(OK), tls=certificate.server_context(), url=url) as upstream,
        UpstreamPool() as pool,
    ):
        with pytest.raises(ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await post(pool, upstream.origin)
        await until(lambda: pool.open == 0)
        assert not any(peer.requests for peer in upstream.peers)


async def test_another_hosts_certificate_is_refused(tmp_path: Path) -> None:
    """The name is checked, not only the authority."""
    other = make_certificate(tmp_path, "other.example")
    url, ca_file = "https://127.0.0.1", str(other.certificate)
    async with (
        scripted(answer(OK), tls=other.server_context(), url=url, ca_file=ca_file) as upstream,
        UpstreamPool() as pool,
    ):
        with pytest.raises(ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await post(pool, upstream.origin)


async def test_an_address_is_verified_for_the_name_it_stands_for(tmp_path: Path) -> None:
    """Endpoints that DNS resolved are connected to by address and trusted, and addressed, by name."""
    certificate = make_certificate(tmp_path, "engines.example")
    url, ca_file = "https://127.0.0.1", str(certificate.certificate)
    async with (
        scripted(answer(OK), tls=certificate.server_context(), url=url, ca_file=ca_file) as upstream,
        UpstreamPool() as pool,
    ):
        named = Origin.parse(str(upstream.origin), tls=ClientTls(ca_file), server_name="engines.example")
        assert await fetch(pool, named) == b"ok"
        assert f"engines.example:{named.port}".encode() in upstream.peers[0].requests[0]
        with pytest.raises(ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await post(pool, Origin.parse(str(named), tls=ClientTls(ca_file), server_name="other.example"))


async def test_an_httpx_client_too_trusts_by_name(tmp_path: Path) -> None:
    """Its URL holds the address; certificate and Host header have the name."""
    certificate = make_certificate(tmp_path, "engines.example")
    url, ca_file = "https://127.0.0.1", str(certificate.certificate)
    async with (
        scripted(answer(OK), tls=certificate.server_context(), url=url, ca_file=ca_file) as upstream,
        UpstreamPool() as pool,
        httpx.AsyncClient(
            transport=PoolTransport(pool, tls=ClientTls(ca_file), server_name="engines.example"), trust_env=False
        ) as client,
    ):
        assert (await client.get(f"{upstream.origin}/health")).content == b"ok"
        request = upstream.peers[0].requests[0].lower()
        assert request.count(b"\r\nhost: ") == 1
        assert f"\r\nhost: engines.example:{upstream.origin.port}\r\n".encode() in request


async def test_insecure_takes_any_certificate(certificate: Certificate) -> None:
    """Only when asked for."""
    async with (
        scripted(answer(OK), tls=certificate.server_context(), url="https://127.0.0.1") as upstream,
        UpstreamPool() as pool,
    ):
        origin = Origin.parse(str(upstream.origin), tls=ClientTls(insecure=True))
        assert await fetch(pool, origin) == b"ok"


async def test_a_missing_authority_file_is_a_connect_error(tmp_path: Path) -> None:
    """A certificate file that went away fails the attempt, not the proxy."""
    async with UpstreamPool() as pool:
        with pytest.raises(ConnectError):
            await post(pool, Origin.parse("https://127.0.0.1:1", tls=ClientTls(str(tmp_path / "none.pem"))))
        assert pool.open == 0


async def test_a_handshake_that_hangs_times_out() -> None:
    """The connect timeout includes TLS."""

    async def silent(peer: Peer) -> None:
        await peer.gone()

    async with scripted(silent) as upstream, UpstreamPool() as pool:
        origin = Origin.parse(str(upstream.origin).replace("http:", "https:"))
        with pytest.raises(ConnectTimeout):
            await post(pool, origin, timeouts=Timeouts(connect_s=0.05))
        await asyncio.sleep(0)
        assert pool.open == 0
