"""Certificates replaced on disk: used from the next handshake on, and never instead of ones that work."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvproxy.app import Proxy
from kvproxy.base.errors import ConnectError
from kvproxy.base.metrics.exposition import Registry
from kvproxy.base.tls.files import ClientTls, ServerTls, UnusableFile, read_expiry
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.operate.metrics.catalog import make_metrics
from kvproxy.proxy.listener.server import serve
from kvproxy.proxy.settings import ListenerTls
from tests.base.upstream.calls import OK, fetch, post
from tests.operate.doctor.setup import parsed
from tests.support.certificates import Certificate, encrypt, make_certificate
from tests.support.scripted import answer, scripted

NOW = float(int(datetime.datetime.now(datetime.UTC).timestamp()))
DAY_S = 86_400.0


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def make(folder: Path, *, days: float = 90.0) -> Certificate:
    """Return a pair in a folder of its own, that ends so many days after NOW."""
    folder.mkdir()
    return make_certificate(
        folder, "127.0.0.1", until=datetime.datetime.fromtimestamp(NOW + days * DAY_S, datetime.UTC)
    )


@pytest.fixture
def first(tmp_path: Path) -> Certificate:
    return make(tmp_path / "first")


@pytest.fixture
def second(tmp_path: Path) -> Certificate:
    return make(tmp_path / "second", days=45)


def replace(old: Certificate, new: Certificate) -> None:
    """As cert-manager does: the same names, other files."""
    for name in ("certificate", "private_key"):
        shutil.copy(getattr(new, name), getattr(old, name).with_suffix(".new"))
        getattr(old, name).with_suffix(".new").replace(getattr(old, name))


def settings(files: Certificate, client_ca: str = "") -> ListenerTls:
    return ListenerTls(certificate=str(files.certificate), private_key=str(files.private_key), client_ca=client_ca)


async def shown_by(url: str) -> bytes:
    """Return the certificate that a listener shows, as DER."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return shown


