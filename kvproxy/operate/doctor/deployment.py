"""Everything a configuration names that can be visited."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.errors import ClientError, DiscoveryError, Refused
from kvproxy.cache.feature import find_reports
from kvproxy.cache.settings import KvCacheSettings, has_store
from kvproxy.cluster.discovery import sources_of
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, EventSources
from kvproxy.cluster.sources.entries import Source, split_answer
from kvproxy.operate.config.schema import Config, find_kvcache_settings
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.report import Finding, problem, warning
from kvproxy.operate.doctor.tools import Tools
from kvproxy.operate.doctor.trial import TrialPlan

T = TypeVar("T")
_FORBIDDEN = 403
_RIGHTS = "give the account a Role with these rights, as on the page of this discovery"
#: Duration for which a watched source is followed, to see that it works.
_WATCHED_S = 1.0
#: A lookup needs two whole chunks of a store's usual size to be distinguished from chance.
_LOOKUP_TOKENS = 2 * 256


class StoreFacts(Protocol):
    """The store beside the engines, as far as several features check it."""

    @property
    def where(self) -> str: ...
    @property
    def settings(self) -> KvCacheSettings: ...

    async def find_copying(self) -> str:
        """By which lever KV can be copied into an instance's memory; "": by none. Moves nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Deployment:
    """Engines in the order of the configuration; `undiscovered` has a finding for each discovery that failed.

    `kvcache` is None without that filter; `looks_up`: a store beside the engines is asked for prompts. `open_files` is
    the process's limit.
    """

    config: Config
    engines: tuple[EngineFacts, ...]
    tools: Tools
    kvcache: KvCacheSettings | None = None
    looks_up: bool = False
    tokenizer: EngineFacts | None = None
    undiscovered: tuple[Finding, ...] = ()
    open_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    @property
    def clusters(self) -> Sequence[ClusterFacts]:
        """Clusters with engines."""
        found = (ClusterFacts(self, name) for name in self.config.clusters)
        return [cluster for cluster in found if cluster.engines]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """One cluster of a deployment."""

    deployment: Deployment
    name: str

    @property
    def where(self) -> str:
        return f"cluster {self.name}"

    @property
    def settings(self) -> ClusterSettings:
        return self.deployment.config.clusters[self.name]

    @property
    def engines(self) -> tuple[EngineFacts, ...]:
        """Its engines in the order of the configuration."""
        return tuple(engine for engine in self.deployment.engines if engine.cluster == self.name)


async def survey_deployment(config: Config, *, tools: Tools, open_files: int | None = None) -> Deployment:
    """Return the deployment of a configuration, its discoveries asked once."""
    kvcache = find_kvcache_settings(config)
    lookups = kvcache is not None and has_store(kvcache)
    engines: list[EngineFacts] = []
    undiscovered: list[Finding] = []
    for name, cluster in config.clusters.items():
        endpoints, failed = await _endpoints(name, cluster)
        undiscovered += failed
        routed = tuple(dict.fromkeys(list_routed_models(config, name)))
        for endpoint in endpoints:
            follows = None if kvcache is None else find_reports(kvcache)
            plan = TrialPlan(len(engines), _LOOKUP_TOKENS if lookups else 0, follows)
            engines.append(
                EngineFacts(
                    endpoint,
                    cluster=name,
                    health_path=cluster.health.path,
                    tools=tools,
                    plan=plan,
                    label=f"endpoint {name}/{endpoint.id}" if len(config.clusters) > 1 else "",
                    routed=routed,
                    stated=_stated(endpoint, kvcache),
                    data_parallel=cluster.data_parallel,
                )
            )
    return Deployment(
        config,
        tuple(engines),
        tools,
        kvcache,
        lookups,
        _tokenizer(kvcache, tools),
        tuple(undiscovered),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0] if open_files is None else open_files,
    )


def list_routed_models(config: Config, cluster: str) -> list[str]:
    """Return the models that requests name at engines of this cluster, by the routes and the kvcache filter."""
    kvcache = find_kvcache_settings(config)
    names = [route.upstream_model or route.model for route in config.routes if route.cluster == cluster]
    if kvcache is not None and kvcache.default_model and len(config.clusters) == 1:
        names.append(kvcache.default_model)
    return [name for name in names if name and not name.endswith("*")]


async def gather_facts(
    engines: Sequence[EngineFacts], fact: Callable[[EngineFacts], Awaitable[T]]
) -> dict[EngineFacts, T]:
    """Return the fact of every engine that can be asked for it; why another cannot is that fact's own check's
    business."""
    found: dict[EngineFacts, T] = {}
    results = await asyncio.gather(*(fact(engine) for engine in engines), return_exceptions=True)
    for engine, result in zip(engines, results, strict=True):
        if isinstance(result, BaseException):
            if not isinstance(result, ClientError):
                raise result
        else:
            found[engine] = result
    return found


async def _endpoints(name: str, cluster: ClusterSettings) -> tuple[list[EndpointSettings], list[Finding]]:
    endpoints = list(cluster.endpoints)
    findings = []
    for source in sources_of(cluster.discovery):
        where = f"cluster {name}"
        place = f"clusters.{name}.discovery.{source.name}"
        try:
            found, left_out = await split_answer(await source.discovery.endpoints(), refuse=lambda _: "")
            endpoints += found
            findings += [
                problem(where, f"{source.name} discovery: {one}", "correct it at its source") for one in left_out
            ]
            trouble = await _hear_trouble(source) if source.follow is not None else ""
        except (ClientError, DiscoveryError, OSError) as error:
            found = ()
            trouble = str(error)
            refused = isinstance(error, Refused) and error.status == _FORBIDDEN
        else:
            refused = f"({_FORBIDDEN}" in trouble
        if trouble:
            fix = _RIGHTS if refused else f"correct {place}, or what it names"
            findings.append(problem(where, f"the {source.name} discovery fails: {trouble}", fix))
        elif not found and source.follow is not None:
            what = f"the {source.name} discovery lists no endpoint"
            findings.append(warning(where, what, f"is that so now? Otherwise correct {place}: are they ready there?"))
    return endpoints, findings


async def _hear_trouble(source: Source) -> str:
    """Return what is wrong with following a source that could be listed, such as an account that may list and not
    watch."""
    said = asyncio.get_running_loop().create_future()

    async def hear(_: object, trouble: str) -> None:
        if trouble and not said.done():
            said.set_result(trouble)

    assert source.follow is not None
    following = asyncio.ensure_future(source.follow(hear))
    try:
        await asyncio.wait([said, following], timeout=_WATCHED_S, return_when=asyncio.FIRST_COMPLETED)
        return said.result() if said.done() else ""
    finally:
        await cancel_tasks([following])


def _stated(endpoint: EndpointSettings, kvcache: KvCacheSettings | None) -> EventSources:
    """Return the configured KV event sources of an engine that does not report them."""
    if endpoint.kv_event_sources.endpoint or kvcache is None:
        return endpoint.kv_event_sources
    return kvcache.kv_event_sources


def _tokenizer(kvcache: KvCacheSettings | None, tools: Tools) -> EngineFacts | None:
    """Return the engine that tokenizes for all of them, where one is configured."""
    if kvcache is None or not kvcache.vllm_endpoint:
        return None
    endpoint = EndpointSettings(id="vllm_endpoint", url=kvcache.vllm_endpoint)
    return EngineFacts(
        endpoint, cluster="", health_path="/health", tools=tools, plan=TrialPlan(), label="vllm_endpoint of kvcache"
    )
