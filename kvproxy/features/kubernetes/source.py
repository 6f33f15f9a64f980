"""Endpoints from Kubernetes: the pods behind a service or with some labels, as they come and go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from random import Random
from typing import Any

from kvproxy.base.errors import DiscoveryError
from kvproxy.base.timed_thread import TimedThread
from kvproxy.base.types import Clock, Sleep
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.cluster.sources.entries import Answer, LeftOut
from kvproxy.cluster.sources.mirror import Mirror
from kvproxy.features.kubernetes.client import FILES_S, SERVICE_ACCOUNT, Collection, KubernetesAccess, ObjectT
from kvproxy.features.kubernetes.objects import (
    SERVICE_LABEL,
    EndpointSlice,
    Found,
    MadeEndpoints,
    Pod,
    endpoints_of_pods,
    endpoints_of_slices,
)
from kvproxy.features.kubernetes.settings import KubernetesDiscoverySettings

_SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
_PODS = "/api/v1/pods"
#: Pause after an update, as a multiple of its duration: thousands of pods that change all the time take a tenth of the
#: event loop.
_REST = 9.0


class KubernetesDiscovery:
    """Discovery of pods: each is an endpoint from when it is ready until it is gone or about to be. A pod that is no
    longer ready stays without new requests, since its cache data is worth keeping."""

    def __init__(
        self,
        settings: KubernetesDiscoverySettings,
        *,
        env: Mapping[str, str] = os.environ,
        clock: Clock,
        rng: Random,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._env = env
        self._clock = clock
        self._rng = rng
        self._sleep = sleep
        self._slices: Mirror[EndpointSlice | LeftOut] | None = None
        self._pods: Mirror[Pod | LeftOut] | None = None
        self._made = MadeEndpoints(settings)
        self._known: frozenset[str] = frozenset()  # ids that were ready once

    async def endpoints(self) -> Answer:
        """Those there are now, listed."""
        for mirror in await self._mirrors():
            await mirror.list_all()
        return self._found()

    async def follow(self, tell: Callable[[Answer | None, str], Awaitable[None]]) -> None:
        """As of a watched `Source`."""
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        mirrors = await self._mirrors()
        noted: list[str] = []

        async def note() -> None:
            noted[:] = [mirror.trouble for mirror in mirrors if mirror.trouble] or noted
            changed.set()

        async with asyncio.TaskGroup() as group:
            for mirror in mirrors:
                group.create_task(mirror.follow(note), name="kubernetes watch")
            while True:
                await changed.wait()
                changed.clear()
                began = loop.time()
                for trouble in noted[:1]:  # also one that is over already
                    await tell(None, trouble)
                noted.clear()
                if all(mirror.listed for mirror in mirrors):
                    await tell(self._found(), next((mirror.trouble for mirror in mirrors if mirror.trouble), ""))
                await asyncio.sleep(_REST * (loop.time() - began))  # changes meanwhile are reported together

    async def _mirrors(self) -> list[Mirror[Any]]:
        """Of what the settings need."""
        if self._slices is None and self._pods is None:
            settings = self._settings
            access = find_access(settings, self._env)
            namespace = await find_namespace(settings, TimedThread("namespace"))
            if settings.service:
                selector = f"{SERVICE_LABEL}={settings.service}"
                self._slices = self._mirror(
                    Collection(access, _SLICES, EndpointSlice, selector=selector, namespace=namespace, rng=self._rng)
                )
            if settings.selector:
                self._pods = self._mirror(
                    Collection(access, _PODS, Pod, selector=settings.selector, namespace=namespace, rng=self._rng)
                )
        return [mirror for mirror in (self._slices, self._pods) if mirror is not None]

    def _mirror(self, collection: Collection[Any]) -> Mirror[Any]:
        return Mirror(collection, clock=self._clock, rng=self._rng, sleep=self._sleep)

    def _found(self) -> Answer:
        unreadable: list[LeftOut] = []
        pods = {} if self._pods is None else _readable(self._pods.items, unreadable)
        self._made.begin()
        if self._slices is not None:
            found, faults = endpoints_of_slices(_readable(self._slices.items, unreadable).values(), pods, self._made)
        else:
            found, faults = endpoints_of_pods(pods.values(), self._made)
        members = tuple(self._members(found))
        self._known = frozenset(one.id for one in members)
        return (*members, *faults, *unreadable)

    def _members(self, found: Mapping[str, Found]) -> Iterator[EndpointSettings]:
        for name, one in found.items():
            if one.ready:
                yield one.endpoint
            elif name in self._known and not one.leaving:
                yield self._made.unready(one.endpoint)


def _readable(items: Mapping[str, ObjectT | LeftOut], unreadable: list[LeftOut]) -> dict[str, ObjectT]:
    unreadable += [one for one in items.values() if isinstance(one, LeftOut)]
    return {name: one for name, one in items.items() if not isinstance(one, LeftOut)}


def find_access(settings: KubernetesDiscoverySettings, env: Mapping[str, str]) -> KubernetesAccess:
    """Return how to reach the API."""
    api = settings.api
    return KubernetesAccess(api.url, api.token_file, api.ca_file) if api.url else KubernetesAccess.in_cluster(env)


async def find_namespace(settings: KubernetesDiscoverySettings, files: TimedThread) -> str:
    """Return where the engines are."""
    if settings.namespace:
        return settings.namespace
    try:
        return await files.call(_own_namespace, timeout_s=FILES_S)
    except (OSError, ValueError) as error:
        raise DiscoveryError(f"the namespace of this pod cannot be read ({error or type(error).__name__})") from error


def _own_namespace() -> str:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="ascii").strip()
    except OSError as error:
        raise DiscoveryError("no namespace is named, and this is no pod that has one: set `namespace`") from error
