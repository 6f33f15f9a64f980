"""`kvproxy serve`: the proxy on its listeners until SIGTERM, then a graceful end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client import ProcessCollector

from kvproxy import __version__
from kvproxy.admin.operated import Reloaded
from kvproxy.app import Proxy
from kvproxy.commands.advice import AdviceRunner, advise_command
from kvproxy.commands.configuration import ConfigSource, named_file
from kvproxy.commands.garbage import GarbageCollections
from kvproxy.commands.logging_setup import log_to
from kvproxy.commands.reload import FileReloader, convert_problems
from kvproxy.config.schema import Config
from kvproxy.doctor.report import DoctorReport
from kvproxy.doctor.visit import StartupDiagnosis
from kvproxy.errors import Problem
from kvproxy.listener.parser import ListenerLimits
from kvproxy.listener.server import Server
from kvproxy.metrics.catalog import Metrics

logger = logging.getLogger("kvproxy")

#: Open files besides clients' and engines' sockets: listeners, probes, scrapes, event streams, log, receipts.
_OTHER_FILES = 64


def main(args: argparse.Namespace) -> int:
    """`kvproxy serve`."""
    source = ConfigSource(
        path=named_file(args),
        endpoints=args.endpoint,
        host=args.host,
        port=args.port,
        policy=args.policy,
        admin=not args.no_admin,
        lenient=args.lenient,
    )
    return run(source)


def run(source: ConfigSource) -> int:
    """Serve until a signal; 0 after a graceful end. Warnings and notes about the configuration are logged once."""
    config, problems = source.load()
    with log_to(config.log):
        for problem in problems:
            logger.log(logging.WARNING if problem.severity == "warning" else logging.INFO, "%s", problem.located())
        _raise_open_files()
        return run_loop(lambda: serve_until_signal(config, problems, source))


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def serve_until_signal(config: Config, problems: list[Problem], source: ConfigSource) -> int:
    """The proxy's whole life. A second signal ends the drain at once. `problems` are shown on the live page."""
    signals = ProcessSignals(config.shutdown.drain)
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = fit_connections(config.limits.connections, open_files=open_files)
    async with Proxy(config) as proxy, AsyncExitStack() as listeners:
        proxy.findings = convert_problems(problems)
        reloader = FileReloader(proxy, source, interval_s=config.reload.interval if config.reload.watch else 0.0)
        signals.install(reloader)
        if config.admin.enabled:
            admin = Server(proxy.admin, host=config.admin.host, port=config.admin.port, drain_s=1.0)
            await listeners.enter_async_context(admin)
            logger.info("admin listener on %s (live page, status, metrics)", admin.url)
        public = Server(
            proxy,
            host=config.listen.host,
            port=config.listen.port,
            drain_s=config.shutdown.drain,
            hurry=signals.hurry,
            tls=config.listen.tls,
            limits=replace(ListenerLimits.from_config(config.limits), max_connections=connections),
            on_refused=proxy.metrics.bounds.connections_refused.inc,
        )
        await listeners.enter_async_context(public)
        _show_process(proxy.metrics, public, limit=connections)
        await listeners.enter_async_context(
            GarbageCollections(is_quiet=lambda: not proxy.running, replaced=lambda: proxy.replaced)
        )
        proxy.public_url = public.url
        _announce(proxy, public.url)

        def show(report: DoctorReport) -> None:
            proxy.findings = [*proxy.findings, *report.findings]

        await listeners.enter_async_context(StartupDiagnosis(config, on_report=show))
        if source.path is not None:
            command = partial(advise_command, str(source.path), lenient=source.lenient)
            proxy.adviser = await listeners.enter_async_context(AdviceRunner(command))
        await listeners.enter_async_context(reloader)
        await signals.stop.wait()
        proxy.draining = True
    logger.info("ended")
    return 0


class ProcessSignals:
    """SIGTERM and SIGINT end the proxy, a second one at once; SIGHUP reads the configuration again."""

    def __init__(self, drain_s: float) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._drain_s = drain_s
        self._reloads: set[asyncio.Task[Reloaded]] = set()

    def install(self, reloader: FileReloader) -> None:
        """Take the signals over."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number.name)
        loop.add_signal_handler(signal.SIGHUP, self._reload, reloader)

    def _end(self, name: str) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()
        logger.info("%s: no new requests, running ones have up to %g s", name, self._drain_s)

    def _reload(self, reloader: FileReloader) -> None:
        task = asyncio.create_task(reloader(), name="reload on SIGHUP")
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)


def _raise_open_files() -> None:
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
        "(raise the limit: `ulimit -n`, LimitNOFILE)", open_files, fit, wanted,
    )  # fmt: skip
    return fit


def _show_process(metrics: Metrics, public: Server, *, limit: int) -> None:
    """Figures of the process, and what only its listener knows."""
    ProcessCollector(registry=metrics.registry)
    metrics.bounds.queue_depth.labels("connections").set_function(lambda: public.connections)
    metrics.bounds.queue_limit.labels("connections").set(limit)


def _announce(proxy: Proxy, url: str) -> None:
    logger.info("kvproxy %s on %s", __version__, url)
    for name, cluster in proxy.clusters.items():
        ids = ", ".join(endpoint.id for endpoint in cluster.endpoints) or "none yet"
        logger.info("cluster %s: %s over %s", name, proxy.config.clusters[name].policy.value, ids)
