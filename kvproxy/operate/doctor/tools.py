"""Tools of the doctor: connections and the meaning of their failures, clocks, timeouts, answers that checks share."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self, TypeVar, cast

import httpx

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.types import Clock, utc_seconds
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.base.upstream.transport import HttpClients
from kvproxy.operate.doctor.report import Finding, problem

T = TypeVar("T")


class SharedAnswers:
    """By name, one task each; every caller gets the same answer or the same error.

    A check that gives up does not take the answer away from the others. An async context manager: leaving it ends
    what is still being asked.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def ask_once(self, name: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the answer under `name`; the first caller's `ask` gets it."""
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = asyncio.create_task(ask(), name=f"doctor {name}")
        return cast("T", await asyncio.shield(task))

    async def __aenter__(self) -> SharedAnswers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self._tasks.values())


@dataclass(frozen=True, slots=True)
class VisitTimeouts:
    """Seconds. `exchange_s` for one call; `event_s` for KV events to arrive after an answer, `late_s` before another
    prompt is sent because a subscription may not have been in force for the first.

    LMCache learns of a prompt after its answer: lookups are tried `lookup_tries` times, `lookup_pause_s` apart.
    """

    exchange_s: float = 5.0
    event_s: float = 2.0
    late_s: float = 0.25
    lookup_tries: int = 15
    lookup_pause_s: float = 0.1


class Tools:
    """An async context manager; what was opened through it is closed with it."""

    def __init__(
        self,
        *,
        timeouts: VisitTimeouts | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Clock = utc_seconds,
        rng: random.Random | None = None,
    ) -> None:
        self.timeouts = timeouts or VisitTimeouts()
        self.clock = clock
        self.wall_clock = wall_clock
        self.rng = rng or random.Random()
        self.answers = SharedAnswers()
        self._pool = UpstreamPool(max_connections=32)
        self._clients = HttpClients(self._pool)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self._pool)
        self._open.push_async_callback(self._clients.aclose)
        await self._open.enter_async_context(self.answers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def make_client(self, origin: Origin) -> httpx.AsyncClient:
        """Return the client for origins verified as this one."""
        return self._clients.client(origin)


#: OpenSSL's X509_V_ERR_ numbers.
_NOT_YET_VALID = 9
_EXPIRED = 10
_SELF_SIGNED = 18
_SELF_SIGNED_CHAIN = 19
_NO_ISSUER = 20
_WRONG_HOST = 62
_WRONG_ADDRESS = 64


@dataclass(frozen=True, slots=True)
class ConnectResult:
    """How connecting went; `certificate_ends` where the peer's certificate was verified. `connected`: TCP at least."""

    error: Exception | None = None
    certificate_ends: datetime | None = None
    connected: bool = True


async def try_connect(origin: Origin, *, timeout_s: float) -> ConnectResult:
    """Connect, shake hands, and close again."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(origin.host, origin.port)
            if origin.scheme == "https":
                context = origin.tls.make_context()
                await writer.start_tls(context, server_hostname=origin.server_name or origin.host)
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
    """Return True if the port of an http origin completes a TLS handshake, whatever its certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(origin.host, origin.port, ssl=context)
    except (OSError, ValueError):
        return False
    writer.close()
    return True


def explain_failure(where: str, origin: Origin, error: Exception, *, connected: bool = False) -> Finding:
    """Why no connection, and what to do about it. `connected`: TCP was, TLS was not."""
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
