"""Probes of a cluster's engines: polls of the health of each."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum

from kvproxy.base.background_task import TaskSet, cancel_tasks
from kvproxy.base.errors import ConnectTimeout, FirstByteTimeout, IdleTimeout, KvproxyError, NoDescriptors
from kvproxy.base.types import EndpointId, Headers, Sleep
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool
from kvproxy.cluster.engine import Engine
from kvproxy.cluster.settings import HealthCheckSettings

log = logging.getLogger(__name__)

#: Checks an engine's health. KvproxyError and OSError mean unhealthy.
Probe = Callable[[Engine], Awaitable[bool]]

#: Probes in flight at once.
MAX_CONCURRENT = 16
#: The first probes are spread over this long (or the interval, if shorter): soon, but not all at once.
FIRST_PROBES_S = 1.0
#: Random variation of every pause, as a share, so that many proxies do not probe in step.
JITTER = 0.1


class ProbeOutcome(StrEnum):
    """A metric label."""

    OK = "ok"
    FAILED = "failed"  # it answered, but not well
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    NOT_SENT = "not_sent"  # no socket on our side, so no finding about the engine
    STALLED = "stalled"  # this process stood still while the answer may have come: no finding either

    @property
    def says_nothing(self) -> bool:
        """About the engine."""
        return self in (ProbeOutcome.NOT_SENT, ProbeOutcome.STALLED)


#: Reports the name of a probed engine and the outcome to the other workers.
TellProbe = Callable[[EndpointId, ProbeOutcome], None]


class Prober:
    """Probes each engine in a task of its own, among `tasks`. `on_result` gets every outcome, in the event loop. One
    worker at a time probes an engine and shares the outcome; the others skip their turn."""

    def __init__(
        self,
        cluster: str,
        settings: HealthCheckSettings,
        *,
        probe: Probe | None,
        tasks: TaskSet,
        on_result: Callable[[Engine, ProbeOutcome], None],
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
        self._probing: dict[Engine, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    def reconfigure(self, settings: HealthCheckSettings, probe: Probe | None) -> None:
        """Stop probing, and go on by other settings when `probe_engines` is called."""
        self.probe_engines(())
        self._settings = settings
        self._probe = probe if settings.active else None

    def probe_engines(self, engines: Iterable[Engine]) -> None:
        """Probe these engines and no others; none while `tasks` do not run."""
        if self._probe is None:
            return
        wanted = list(engines) if self._tasks.running else []
        for engine in self._probing.keys() - set(wanted):
            self._probing.pop(engine).cancel()
        for engine in (one for one in wanted if one not in self._probing):
            name = f"probe {self._cluster}/{engine.id}"
            self._probing[engine] = self._tasks.start(self._run(engine, self._probe), name=name)

    async def _run(self, engine: Engine, probe: Probe) -> None:
        interval_s = self._settings.interval
        await self._sleep(self._rng.random() * min(interval_s, FIRST_PROBES_S))
        while True:
            if not engine.health.heard:
                async with self._slots:
                    outcome = await self._ask(engine, probe)
                self._on_result(engine, outcome)
            engine.health.heard = False
            await self._sleep(interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER))

    async def _ask(self, engine: Engine, probe: Probe) -> ProbeOutcome:
        """Probe an engine. A healthy engine's answer can only come too late if the event loop stands still for most of
        the timeout."""
        asked = asyncio.ensure_future(self._outcome(engine, probe))
        clock = asyncio.get_running_loop().time
        most_s = 0.5 * self._settings.timeout
        stalled = False
        try:
            while not asked.done():
                began = clock()
                await asyncio.wait({asked}, timeout=0.25 * most_s)
                stalled |= clock() - began > most_s
        finally:
            await cancel_tasks([asked])
        outcome = asked.result()
        return ProbeOutcome.STALLED if stalled and outcome is ProbeOutcome.TIMEOUT else outcome

    async def _outcome(self, engine: Engine, probe: Probe) -> ProbeOutcome:
        try:
            async with asyncio.timeout(self._settings.timeout):
                return ProbeOutcome.OK if await probe(engine) else ProbeOutcome.FAILED
        except (TimeoutError, ConnectTimeout, FirstByteTimeout, IdleTimeout):
            return ProbeOutcome.TIMEOUT
        except NoDescriptors:
            return ProbeOutcome.NOT_SENT
        except (KvproxyError, OSError):
            return ProbeOutcome.UNREACHABLE
        except Exception:  # a third-party probe must not end the probing of its engine
            log.exception("the probe of %s/%s is broken", self._cluster, engine.id)
            return ProbeOutcome.FAILED


class HttpProbe:
    """Any 2xx is well. Carries the engine's own credential, for gateways that ask for it.

    `pool` is best one of its own that keeps no connections: where requests fill every connection a probe would wait for
    one, and a busy engine would look dead; and a kept connection does not show that new ones are still accepted.
    """

    def __init__(self, pool: UpstreamPool, settings: HealthCheckSettings) -> None:
        self._pool = pool
        self._target = settings.path.encode("utf-8")
        self._timeouts = Timeouts(settings.timeout, settings.timeout, settings.timeout)

    async def __call__(self, engine: Engine) -> bool:
        credential: Headers = [(b"authorization", engine.authorization)] if engine.authorization else []
        headers = [(b"user-agent", b"kvproxy-health"), *credential]
        response = await self._pool.request(engine.origin, b"GET", self._target, headers, None, timeouts=self._timeouts)
        response.abort()  # only the status is needed
        return 200 <= response.status < 300
