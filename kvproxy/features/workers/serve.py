"""`kvproxy serve` with several workers: the supervisor's process."""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack

from prometheus_client import ProcessCollector

from kvproxy.base.background_task import TaskSet
from kvproxy.base.errors import Problem
from kvproxy.base.settings.compose import part_of
from kvproxy.features.workers.admin import WorkersAdmin
from kvproxy.features.workers.assignment import begins_alone, count_workers, shared_folder
from kvproxy.features.workers.metrics import WorkerMetrics
from kvproxy.features.workers.settings import WorkersPlace
from kvproxy.features.workers.supervisor import ServedConfig, Supervisor, WorkersFailed
from kvproxy.features.workers.workers import Workers
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.commands.last_resort import END_GRACE_S, LastResort
from kvproxy.operate.commands.serving import ProcessSignals, announce, make_adviser, make_reloader, open_admin
from kvproxy.operate.config.schema import Config
from kvproxy.operate.metrics.catalog import make_metrics
from kvproxy.proxy.listener.server import bind_sockets, url_of

logger = logging.getLogger("kvproxy")


async def supervise_until_signal(
    config: Config, problems: list[Problem], source: ConfigSource, last_resort: LastResort
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
            ServedConfig(config),
            count=count_workers(part_of(config, WorkersPlace).workers),
            public=public,
            folder=folder,
            on_restart=metrics.group(WorkerMetrics).worker_restarts.inc,
            on_hung=metrics.group(WorkerMetrics).worker_hangs.inc,
            first_alone=begins_alone(config),
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
    announce(config, url, endpoints, suffix=f" with {len(supervisor.slots)} workers")
