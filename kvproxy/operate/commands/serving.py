"""Parts of a process that serves: from its configuration to a graceful end, with its operator's listener and reloads,
its public listener, its signals, its open files and event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client import ProcessCollector
from starlette.types import ASGIApp

from kvproxy import __version__
from kvproxy.app import Proxy
from kvproxy.base.errors import Problem
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.commands.garbage import GarbageCollections
from kvproxy.operate.commands.last_resort import END_GRACE_S, LastResort
from kvproxy.operate.commands.live_advice import AdviceRunner, advise_command
from kvproxy.operate.commands.logging_setup import log_to
from kvproxy.operate.commands.reload import FILE_INTERVAL_S, FileReloader, Reloadable, convert_problems
from kvproxy.operate.config.schema import AdminSettings, Config
from kvproxy.operate.doctor.checks import StartupDiagnosis
from kvproxy.operate.doctor.report import DoctorReport
from kvproxy.operate.runtime.operated import ConfigReloader
from kvproxy.proxy.listener.parser import ListenerLimits
from kvproxy.proxy.listener.server import Server, bind_sockets
from kvproxy.proxy.metrics import ClientBoundMetrics

logger = logging.getLogger("kvproxy")

#: Open files besides clients' and engines' sockets: listeners, probes, scrapes, event streams, log, receipts.
_OTHER_FILES = 64


Main = Callable[[Config, list[Problem], LastResort], Coroutine[Any, Any, int]]


def run_logged(source: ConfigSource, main: Main) -> int:
    """Run a server with that configuration, after one log line per finding. Returns the exit status."""
    config, problems = source.load()
    with log_to(config.log):
        for problem in problems:
            logger.log(logging.WARNING if problem.severity == "warning" else logging.INFO, "%s", problem.located())
        raise_open_files()
        with LastResort() as last_resort:
            return run_loop(lambda: run_bounded(main(config, problems, last_resort), last_resort))


async def run_bounded(main: Coroutine[Any, Any, int], last_resort: LastResort) -> int:
    """Run `main`; threads that hang do not keep the process after its end. The exit status."""
    last_resort.watch_loop()
    status = 1
    try:
        status = await main
    finally:
        last_resort.end_threads(status)
    return status


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def _call(reloader: ConfigReloader) -> object:
    return await reloader()


async def run_until_signal(
    config: Config,
    problems: list[Problem],
    source: ConfigSource,
    last_resort: LastResort,
    *,
    listen: Callable[[Proxy, ProcessSignals, AsyncExitStack], Awaitable[None]],
) -> int:
    """Return a proxy's whole life in a process of its own; `listen` enters what serves it. `problems` are shown on the
    live page."""
    signals = ProcessSignals(config.shutdown.drain, last_resort)
    async with Proxy(config) as proxy, AsyncExitStack() as listeners:
        try:
            reloader = make_reloader(proxy, source, problems=problems, signals=signals)
            await open_admin(listeners, proxy.admin, config.admin)
            await listen(proxy, signals, listeners)
            await listeners.enter_async_context(reloader)
            await signals.stop.wait()
        finally:  # also after a failed start
            last_resort.end_within(config.shutdown.drain + END_GRACE_S)
        proxy.draining = True
    logger.info("ended")
    return 0


def make_reloader(
    proxy: Reloadable, source: ConfigSource, *, problems: list[Problem], signals: ProcessSignals
) -> FileReloader:
    """Return what reads the configuration again, as signals ask for it; and the findings about the present one are
    shown."""
    config = proxy.config
    proxy.findings = convert_problems(problems)
    reloader = FileReloader(proxy, source, interval_s=FILE_INTERVAL_S if config.reload.watch else 0.0)
    signals.install(reloader)
    return reloader


async def open_admin(stack: AsyncExitStack, app: ASGIApp, settings: AdminSettings) -> None:
    """Open the operator's listener, unless it is switched off."""
    if settings.enabled:
        server = await stack.enter_async_context(Server(app, host=settings.host, port=settings.port, drain_s=1.0))
        logger.info("admin listener on %s (live page, status, metrics)", server.url)


