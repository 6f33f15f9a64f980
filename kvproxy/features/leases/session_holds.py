"""Sessions of SGLang as leases: with `--enable-session-radix-cache` it evicts what a session refers to after all else,
until the session is closed."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial

from kvproxy.base.errors import ClientError, NotSupported
from kvproxy.base.log_lines import log_fields
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.cache.actions.job_queue import Job, JobQueue
from kvproxy.cache.actions.signals import Signals
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.engines import Engines
from kvproxy.cache.metrics import HoldingMetrics
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.features.leases.leases import Lease, LeaseBook
from kvproxy.features.leases.touching import MAX_TOKENS, record_action, send_prompt

log = logging.getLogger("kvproxy.kvcache")
audit = logging.getLogger("kvproxy.audit")

#: An engine is asked again whether it can after so long.
ASKED_EVERY_S = 300.0


class SessionHolds:
    """A lease is a session of its own, begun by asking for its prompt once more (one token) under the session's name.
    A name is never used again: SGLang takes no request into a session that was closed."""

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        book: LeaseBook,
        clusters: Mapping[str, Cluster],
        jobs: JobQueue,
        engines: Engines,
        signals: Signals,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._book = book
        self._clusters = clusters
        self._jobs = jobs
        self._engines = engines
        self._signals = signals
        self._actions = metrics.group(HoldingMetrics).actions
        self._clock = clock
        self._able: dict[Engine, tuple[bool, float]] = {}  # whether it can, and when it was asked

    def can_hold(self, endpoint: Endpoint, tokens: int) -> bool:
        """Whether its engine reports that it does so. Of an engine with data-parallel ranks nothing is held: it would
        choose the rank."""
        return endpoint.rank is None and tokens <= MAX_TOKENS and self._able.get(endpoint.engine, (False,))[0]

    def hold(self, lease: Lease, endpoint: Endpoint) -> None:
        """From now on, once the engine was told."""
        lease.session = f"kvproxy-{os.urandom(8).hex()}"
        about = f"hold {lease.prefix.name}"
        self._jobs.submit(
            Job(("hold", lease.session), partial(self._hold, lease, endpoint), lane=lease.instance, about=about)
        )

    def tick(self) -> None:
        """Asks engines whether they can, and closes the sessions of leases that are over."""
        present = [one for cluster in self._clusters.values() for one in cluster.endpoints]
        engines = {one.engine for one in present}
        self._able = {engine: known for engine, known in self._able.items() if engine in engines}
        for endpoint in present:
            if self._is_to_be_asked(endpoint):
                self._jobs.submit(Job(("can hold", endpoint.engine), partial(self._ask, endpoint.engine)))
        self.close_ended()

    def close_ended(self) -> None:
        """Those of leases that are over, and of endpoints that are still there."""
        for session, (cluster, endpoint_id) in list(self._book.to_close.items()):
            there = self._clusters.get(cluster)
            endpoint = None if there is None else there.find_endpoint(endpoint_id)
            if endpoint is None:
                del self._book.to_close[session]
            else:
                job = partial(self._close, session, endpoint)
                self._jobs.submit(Job(("close", session), job, lane=endpoint.instance_id, about=f"close {session}"))

    def _is_to_be_asked(self, endpoint: Endpoint) -> bool:
        reading = self._signals.latest_scrape(endpoint)
        if reading is None or reading[1].kind is not EngineKind.SGLANG:
            return False
        known = self._able.get(endpoint.engine)
        return known is None or self._clock() - known[1] >= ASKED_EVERY_S

    async def _ask(self, engine: Engine) -> bool:
        able = False
        try:
            able = bool((await self._engines.client(engine).sglang_info()).enable_session_radix_cache)
        except ClientError as error:
            log.debug("[kvcache] %s does not say whether it keeps sessions: %s", engine.id, error)
        self._able[engine] = (able, self._clock())
        return True

    async def _hold(self, lease: Lease, endpoint: Endpoint) -> bool:
        began = self._clock()
        found = 0
        if self._book.leases.get(lease.of.key) is not lease or lease.returned_at is not None:
            return False  # it ended while this waited
        result = "dry_run"
        if not self._settings.cache_strategy.dry_run:
            result, found = await self._refer(lease, endpoint)
        now = self._clock()
        if result in ("done", "unverified", "dry_run"):
            self._book.confirm(lease, now)
        self._actions.labels("hold", result).inc()
        record_action("hold", lease, result, amount=found, took_s=now - began, session=lease.session)
        return lease.held

    async def _refer(self, lease: Lease, endpoint: Endpoint) -> tuple[str, int]:
        """How it went, and the tokens that the engine still had."""
        timeout_s = self._settings.background.job_timeout
        try:
            answer = await send_prompt(
                self._engines.client(endpoint.engine), lease.prefix, timeout_s=timeout_s, session_id=lease.session
            )
        except ClientError as error:
            return error.reason, 0
        return ("unverified", 0) if answer.cached_tokens is None else ("done", answer.cached_tokens)

    async def _close(self, session: str, endpoint: Endpoint) -> bool:
        result = "done"
        if self._settings.cache_strategy.dry_run:
            result = "dry_run"
        else:
            try:
                await self._engines.client(endpoint.engine).close_session(session)
            except NotSupported as error:
                result = error.reason
            except ClientError as error:  # tried again
                self._actions.labels("close", error.reason).inc()
                return False
        self._book.to_close.pop(session, None)
        self._actions.labels("close", result).inc()
        log_fields(
            audit,
            "cache",
            {
                "action": "close",
                "instance": endpoint.instance_id,
                "session": session,
                "reason": "lease over",
                "result": result,
            },
        )
        return True
