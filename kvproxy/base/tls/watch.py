"""Contexts of listeners and of connections to engines, made again when their certificate files change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvproxy.base.background_task import BackgroundTask
from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.timed_thread import TimedThread
from kvproxy.base.tls.files import (
    ClientTls,
    ListenerHandshake,
    ServerTls,
    TlsFiles,
    UnusableFile,
    find_files,
    read_expiry,
)
from kvproxy.base.tls.metrics import CertificateMetrics
from kvproxy.base.types import Clock, utc_seconds

logger = logging.getLogger("kvproxy")

_INTERVAL_S = 1.0
#: A read that takes longer means a disk that hangs.
_READ_TIMEOUT_S = 10.0
#: Different sets of files for engines; more than a deployment has.
_MAX_CLIENTS = 1024
#: A certificate that lasts less than this is worth a warning.
SOON_S = 14 * 86400.0
_DAY_S = 86400.0

Signature = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class CertificateFinding:
    """Something wrong with the certificate of `place`, or soon to be."""

    place: str
    what: str
    fix: str


def describe_expiry(place: str, left_s: float) -> CertificateFinding | None:
    """Return the finding for a certificate that lasts for `left_s` seconds; None if that is long enough."""
    if left_s >= SOON_S:
        return None
    when = f"expires in {left_s / _DAY_S:.1f} days" if left_s > 0 else "has expired"
    return CertificateFinding(place, f"the certificate {when}", "renew its file: it is read again without a restart")


class ServerContext(ssl.SSLContext):
    """Context of a listener: each handshake is made by the one that was loaded last."""

    current: ssl.SSLContext

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *_: Any, **__: Any) -> ssl.SSLObject:
        made = self.current.wrap_bio(incoming, outgoing, server_side=True)
        assert isinstance(made, ListenerHandshake)
        made.outgoing = outgoing
        return made


@dataclass(frozen=True, slots=True)
class Loaded:
    """Contents of the files at `signature`."""

    signature: Signature
    context: ssl.SSLContext | None
    expires_at: float | None = None  # seconds since the epoch
    fault: UnusableFile | None = None


class WatchedFiles:
    """Files of one listener, or of the engines that are verified alike."""

    def __init__(self, place: str, tls: TlsFiles, *, alpn: Sequence[str] = ()) -> None:
        self.place = place
        self._tls = tls
        self._alpn = alpn
        found = self.load()
        if found.context is None:
            assert found.fault is not None
            raise found.fault
        self.context = found.context
        self.seen = found.signature
        self.expires_at = found.expires_at
        self.fault: UnusableFile | None = None
        self._suspect: Signature | None = None

    def load_changed(self) -> Loaded | None:
        """Return what the files hold if they changed. Blocks, and changes nothing here."""
        return None if self._sign() == self.seen else self.load()

    def load(self) -> Loaded:
        """Return what the files hold."""
        signature = self._sign()
        try:
            context = self._tls.make_context()
        except UnusableFile as fault:
            return Loaded(signature, None, fault=fault)
        if self._alpn:
            context.set_alpn_protocols(list(self._alpn))
        shown = self._tls.certificate if isinstance(self._tls, ServerTls) else self._tls.cert_file
        return Loaded(signature, context, read_expiry(shown) if shown else None)

    def adopt(self, found: Loaded, *, patient: bool) -> bool:
        """Use what was found, or keep what is used. False if `patient` and the files may be in the middle of being
        replaced, one after the other: they are loaded again at the next look."""
        if found.context is None and patient and found.signature != self._suspect:
            self._suspect = found.signature
            return False
        self.seen = found.signature
        self.fault = found.fault
        if found.context is not None:
            self.context = found.context
            self.expires_at = found.expires_at
        return True

    def _sign(self) -> Signature:
        return tuple(map(_sign, find_files(self._tls)))


def _sign(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


class CertificateWatch(BackgroundTask):
    """Loads certificates; while entered, looks for changed files every `interval_s` and loads them again.

    Files that cannot be used leave the earlier contexts in place.
    """

    task_name = "watch certificates"

    def __init__(
        self, *, interval_s: float = _INTERVAL_S, metrics: Metrics | None = None, wall_clock: Clock = utc_seconds
    ) -> None:
        self._interval_s = interval_s
        self._wall_clock = wall_clock
        self._metrics = None if metrics is None else metrics.group(CertificateMetrics)
        self._listeners: list[tuple[WatchedFiles, ServerContext]] = []
        self._clients: BoundedMapping[ClientTls, WatchedFiles] = BoundedMapping(_MAX_CLIENTS)
        self._reading = TimedThread("certificates")
        self._one_at_a_time = asyncio.Lock()
        if self._metrics is not None:
            self._metrics.expires.set_source(self._list_remaining)

    def server_context(self, place: str, tls: ServerTls, *, alpn: Sequence[str] = ()) -> ssl.SSLContext:
        """Return the context of a listener, which goes with the files. UnusableFile if it cannot be made now."""
        watched = WatchedFiles(place, tls, alpn=alpn)
        context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
        context.current = watched.context
        self._listeners.append((watched, context))
        return context

    def client_context(self, tls: ClientTls) -> ssl.SSLContext:
        """Return the context for a new connection to an engine. UnusableFile if it cannot be made now."""
        watched = self._clients.get(tls)
        if watched is None:
            watched = self._clients[tls] = WatchedFiles("endpoints", tls)
        return watched.context

    async def look(self, *, patient: bool = False) -> None:
        """Load the files that changed. Unless `patient`, files that cannot be used are reported at once."""
        async with self._one_at_a_time:
            watched = list(self._watched())
            try:
                found = await self._reading.call(
                    lambda: [one.load_changed() for one in watched], timeout_s=_READ_TIMEOUT_S
                )
            except OSError as error:
                logger.warning("certificates are not read again: %s", str(error) or "their disk hangs")
                return
            for one, loaded in zip(watched, found, strict=True):
                if loaded is not None and one.adopt(loaded, patient=patient):
                    self._report(one, loaded)
            for one, context in self._listeners:
                context.current = one.context

    def list_findings(self) -> Iterator[CertificateFinding]:
        """Yield what is wrong with certificates: files that cannot be used, and those that expire soon."""
        for one in self._watched():
            if one.fault is not None:
                what = f"the changed certificate is not used: {one.fault.message}"
                yield CertificateFinding(
                    one.place, what, one.fault.hint or "the previous one stays in use: replace the file"
                )
        for (place,), left_s in self._list_remaining():
            if (finding := describe_expiry(place, left_s)) is not None:
                yield finding

    def _watched(self) -> Iterator[WatchedFiles]:
        yield from (one for one, _ in self._listeners)
        yield from self._clients.values()

    def _list_remaining(self) -> Iterator[tuple[tuple[str], float]]:
        """Yield by place how long its certificates last."""
        ends: dict[str, float] = {}
        for one in self._watched():
            if one.expires_at is not None:
                ends[one.place] = min(one.expires_at, ends.get(one.place, one.expires_at))
        now = self._wall_clock()
        yield from (((place,), end - now) for place, end in ends.items())

    def _report(self, one: WatchedFiles, loaded: Loaded) -> None:
        fault = loaded.fault
        if self._metrics is not None:
            self._metrics.reloads.labels("applied" if fault is None else "refused").inc()
        if fault is None:
            logger.info("certificate files of %s have changed and are used", one.place)
        else:
            logger.error("certificate files of %s have changed and are not used: %s", one.place, fault.message)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look(patient=True)
