"""Why an address cannot be connected to: each cause has its own fix."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from pathlib import Path

import pytest

from kvproxy.base.tls.files import ClientTls
from kvproxy.base.types import utc_seconds
from kvproxy.base.upstream.origin import Origin
from kvproxy.lab.simulator.json_app import JsonApp
from kvproxy.operate.doctor.check_reachability import check_connection
from kvproxy.operate.doctor.report import Finding, Severity
from kvproxy.operate.doctor.tools import explain_failure, try_connect
from kvproxy.proxy.settings import ListenerTls
from tests.support.certificates import Certificate, make_certificate
from tests.support.loopback import serve


async def look(origin: Origin, *, timeout_s: float = 20.0) -> Finding:
    """Return the verdict on one address."""
    check = check_connection("endpoint a", origin, lambda: try_connect(origin, timeout_s=timeout_s), utc_seconds)
    (found,) = await check.collect()
    return found


def tls_of(files: Certificate) -> ListenerTls:
    """Return a listener with this certificate."""
    return ListenerTls(certificate=str(files.certificate), private_key=str(files.private_key))


async def test_a_good_certificate(tmp_path: Path) -> None:
    """Trusted by its authority, and lasting."""
    month = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=30)
    files = make_certificate(tmp_path, "127.0.0.1", until=month)
    async with serve(JsonApp(), tls=tls_of(files)) as url:
        found = await look(Origin.parse(url, tls=ClientTls(str(files.certificate))))
    assert (found.severity, found.what) == (Severity.OK, f"reachable at {url}")


async def test_a_certificate_that_expires_soon(tmp_path: Path) -> None:
    """Said before it happens."""
    files = make_certificate(tmp_path, "127.0.0.1")
    async with serve(JsonApp(), tls=tls_of(files)) as url:
        found = await look(Origin.parse(url, tls=ClientTls(str(files.certificate))))
    assert found.severity is Severity.WARNING
    assert "expires in 1.0 days" in found.what


async def test_an_untrusted_certificate(tmp_path: Path) -> None:
    """The fix is the authority's file, not `insecure`."""
    files = make_certificate(tmp_path, "127.0.0.1")
    async with serve(JsonApp(), tls=tls_of(files)) as url:
        found = await look(Origin.parse(url))
    assert "not signed by an authority trusted here" in found.what
    assert "`ca_file`" in found.fix


async def test_a_certificate_for_another_name(tmp_path: Path) -> None:
    """Trusted, but not this host's."""
    files = make_certificate(tmp_path, "engine.example")
    async with serve(JsonApp(), tls=tls_of(files)) as url:
        found = await look(Origin.parse(url, tls=ClientTls(str(files.certificate))))
        named = await look(Origin.parse(url, tls=ClientTls(str(files.certificate)), server_name="engine.example"))
    assert "is for another name" in found.what
    assert "`server_name`" in found.fix
    assert named.severity is Severity.WARNING  # only that it expires soon


async def test_an_insecure_endpoint(tmp_path: Path) -> None:
    """Nothing is verified, so nothing is said about the certificate."""
    files = make_certificate(tmp_path, "engine.example")
    async with serve(JsonApp(), tls=tls_of(files)) as url:
        found = await look(Origin.parse(url, tls=ClientTls(insecure=True)))
    assert found.severity is Severity.OK


async def test_https_to_a_plain_port() -> None:
    """The scheme is wrong, not the certificate."""
    async with serve(JsonApp()) as url:
        found = await look(Origin.parse(url.replace("http:", "https:")))
    assert "does not speak TLS as expected" in found.what
    assert "write http:// in the url" in found.fix


async def test_a_peer_that_never_shakes_hands() -> None:
    """Connected, and then silence."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        origin = Origin.parse(f"https://127.0.0.1:{silent.getsockname()[1]}")
        found = await look(origin, timeout_s=0.05)
    assert "accepts connections, but there is no TLS handshake in time" in found.what
    assert "Write http://" in found.fix


async def test_a_certificate_file_that_is_gone(tmp_path: Path) -> None:
    """Whatever cannot be used here is an error of the connection."""
    async with serve(JsonApp()) as url:
        found = await look(Origin.parse(url.replace("http:", "https:"), tls=ClientTls(str(tmp_path / "none.pem"))))
    assert "cannot connect to 127.0.0.1" in found.what


def verification_error(code: int) -> ssl.SSLCertVerificationError:
    """As OpenSSL reports it."""
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, "unusable"
    return error


def tls_error(reason: str) -> ssl.SSLError:
    """As OpenSSL reports it."""
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "said", "fix"),
    [
        (socket.gaierror(-2, "Name or service not known"), "'engine.example' cannot be resolved", "DNS"),
        (TimeoutError(), "no connection to engine.example:8000 in time", "firewall"),
        (OSError(113, "No route to host"), "No route to host", "network"),
        (verification_error(9), "is not valid yet", "clocks"),
        (verification_error(23), "unusable", "replace"),
        (tls_error("TLSV1_ALERT_PROTOCOL_VERSION"), "does not speak TLS", "TLSV1_ALERT_PROTOCOL_VERSION"),
    ],
)
def test_other_failures(error: Exception, said: str, fix: str) -> None:
    """The system's error, in an operator's words."""
    found = explain_failure("endpoint a", Origin.parse("https://engine.example:8000"), error)
    assert found.severity is Severity.PROBLEM
    assert said in found.what
    assert fix in found.fix


async def test_cancellation_is_no_verdict() -> None:
    """A visit that was given up gets no finding."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        origin = Origin.parse(f"https://127.0.0.1:{silent.getsockname()[1]}")
        task = asyncio.create_task(try_connect(origin, timeout_s=20), name="given up")
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
