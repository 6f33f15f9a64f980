"""The context that a filter is built from, on a fake clock and without clusters."""

from __future__ import annotations

import random
from datetime import UTC, datetime

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cluster.routes import Routes
from kvproxy.operate.config.schema import Config
from kvproxy.operate.runtime.generation import StateStore
from kvproxy.proxy.filters.chain import FilterContext, Services
from kvproxy.proxy.request.body import HeldBodies
from kvproxy.proxy.settings import LimitSettings, LogSettings
from tests.support.clock import FakeClock

NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)


def filter_context(
    *,
    clock: FakeClock | None = None,
    limits: LimitSettings | None = None,
    log: LogSettings | None = None,
    store: StateStore | None = None,
) -> FilterContext:
    """Return a context whose wall clock stands at NOON; its states live from now on in `store`."""
    states = (store or StateStore()).draft_states()
    states.keep_states()
    config, metrics = Config(limits=limits or LimitSettings(), log=log or LogSettings()), Metrics()
    return FilterContext(
        config=config,
        metrics=metrics,
        clock=clock or FakeClock(),
        wall_clock=lambda: NOON,
        rng=random.Random(1),
        services=Services(
            clusters={},
            routes=Routes([]),
            pool=UpstreamPool(),
            bodies=HeldBodies(config.limits.bodies, metrics=metrics),
        ),
        states=states,
    )


def counted(context: FilterContext, name: str, **labels: str) -> float:
    """Return a sample of the context's metrics, once its chain serves; 0 when it was never counted."""
    for show in context.on_serving:
        show()
    return context.metrics.registry.get_sample_value(name, labels) or 0.0
