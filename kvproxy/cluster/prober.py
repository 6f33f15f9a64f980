"""Active health probes: each endpoint at its own jittered pace, a few at a time; and the one all engines understand."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum

from kvproxy.background_task import TaskSet
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.config.cluster_schema import HealthCheckSettings
from kvproxy.errors import ConnectTimeout, FirstByteTimeout, IdleTimeout, KvproxyError, NoDescriptors
from kvproxy.types import Headers, Sleep
from kvproxy.upstream.pool import Timeouts, UpstreamPool

log = logging.getLogger(__name__)

#: Asks an endpoint whether it is well. KvproxyError and OSError mean no.
Probe = Callable[[Endpoint], Awaitable[bool]]


#: Probes in flight at once.
MAX_CONCURRENT = 16

#: The first probes are spread over this long (or the interval, if shorter): soon, but not all at once.
FIRST_PROBES_S = 1.0

#: Share by which every pause varies either way, so that many proxies do not probe in step.
JITTER = 0.1


class ProbeOutcome(StrEnum):
    """A metric label."""

    OK = "ok"
    FAILED = "failed"  # it answered, and not well
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    NOT_SENT = "not_sent"  # for want of a socket on our side: says nothing about the endpoint


class Prober:
    """One task an endpoint, among `tasks`. `on_result` gets every outcome, in the event loop."""

    def __init__(
        self,
        cluster: str,
        settings: HealthCheckSettings,
        *,
        probe: Probe | None,
        tasks: TaskSet,
        on_result: Callable[[Endpoint, ProbeOutcome], None],
        rng: random.Random,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._probe = probe if settings.active else None
        self._on_result = on_result
        self._rng = rng
        self._sleep = sleep
        self._tasks = tasks
        self._probing: dict[Endpoint, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    def probe_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """These from now on, and no others; none while `tasks` do not run."""
        if self._probe is None:
            return
        wanted = list(endpoints) if self._tasks.running else []
        for endpoint in self._probing.keys() - set(wanted):
            self._probing.pop(endpoint).cancel()
        for endpoint in wanted:
            if endpoint not in self._probing:
                name = f"probe {self._cluster}/{endpoint.id}"
                self._probing[endpoint] = self._tasks.start(self._run(endpoint, self._probe), name=name)

    async def _run(self, endpoint: Endpoint, probe: Probe) -> None:
        interval_s = self._settings.interval
        await self._sleep(self._rng.random() * min(interval_s, FIRST_PROBES_S))
        while True:
            async with self._slots:
                outcome = await self._ask(endpoint, probe)
            self._on_result(endpoint, outcome)
            await self._sleep(interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER))

    async def _ask(self, endpoint: Endpoint, probe: Probe) -> ProbeOutcome:
        try:
            async with asyncio.timeout(self._settings.timeout):
                return ProbeOutcome.OK if await probe(endpoint) else ProbeOutcome.FAILED
        except (TimeoutError, ConnectTimeout, FirstByteTimeout, IdleTimeout):
            return ProbeOutcome.TIMEOUT
        except NoDescriptors:
            return ProbeOutcome.NOT_SENT
        except (KvproxyError, OSError):
            return ProbeOutcome.UNREACHABLE
        except Exception:  # a probe written elsewhere must not end the probing of its endpoint
            log.exception("the probe of %s/%s is broken", self._cluster, endpoint.id)
            return ProbeOutcome.FAILED


class HttpProbe:
    """Any 2xx is well. Carries the endpoint's own credential, for gateways that ask for it.

    `pool` is best one of its own that keeps no connections: where requests fill every connection a probe would wait for
    one, and a busy endpoint would look dead; and a kept connection does not show that new ones are still accepted.
    """

    def __init__(self, pool: UpstreamPool, settings: HealthCheckSettings) -> None:
        self._pool = pool
        self._target = settings.path.encode("utf-8")
        self._timeouts = Timeouts(settings.timeout, settings.timeout, settings.timeout)

    async def __call__(self, endpoint: Endpoint) -> bool:
        headers: Headers = [(b"user-agent", b"kvproxy-health")]
        if endpoint.authorization:
            headers.append((b"authorization", endpoint.authorization))
        response = await self._pool.request(
            endpoint.origin, b"GET", self._target, headers, None, timeouts=self._timeouts
        )
        response.abort()  # the status says it all
        return 200 <= response.status < 300
