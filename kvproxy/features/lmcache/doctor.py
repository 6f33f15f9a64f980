"""Checks of `kvproxy doctor` for LMCache, in their order, and which of its services answers, for `kvproxy init`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from kvproxy.base.installed import installed
from kvproxy.cache.clients.tokens import token_array
from kvproxy.cache.store import Prefix
from kvproxy.features.lmcache.check_lookup import check_chunk_size, check_lookup, check_lookup_time
from kvproxy.features.lmcache.check_service import check_actions, check_instances, check_service
from kvproxy.features.lmcache.controller import LMCacheController
from kvproxy.features.lmcache.coordinator import LMCacheCoordinator
from kvproxy.features.lmcache.service_facts import LmcacheFacts
from kvproxy.features.lmcache.settings import ServiceKind
from kvproxy.operate.doctor.check_reachability import check_connection
from kvproxy.operate.doctor.deployment import Deployment
from kvproxy.operate.doctor.report import Check
from kvproxy.operate.feature import Feature

_TIMEOUT_S = 3.0


def list_checks(lmcache: LmcacheFacts, deployment: Deployment, *, trial: bool) -> Iterator[Check]:
    """Yield the checks of one visit."""
    yield check_connection(lmcache.where, lmcache.origin, lmcache.try_link, deployment.tools.wall_clock)
    yield check_service(lmcache)
    yield check_instances(lmcache, deployment, trial=trial)
    yield check_actions(lmcache)
    for feature in installed(Feature):
        yield from feature.list_store_checks(lmcache)
    if trial:
        for engine in deployment.engines:
            yield check_lookup(engine, lmcache)
            yield check_chunk_size(engine, lmcache)
        if deployment.engines:
            yield check_lookup_time(lmcache, deployment.engines)


async def find_kind(http: httpx.AsyncClient, url: str) -> ServiceKind:
    """Return the service that answers there. Raises ClientError if it is none of LMCache's."""
    if await LMCacheCoordinator(http, url, timeout_s=_TIMEOUT_S).answers():
        return ServiceKind.COORDINATOR
    await LMCacheController(http, url, timeout_s=_TIMEOUT_S).lookup(Prefix(token_array([]), ""))
    return ServiceKind.CONTROLLER