@contextlib.asynccontextmanager
async def public_listener(
    proxy: Proxy, *, hurry: asyncio.Event, sockets: Sequence[socket.socket] | None = None
) -> AsyncIterator[None]:
    """Serve clients within the context, at `sockets` that all workers share or as configured."""
    config = proxy.config
    shared = sockets is not None
    if config.listen.reuse_port and not shared:
        sockets = await bind_sockets(config.listen.host, config.listen.port, reuse_port=True)
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = fit_connections(config.limits.connections, open_files=open_files)
    public = Server(
        proxy,
        host=config.listen.host,
        port=config.listen.port,
        sockets=sockets,
        shared=shared,
        drain_s=config.shutdown.drain,
        hurry=hurry,
        tls=config.listen.tls,
        certificates=proxy.certificates,
        limits=replace(
            ListenerLimits.from_config(config.limits),
            max_connections=connections,
            closing_idle_s=config.shutdown.idle,
        ),
        on_refused=proxy.metrics.group(ClientBoundMetrics).connections_refused.inc,
    )
    async with public:
        proxy.public_url = public.url
        _show_process(proxy.metrics, public, limit=connections)
        async with GarbageCollections(
            is_quiet=lambda: not proxy.generations.current.running, replaced=lambda: proxy.generations.ended
        ):
            yield


def diagnosis(proxy: Proxy) -> StartupDiagnosis:
    """Return the visit to the engines at the start; what it finds is shown on the live page."""

    def show(report: DoctorReport) -> None:
        proxy.findings = [*proxy.findings, *report.findings]

    return StartupDiagnosis(proxy.config, on_report=show)


def make_adviser(source: ConfigSource) -> AdviceRunner | None:
    """None: the proxy was not started from a file."""
    if source.path is None:
        return None
    return AdviceRunner(partial(advise_command, str(source.path), lenient=source.lenient))


class ProcessSignals:
    """SIGTERM and SIGINT end the proxy, a second one at once; SIGHUP reads the configuration again.

    The first two are taken outside of the event loop, since that may be what hangs.
    """

    def __init__(self, drain_s: float, last_resort: LastResort, *, grace_s: float = END_GRACE_S) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._drain_s = drain_s
        self._grace_s = grace_s
        self._last_resort = last_resort
        self._signalled = False
        self._reloads: set[asyncio.Task[object]] = set()

    def install(self, reloader: ConfigReloader) -> None:
        """Take the signals over."""
        loop = asyncio.get_running_loop()

        def end(number: int, _: object) -> None:
            self._last_resort.end_within(self._grace_s + (0 if self._signalled else self._drain_s))
            self._signalled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        loop.add_signal_handler(signal.SIGHUP, self._reload, reloader)

    def _end(self, name: str) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()
        logger.info("%s: no new requests, running ones have up to %g s", name, self._drain_s)

    def _reload(self, reloader: ConfigReloader) -> None:
        task: asyncio.Task[object] = asyncio.create_task(_call(reloader), name="reload on SIGHUP")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)


def raise_open_files() -> None:
    """As many open files as the system allows without asking: every request in flight holds two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fit_connections(wanted: int, *, open_files: int) -> int:
    """How many client connections there are sockets for, `wanted` at most; `open_files` below 0 is no limit.

    Every request in flight holds two, and one client in eight still gets the answer that there is no place:
    beyond that the system would reset clients without a word, and engines could not be reached.
    """
    fit = max(1, (open_files - _OTHER_FILES) * 8 // 17)
    if open_files < 0 or fit >= wanted:
        return wanted
    logger.warning(
        "open files are limited to %d: %d client connections are served at once instead of limits.connections=%d "
        "(raise the limit: `ulimit -n`, LimitNOFILE)",
        open_files,
        fit,
        wanted,
    )
    return fit


def _show_process(metrics: Metrics, public: Server, *, limit: int) -> None:
    """Register figures of the process, and those of its listener."""
    ProcessCollector(registry=metrics.registry)
    metrics.group(BoundMetrics).show_queue("connections", lambda: public.connections, limit=limit)


def announce(config: Config, url: str, endpoints: Mapping[str, Iterable[str]], *, suffix: str = "") -> None:
    """Log the public URL and the names of endpoints by cluster."""
    logger.info("kvproxy %s on %s%s", __version__, url, suffix)
    for name, ids in endpoints.items():
        logger.info("cluster %s: %s over %s", name, config.clusters[name].policy.value, ", ".join(ids) or "none yet")
