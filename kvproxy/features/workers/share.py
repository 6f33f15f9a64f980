"""Share of one worker in a configuration: bounds of the machine are divided, receipts have a file each, and a file that
all would replace is the first worker's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvproxy.base.installed import installed
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature
from kvproxy.operate.receipts.files import worker_path

#: Upper bound of `auto`: every worker also handles the messages of all the others.
AUTO_MOST = 8
_CGROUP = Path("/sys/fs/cgroup/cpu.max")


def take_share(config: Config, index: int, count: int) -> Config:
    """Its bounds add up to those configured, and none is less than one."""

    def part(whole: int) -> int:
        return -(-whole // count)

    limits = config.limits
    pool = config.pool
    receipts = config.receipts
    shared = config.model_copy(
        update={
            "limits": limits.model_copy(
                update={"connections": part(limits.connections), "bodies": max(limits.body, part(limits.bodies))}
            ),
            "pool": pool.model_copy(
                update={
                    "max_connections": part(pool.max_connections),
                    "max_idle": part(pool.max_idle),
                    "max_waiting": part(pool.max_waiting),
                }
            ),
            "receipts": receipts.model_copy(
                update={
                    "path": str(worker_path(Path(receipts.path), index)) if receipts.path else "",
                    "max_file": part(receipts.max_file),
                }
            ),
            "clusters": _with_part_of_queues(config.clusters, count),
        }
    )
    for feature in installed(Feature):
        shared = shared.model_copy(update=feature.share_settings(shared, index, part))
    return shared


def _with_part_of_queues(clusters: Mapping[str, ClusterSettings], count: int) -> dict[str, ClusterSettings]:
    """Return a share of each router queue."""
    return {
        name: one.model_copy(update={"queue": one.queue.model_copy(update={"limit": -(-one.queue.limit // count)})})
        for name, one in clusters.items()
    }


def begins_alone(config: Config) -> bool:
    """Return whether the first worker serves before the others start: it restores what they then ask it for, since its
    filters keep files that theirs do not."""
    return take_share(config, 0, 2).filters != take_share(config, 1, 2).filters


def count_workers(wanted: int | str, *, cores: float | None = None) -> int:
    """`auto` leaves one core to everything else."""
    if isinstance(wanted, int):
        return wanted
    free = int(usable_cores() if cores is None else cores) - 1
    return max(1, min(AUTO_MOST, free))


def usable_cores(*, cgroup: Path = _CGROUP) -> float:
    """Those the process may run on, or a container's share of their time where that is less."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = cgroup.read_text().split()[:2]
        return min(allowed, int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or `max`
        return allowed
