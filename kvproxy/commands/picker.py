"""`kvproxy picker`: decides for Envoy, which carries the requests; until SIGTERM, then a graceful end."""

from __future__ import annotations

import argparse
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector

from kvproxy import __version__
from kvproxy.app import Proxy
from kvproxy.commands.configuration import ConfigSource, named_file
from kvproxy.commands.garbage import GarbageCollections
from kvproxy.commands.logging_setup import log_to
from kvproxy.commands.reload import FileReloader, convert_problems
from kvproxy.commands.serving import ProcessSignals, raise_open_files, run_loop
from kvproxy.config.listener_schema import PickerSettings
from kvproxy.config.schema import Config
from kvproxy.errors import ConfigError, Problem
from kvproxy.listener.server import Server

if TYPE_CHECKING:
    from kvproxy.picker.server import PickerServer

logger = logging.getLogger("kvproxy")


def main(args: argparse.Namespace) -> int:
    """`kvproxy picker`."""
    source = ConfigSource(path=named_file(args), endpoints=args.endpoint, policy=args.policy, lenient=args.lenient)
    config, problems = source.load()
    with log_to(config.log):
        for problem in problems:
            logger.log(logging.WARNING if problem.severity == "warning" else logging.INFO, "%s", problem.located())
        raise_open_files()
        given = {"host": args.host, "port": args.port}
        changes = {name: value for name, value in given.items() if value is not None}
        settings = (config.picker or PickerSettings()).model_copy(update=changes)
        return run_loop(lambda: pick_until_signal(config, settings, problems, source))


async def pick_until_signal(
    config: Config, settings: PickerSettings, problems: list[Problem], source: ConfigSource
) -> int:
    """The picker's whole life."""
    signals = ProcessSignals(config.shutdown.drain)
    async with Proxy(config) as proxy, AsyncExitStack() as listeners:
        proxy.findings = convert_problems(problems)
        reloader = FileReloader(proxy, source, interval_s=config.reload.interval if config.reload.watch else 0.0)
        signals.install(reloader)
        if config.admin.enabled:
            admin = Server(proxy.admin, host=config.admin.host, port=config.admin.port, drain_s=1.0)
            await listeners.enter_async_context(admin)
            logger.info("admin listener on %s (live page, status, metrics)", admin.url)
        server = await listeners.enter_async_context(make_server(proxy, settings))
        await listeners.enter_async_context(
            GarbageCollections(is_quiet=lambda: not server.streams, replaced=lambda: proxy.replaced)
        )
        ProcessCollector(registry=proxy.metrics.registry)
        await listeners.enter_async_context(reloader)
        logger.info("kvproxy %s picks for Envoy on %s:%d", __version__, settings.host, server.port)
        await signals.stop.wait()
        proxy.draining = True
    logger.info("ended")
    return 0


def make_server(proxy: Proxy, settings: PickerSettings) -> PickerServer:
    """Its server. ConfigError where the extra is not installed."""
    try:
        from kvproxy.picker.server import PickerServer
    except ImportError as error:
        what = f"`kvproxy picker` needs packages that are not installed: {error}"
        raise ConfigError([Problem("", what, "pip install 'kvproxy[picker]'")]) from error
    return PickerServer(proxy, settings)
