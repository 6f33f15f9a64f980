"""`kvproxy serve`: the proxy on its listeners until SIGTERM, then a graceful end."""

from __future__ import annotations

import argparse
import logging
from contextlib import AsyncExitStack

from kvproxy.app import Proxy
from kvproxy.base.errors import Problem
from kvproxy.base.installed import installed
from kvproxy.operate.commands.configuration import ConfigSource, named_engines, named_file
from kvproxy.operate.commands.last_resort import LastResort
from kvproxy.operate.commands.serving import (
    ProcessSignals,
    announce,
    diagnosis,
    make_adviser,
    public_listener,
    run_logged,
    run_until_signal,
)
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature

logger = logging.getLogger("kvproxy")


def main(args: argparse.Namespace) -> int:
    """`kvproxy serve`."""
    source = ConfigSource(
        path=named_file(args),
        endpoints=named_engines(args),
        host=args.host,
        port=args.port,
        policy=args.policy,
        admin=not args.no_admin,
        lenient=args.lenient,
        changes={key: value for key in args.changes if (value := getattr(args, key)) is not None},
    )
    return run(source)


def run(source: ConfigSource) -> int:
    """Serve until a signal; 0 after a graceful end."""

    async def serve(config: Config, problems: list[Problem], last_resort: LastResort) -> int:
        runners = (runner for feature in installed(Feature) if (runner := feature.find_runner(config)) is not None)
        return await next(runners, serve_until_signal)(config, problems, source, last_resort)

    return run_logged(source, serve)


async def serve_until_signal(
    config: Config, problems: list[Problem], source: ConfigSource, last_resort: LastResort
) -> int:
    """Return the proxy's whole life. A second signal ends the drain at once."""

    async def listen(proxy: Proxy, signals: ProcessSignals, listeners: AsyncExitStack) -> None:
        await listeners.enter_async_context(public_listener(proxy, hurry=signals.hurry))
        endpoints = {name: [str(one.id) for one in cluster.endpoints] for name, cluster in proxy.clusters.items()}
        announce(config, proxy.public_url, endpoints)
        await listeners.enter_async_context(diagnosis(proxy))
        if (adviser := make_adviser(source)) is not None:
            proxy.adviser = await listeners.enter_async_context(adviser)

    return await run_until_signal(config, problems, source, last_resort, listen=listen)