def der(files: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(files.certificate.read_text())


async def test_a_replaced_certificate_is_served_without_a_restart(first: Certificate, second: Certificate) -> None:
    """From the next look on; connections that are open stay."""
    certificates = CertificateWatch()
    old = der(first)
    async with (
        serve(hello, tls=settings(first), certificates=certificates) as url,
        httpx.AsyncClient(verify=ssl.create_default_context(cafile=first.certificate)) as client,
    ):
        await client.get(url)
        assert await shown_by(url) == old
        replace(first, second)
        assert await shown_by(url) == old
        await certificates.look()
        assert await shown_by(url) == der(second) != old
        assert (await client.get(url)).text == "hello"  # the client trusts the old one alone: a kept connection


async def test_authorities_of_clients_are_read_again(first: Certificate, second: Certificate, tmp_path: Path) -> None:
    """A client that the new file names is served, one that only the old file named is not."""
    certificates = CertificateWatch()
    authorities = tmp_path / "clients.pem"
    shutil.copy(first.certificate, authorities)

    async def try_as(files: Certificate) -> bool:
        context = ssl.create_default_context(cafile=first.certificate)
        context.load_cert_chain(files.certificate, files.private_key)
        async with httpx.AsyncClient(verify=context) as client:
            try:
                return (await client.get(url)).status_code == 200
            except httpx.TransportError:
                return False

    async with serve(hello, tls=settings(first, str(authorities)), certificates=certificates) as url:
        assert [await try_as(first), await try_as(second)] == [True, False]
        shutil.copy(second.certificate, authorities)
        await certificates.look()
        assert [await try_as(first), await try_as(second)] == [False, True]


async def test_files_that_cannot_be_used_keep_the_earlier_ones(
    first: Certificate, second: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    """They are named in the log and on the page, and counted; good files end that."""
    registry = Registry()
    certificates = CertificateWatch(metrics=make_metrics(registry), wall_clock=lambda: NOW)
    old = der(first)

    def count(result: str) -> float | None:
        return registry.get_sample_value("kvproxy_certificate_reloads_total", {"result": result})

    async with serve(hello, tls=settings(first), certificates=certificates) as url:
        shutil.copy(second.private_key, first.private_key)  # half of it
        await certificates.look()
        assert await shown_by(url) == old
        assert f"'{first.private_key}' does not belong to the certificate" in caplog.text
        (finding,) = certificates.list_findings()
        assert finding.place == "listen"
        assert "does not belong to" in finding.what
        assert (count("refused"), count("applied")) == (1, 0)
        await certificates.look()
        assert count("refused") == 1, "reported once"
        replace(first, second)
        await certificates.look()
        assert await shown_by(url) == der(second)
        assert (count("refused"), count("applied")) == (1, 1)
        assert not list(certificates.list_findings())
        first.certificate.unlink()
        await certificates.look()
        (finding,) = certificates.list_findings()
        assert "cannot be read: No such file" in finding.what


async def test_two_files_replaced_one_after_the_other_are_no_fault(
    first: Certificate, second: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    """A look between them waits for the next one; only then it is reported."""
    certificates = CertificateWatch(interval_s=0.001)
    certificates.server_context("listen", settings(first).files)
    shutil.copy(second.certificate, first.certificate)
    await certificates.look(patient=True)
    assert not list(certificates.list_findings())
    shutil.copy(second.private_key, first.private_key)
    await certificates.look(patient=True)
    assert not list(certificates.list_findings())
    assert "not used" not in caplog.text
    shutil.copy(second.certificate, first.private_key)
    await certificates.look(patient=True)
    assert not list(certificates.list_findings())
    await certificates.look(patient=True)
    assert len(list(certificates.list_findings())) == 1


async def test_while_entered_it_looks_by_itself(first: Certificate, second: Certificate) -> None:
    """Every `interval_s`."""
    async with (
        CertificateWatch(interval_s=0.001) as certificates,
        serve(hello, tls=settings(first), certificates=certificates) as url,
    ):
        replace(first, second)
        async with asyncio.timeout(30):
            while await shown_by(url) != der(second):
                pass


async def test_a_disk_that_hangs_keeps_what_is_served(
    first: Certificate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look is given up; the event loop does not wait for it."""
    certificates = CertificateWatch()
    certificates.server_context("listen", settings(first).files)

    async def hang(work: Callable[[], object], *, timeout_s: float) -> object:
        raise TimeoutError

    monkeypatch.setattr(certificates._reading, "call", hang)
    await certificates.look()
    assert "certificates are not read again: their disk hangs" in caplog.text


async def test_authorities_of_engines_are_read_again(first: Certificate, second: Certificate, tmp_path: Path) -> None:
    """For new connections."""
    authorities = tmp_path / "engines.pem"
    shutil.copy(second.certificate, authorities)
    certificates = CertificateWatch()
    async with (
        scripted(answer(OK), tls=first.server_context(), url="https://127.0.0.1", ca_file=str(authorities)) as engine,
        UpstreamPool(certificates=certificates) as pool,
    ):
        with pytest.raises(ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await post(pool, engine.origin)
        shutil.copy(first.certificate, authorities)
        await certificates.look()
        assert await fetch(pool, engine.origin, b"x") == b"ok"


async def test_engines_that_require_a_certificate_are_shown_one(first: Certificate, second: Certificate) -> None:
    """`cert_file` and `key_file`; a file with both will do. Without, the engine cannot be used."""
    required = first.server_context()
    required.verify_mode = ssl.CERT_REQUIRED
    required.load_verify_locations(second.certificate)
    both = second.certificate.with_name("both.pem")
    both.write_text(second.certificate.read_text() + second.private_key.read_text())
    ca_file = str(first.certificate)
    async with (
        scripted(answer(OK), tls=required, url="https://127.0.0.1", ca_file=ca_file) as engine,
        UpstreamPool() as pool,
    ):
        pair = ClientTls(ca_file, False, str(second.certificate), str(second.private_key))
        for tls in (pair, ClientTls(ca_file, cert_file=str(both))):
            assert await fetch(pool, Origin.parse(str(engine.origin), tls=tls), b"x") == b"ok"
        with pytest.raises(Exception, match=r".") as failed:
            await post(pool, engine.origin)
        assert not isinstance(failed.value, AssertionError)


async def test_an_engines_certificate_that_cannot_be_loaded_fails_its_connection_alone(first: Certificate) -> None:
    """As every failed connection, with the file named. No pass phrase is asked for."""
    encrypt(first.private_key, b"sesame")
    tls = ClientTls(str(first.certificate), False, str(first.certificate), str(first.private_key))
    async with UpstreamPool() as pool:
        with pytest.raises(ConnectError, match="is encrypted by a pass phrase"):
            await post(pool, Origin.parse("https://127.0.0.1:1", tls=tls))


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT"])
async def test_plain_http_on_the_tls_port_gets_a_sentence(first: Certificate, method: str) -> None:
    """As a response that clients show their users; https goes on."""
    async with serve(hello, tls=settings(first)) as url, httpx.AsyncClient() as client:
        response = await client.request(method, url.replace("https:", "http:"))
        assert response.status_code == 400
        assert response.headers["connection"] == "close"
        if method != "HEAD":
            assert "Use https:// in the URL" in response.text
        assert await shown_by(url) == der(first)


async def test_neither_http_nor_tls_is_closed(first: Certificate) -> None:
    """Without an answer; nor is more of a request that was answered."""
    async with serve(hello, tls=settings(first)) as url:
        for sent, answered in (
            (b"\x00\x01garbage" * 10, b""),
            (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
            writer.write(sent)
            if answered:
                assert (await reader.readuntil(b"\r\n")).strip() == answered
                writer.write(sent)
            writer.write_eof()
            async with asyncio.timeout(30):
                rest = await reader.read()
            assert rest.count(b"HTTP/1.1") == 0
            writer.close()


def test_a_listener_does_not_begin_with_files_it_cannot_use(first: Certificate, second: Certificate) -> None:
    """The error names the setting."""
    with pytest.raises(UnusableFile, match="does not belong to") as refused:
        CertificateWatch().server_context("listen", ServerTls(str(first.certificate), str(second.private_key)))
    assert refused.value.field == "private_key"


async def test_how_long_certificates_last_is_a_metric_and_below_14_days_a_finding(tmp_path: Path) -> None:
    """The first to expire of a place counts, and of its chain."""
    registry = Registry()
    now = NOW
    certificates = CertificateWatch(metrics=make_metrics(registry), wall_clock=lambda: now)
    long, short = make(tmp_path / "long", days=90), make(tmp_path / "short", days=20)
    chain = tmp_path / "chain.pem"
    chain.write_text(long.certificate.read_text() + short.certificate.read_text())
    certificates.server_context("listen", ServerTls(str(chain), str(long.private_key)))
    certificates.server_context("picker", ServerTls(str(long.certificate), str(long.private_key)), alpn=["h2"])
    certificates.client_context(ClientTls(str(long.certificate)))

    def left(place: str) -> float | None:
        return registry.get_sample_value("kvproxy_certificate_expires_seconds", {"place": place})

    assert [left(place) for place in ("listen", "picker", "endpoints")] == [20 * DAY_S, 90 * DAY_S, None]
    assert not list(certificates.list_findings())
    now += 7 * DAY_S
    (finding,) = certificates.list_findings()
    assert (finding.place, finding.what) == ("listen", "the certificate expires in 13.0 days")
    now += 14 * DAY_S
    (finding,) = certificates.list_findings()
    assert finding.what == "the certificate has expired"


def test_the_end_of_a_certificate_is_read_from_its_file(tmp_path: Path) -> None:
    """Also after 2049, which X.509 writes another way; nothing is read from what is none."""
    for days in (1, 20_000):
        assert read_expiry(str(make(tmp_path / str(days), days=days).certificate)) == NOW + days * DAY_S
    for text in ("", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"):
        (tmp_path / "none.pem").write_text(text)
        assert read_expiry(str(tmp_path / "none.pem")) is None
    assert read_expiry(str(tmp_path / "missing.pem")) is None


async def test_a_reload_reads_certificates_too(first: Certificate, second: Certificate) -> None:
    """Also if nothing else has changed, and without waiting for the next look."""
    config = parsed({"endpoints": ["http://127.0.0.1:9"], "listen": {"tls": settings(first).model_dump()}})
    proxy = Proxy(config)
    async with proxy, serve(hello, tls=settings(first), certificates=proxy.certificates) as url:
        replace(first, second)
        await proxy.reload(config)
        assert await shown_by(url) == der(second)
