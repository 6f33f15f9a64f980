"""A cluster that follows a source, and the pauses between its attempts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import composed
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.settings import ClusterSettings, DiscoverySettings, HealthCheckSettings, PolicyName
from tests.cluster.conftest import Bench
from tests.support.clock import FakeClock


class Pauses:
    """A sleep that takes no time, unless it is held, and remembers how long it was to be."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._going = asyncio.Event()
        self._going.set()

    def hold(self) -> None:
        """From now on a pause ends only when told to."""
        self._going.clear()

    def go_on(self) -> None:
        """Pauses end at once again."""
        self._going.set()

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        await asyncio.sleep(0)
        await self._going.wait()


class Followed(Bench):
    """A cluster with its source, in words about its endpoints."""

    pauses: Pauses

    @property
    def conditions(self) -> dict[str, str]:
        """Of its members, by id."""
        now = self.clock()
        return {str(one.id): one.condition(now).value for one in self.cluster.endpoints}

    @property
    def urls(self) -> dict[str, str]:
        """Of its members, by id."""
        return {str(one.id): str(one.origin) for one in self.cluster.endpoints}

    @property
    def failing(self) -> float | None:
        """The gauge of its only source."""
        (source,) = self.cluster.poller.sources
        return self.sample("kvproxy_discovery_failing", cluster="c", source=source.name)


Follow = Callable[..., AbstractAsyncContextManager[Followed]]


@pytest.fixture
def follow(clock: FakeClock) -> Follow:
    """Enters a cluster named c whose discovery has these settings."""

    @asynccontextmanager
    async def entered(**discovery: Any) -> AsyncIterator[Followed]:
        settings = ClusterSettings(
            policy=PolicyName.ROUND_ROBIN,
            discovery=composed(DiscoverySettings)(**discovery),
            health=HealthCheckSettings(active=False),
        )
        metrics, pauses = Metrics(), Pauses()
        cluster = Cluster("c", settings, metrics=metrics, clock=clock, rng=random.Random(1), sleep=pauses)
        cluster.bind_gauges()
        async with cluster:
            followed = Followed(cluster, clock, metrics)
            followed.pauses = pauses
            yield followed

    return entered
