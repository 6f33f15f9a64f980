"""Opening a connection as the proxy would, and what its failure means."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

from kvproxy.doctor.report import Finding, problem
from kvproxy.upstream.origin import Origin

#: OpenSSL's X509_V_ERR_ numbers.
_NOT_YET_VALID, _EXPIRED, _SELF_SIGNED, _SELF_SIGNED_CHAIN, _NO_ISSUER, _WRONG_HOST, _WRONG_ADDRESS = (
    *(9, 10, 18, 19, 20),
    *(62, 64),
)


@dataclass(frozen=True, slots=True)
class ConnectResult:
    """How connecting went; `certificate_ends` where the peer's certificate was verified. `connected`: TCP at least."""

    error: Exception | None = None
    certificate_ends: datetime | None = None
    connected: bool = True


async def connect(origin: Origin, *, timeout_s: float) -> ConnectResult:
    """Connects, shakes hands, and closes again."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(origin.host, origin.port)
            tls = origin.ssl_context
            if tls is not None:
                await writer.start_tls(tls, server_hostname=origin.server_name or origin.host)
    except (OSError, ValueError) as error:  # ValueError: a host name or certificate file that cannot be used
        if writer is not None:
            writer.close()
        return ConnectResult(error, connected=writer is not None)
    ends = (writer.get_extra_info("peercert") or {}).get("notAfter")
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            await writer.wait_closed()
    return ConnectResult(None, datetime.fromtimestamp(ssl.cert_time_to_seconds(ends), UTC) if ends else None)


async def try_tls(origin: Origin, *, timeout_s: float) -> bool:
    """Whether the port of an http origin shakes hands for TLS, whatever its certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(origin.host, origin.port, ssl=context)
    except (OSError, ValueError):
        return False
    writer.close()
    return True


def explain_failure(where: str, origin: Origin, error: Exception, *, connected: bool = False) -> Finding:
    """Why it cannot be connected to, and what to do about it. `connected`: TCP was, TLS was not."""
    address = f"{origin.host}:{origin.port}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate(where, address, error)
    if isinstance(error, ssl.SSLError):
        return problem(where, f"{address} does not speak TLS as expected", _not_tls(error))
    if isinstance(error, TimeoutError) and connected:
        what = f"{address} accepts connections, but there is no TLS handshake in time"
        return problem(where, what, "does the port speak plain http? Write http:// in the url then")
    if isinstance(error, TimeoutError):
        return problem(where, f"no connection to {address} in time", "a firewall, or a wrong address: check the url")
    if isinstance(error, socket.gaierror):
        return problem(where, f"the name {origin.host!r} cannot be resolved", "correct the url, or the DNS entry")
    if isinstance(error, ConnectionRefusedError):
        fix = f"is it running, and on this port? Correct the url, or start it on port {origin.port}"
        return problem(where, f"nothing listens on {address} (connection refused)", fix)
    return problem(where, f"cannot connect to {address}: {error}", "check the url and the network")


def _certificate(where: str, address: str, error: ssl.SSLCertVerificationError) -> Finding:
    code = error.verify_code
    if code == _EXPIRED:
        return problem(where, f"the certificate of {address} has expired", "renew the engine's certificate")
    if code == _NOT_YET_VALID:
        return problem(where, f"the certificate of {address} is not valid yet", "check the clocks of both hosts")
    if code in (_SELF_SIGNED, _SELF_SIGNED_CHAIN, _NO_ISSUER):
        what = f"the certificate of {address} is not signed by an authority trusted here"
        return problem(where, what, "set `ca_file` of the endpoint to the PEM file of its authority")
    if code in (_WRONG_HOST, _WRONG_ADDRESS):
        what = f"the certificate of {address} is for another name"
        fix = "set `server_name` of the endpoint to a name in the certificate, or use that name in the url"
        return problem(where, what, fix)
    return problem(where, f"the certificate of {address}: {error.verify_message}", "replace the engine's certificate")


def _not_tls(error: ssl.SSLError) -> str:
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return "the port speaks plain http: write http:// in the url"
    return f"TLS failed ({error.reason}): check the engine's TLS settings"
