"""`kvproxy serve`: the proxy on its listeners until SIGTERM, then a graceful end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from kvproxy import __version__
from kvproxy.admin.operated import Finding
from kvproxy.app import Proxy
from kvproxy.commands.logging_setup import logging_to
from kvproxy.config.load import check_file, from_endpoints
from kvproxy.config.schema import Config
from kvproxy.doctor.startup import StartupVisit
from kvproxy.errors import ConfigError, Problem
from kvproxy.filters.registry import discover
from kvproxy.listener.server import Server

logger = logging.getLogger("kvproxy")

#: Objects made per request are few and die young; the collector's default threshold would run it all the time.
_GC_THRESHOLD = 50_000


def load(
    path: str | None,
    *,
    endpoints: Sequence[str],
    host: str | None,
    port: int | None,
    policy: str | None,
    admin: bool,
    lenient: bool,
) -> tuple[Config, list[Problem]]:
    """The configuration the command line asks for, and what is worth saying about it; `host` and `port` override a
    file's. Raises ConfigError."""
    problems: list[Problem] = []
    if path is not None and endpoints:
        raise ConfigError([Problem("", "either -c FILE or --endpoint, not both")])
    if path is not None:
        extra = {name: kind.settings for name, kind in discover().items()}
        checked, problems = check_file(path, extra_filters=extra, lenient=lenient)
        errors = [problem for problem in problems if problem.severity == "error"]
        if checked is None or errors:
            raise ConfigError(errors)
        config = checked
    elif endpoints:
        config = from_endpoints(endpoints, host=host or "127.0.0.1", port=8888 if port is None else port, policy=policy)
    else:
        raise ConfigError([Problem("", "nothing to serve", "give -c FILE, or --endpoint ID=URL once per engine")])
    given = {"host": host, "port": port}
    listen = config.listen.model_copy(update={key: value for key, value in given.items() if value is not None})
    changes: dict[str, object] = {"listen": listen}
    if not admin:
        changes["admin"] = config.admin.model_copy(update={"enabled": False})
    return config.model_copy(update=changes), problems


def run(config: Config, problems: Sequence[Problem]) -> int:
    """Serve until a signal; 0 after a graceful end. Warnings and notes about the configuration are logged once."""
    with logging_to(config.log):
        for problem in problems:
            logger.log(logging.WARNING if problem.severity == "warning" else logging.INFO, "%s", problem)
        return run_loop(lambda: serve_until_signal(config, problems))


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def serve_until_signal(config: Config, problems: Sequence[Problem] = ()) -> int:
    """The proxy's whole life. A second signal ends the drain at once. `problems` are shown on the live page."""
    stop = asyncio.Event()
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        if stop.is_set():
            hurry.set()
        stop.set()
        logger.info("%s: no new requests, running ones have up to %g s", name, config.shutdown.drain)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    async with Proxy(config) as proxy, AsyncExitStack() as listeners:
        proxy.findings = [Finding(one.severity, one.path, one.message, one.hint) for one in problems]
        if config.admin.enabled:
            admin = Server(proxy.admin, host=config.admin.host, port=config.admin.port, drain_s=1.0)
            await listeners.enter_async_context(admin)
            logger.info("admin listener on %s (live page, status, metrics)", admin.url)
        public = Server(
            proxy,
            host=config.listen.host,
            port=config.listen.port,
            drain_s=config.shutdown.drain,
            hurry=hurry,
            tls=config.listen.tls,
            max_connections=config.limits.connections,
        )
        await listeners.enter_async_context(public)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD, 20, 20)
        _announce(proxy, public.url)
        await listeners.enter_async_context(StartupVisit(config))
        await stop.wait()
        proxy.draining = True
    logger.info("ended")
    return 0


def _announce(proxy: Proxy, url: str) -> None:
    logger.info("kvproxy %s on %s", __version__, url)
    for name, cluster in proxy.clusters.items():
        ids = ", ".join(endpoint.id for endpoint in cluster.endpoints) or "none yet"
        logger.info("cluster %s: %s over %s", name, proxy.config.clusters[name].policy.value, ids)
