"""`kvproxy picker`: decides for Envoy, which carries the requests; until SIGTERM, then a graceful end."""

from __future__ import annotations

import argparse
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector

from kvproxy import __version__
from kvproxy.app import Proxy
from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.settings.compose import part_of
from kvproxy.features.picker.settings import PickerPlace, PickerSettings
from kvproxy.operate.commands.configuration import ConfigSource, named_engines, named_file
from kvproxy.operate.commands.garbage import GarbageCollections
from kvproxy.operate.commands.last_resort import LastResort
from kvproxy.operate.commands.serving import ProcessSignals, run_logged, run_until_signal
from kvproxy.operate.config.schema import Config

if TYPE_CHECKING:
    from kvproxy.features.picker.server import PickerServer

logger = logging.getLogger("kvproxy")


def main(args: argparse.Namespace) -> int:
    """`kvproxy picker`."""
    require_packages()
    engines = named_engines(args)
    source = ConfigSource(path=named_file(args), endpoints=engines, policy=args.policy, lenient=args.lenient)
    changes = {name: value for name, value in (("host", args.host), ("port", args.port)) if value is not None}

    async def pick(config: Config, problems: list[Problem], last_resort: LastResort) -> int:
        settings = (part_of(config, PickerPlace).picker or PickerSettings()).model_copy(update=changes)
        listen = partial(_open_picker, settings=settings)
        return await run_until_signal(config, problems, source, last_resort, listen=listen)

    return run_logged(source, pick)


async def _open_picker(
    proxy: Proxy, signals: ProcessSignals, listeners: AsyncExitStack, *, settings: PickerSettings
) -> None:
    server = await listeners.enter_async_context(make_server(proxy, settings))
    await listeners.enter_async_context(
        GarbageCollections(is_quiet=lambda: not server.streams, replaced=lambda: proxy.generations.ended)
    )
    ProcessCollector(registry=proxy.metrics.registry)
    logger.info("kvproxy %s picks for Envoy on %s:%d", __version__, settings.host, server.port)


def require_packages() -> None:
    """ConfigError where the extra is not installed, before anything listens."""
    try:
        from kvproxy.features.picker import server as _server  # noqa: F401
    except ImportError as error:
        what = f"`kvproxy picker` needs packages that are not installed: {error}"
        raise ConfigError([Problem("", what, "pip install 'kvproxy[picker]'")]) from error


def make_server(proxy: Proxy, settings: PickerSettings) -> PickerServer:
    """Its server. ConfigError where the extra is not installed."""
    require_packages()
    from kvproxy.features.picker.server import PickerServer

    return PickerServer(proxy, settings)
