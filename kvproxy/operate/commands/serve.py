"""`kvproxy serve`: the proxy on its listeners until SIGTERM, then a graceful end; or a supervisor with its workers."""

from __future__ import annotations

import argparse
import logging
import time
from contextlib import AsyncExitStack

from prometheus_client import ProcessCollector

from kvproxy.app import Proxy
from kvproxy.base.background_task import TaskSet
from kvproxy.base.errors import Problem
from kvproxy.features.workers.admin import WorkersAdmin
from kvproxy.features.workers.assignment import shared_folder
from kvproxy.features.workers.share import count_workers, keeps_snapshot
from kvproxy.features.workers.supervisor import Served, Supervisor, WorkersFailed
from kvproxy.features.workers.workers import Workers
from kvproxy.operate.commands.configuration import ConfigSource, named_engines, named_file
from kvproxy.operate.commands.last_resort import END_GRACE_S, LastResort
from kvproxy.operate.commands.serving import (
    ProcessSignals,
    announce,
    diagnosis,
    make_adviser,
    make_reloader,
    open_admin,
    public_listener,
    run_logged,
    run_until_signal,
)
from kvproxy.operate.config.schema import Config
from kvproxy.operate.metrics.catalog import make_metrics
from kvproxy.operate.metrics.process import ProcessMetrics
from kvproxy.proxy.listener.server import bind_sockets, url_of

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
        workers=args.workers,
    )
    return run(source)


def run(source: ConfigSource) -> int:
    """Serve until a signal; 0 after a graceful end."""

    async def serve(config: Config, problems: list[Problem], last_resort: LastResort) -> int:
        workers = count_workers(config.workers)
        if workers > 1:
            return await supervise_until_signal(config, problems, source, last_resort, count=workers)
        return await serve_until_signal(config, problems, source, last_resort)

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


async def supervise_until_signal(
    config: Config, problems: list[Problem], source: ConfigSource, last_resort: LastResort, *, count: int
) -> int:
    """Return the supervisor's whole life: it binds the sockets, keeps the workers, and is the operator's one
    listener."""
    signals = ProcessSignals(config.shutdown.drain, last_resort, grace_s=2 * END_GRACE_S)  # after that of its workers
    metrics = make_metrics()
    ProcessCollector(registry=metrics.registry)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(shared_folder())
        public = await bind_sockets(config.listen.host, config.listen.port, reuse_port=config.listen.reuse_port)
        url = url_of(config.listen.host, public[0].getsockname()[1], tls=config.listen.tls is not None)
        supervisor = Supervisor(
            Served(config),
            count=count,
            public=public,
            folder=folder,
            on_restart=metrics.group(ProcessMetrics).worker_restarts.inc,
            on_hung=metrics.group(ProcessMetrics).worker_hangs.inc,
            first_alone=keeps_snapshot(config),
        )
        workers = await stack.enter_async_context(Workers(supervisor, metrics=metrics))
        admin = WorkersAdmin(workers, clock=time.monotonic)
        supervisor.on_ended.append(admin.metrics.note_ended)
        reloader = make_reloader(workers, source, problems=problems, signals=signals)
        await open_admin(stack, admin.app(), config.admin)
        tasks = await stack.enter_async_context(TaskSet())
        tasks.start(_pass_on(signals, supervisor), name="signals to the workers")
        tasks.start(_once_all_serve(supervisor, url), name="announcement")
        if (adviser := make_adviser(source)) is not None:
            workers.adviser = await stack.enter_async_context(adviser)
        await stack.enter_async_context(reloader)
        try:
            await supervisor.run()
        except WorkersFailed as failed:
            logger.error("%s", failed)
            return 1
    logger.info("ended")
    return 0


async def _pass_on(signals: ProcessSignals, supervisor: Supervisor) -> None:
    await signals.stop.wait()
    supervisor.drain()
    await signals.hurry.wait()
    supervisor.hurry()


async def _once_all_serve(supervisor: Supervisor, url: str) -> None:
    await supervisor.all_ready.wait()
    config = supervisor.served.config
    endpoints = {name: [one.id for one in cluster.endpoints] for name, cluster in config.clusters.items()}
    announce(config, url, endpoints, workers=len(supervisor.slots))
