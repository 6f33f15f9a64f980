"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvproxy.cache.feature import CacheNeeds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.settings import AUTO
from kvproxy.features.kv_events.settings import find_mode
from kvproxy.operate.feature import OFF, ON, Capability, Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock
    from kvproxy.cache.clients.event_sources import KvEventSource
    from kvproxy.cluster.cluster import Cluster
    from kvproxy.cluster.settings import EventSources
    from kvproxy.features.kv_events.streams import EventStreams
    from kvproxy.features.kv_events.trial import WatchedStreams
    from kvproxy.operate.admin.findings import Trouble
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import Deployment
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.runtime.operated import AdminTarget


@dataclass(frozen=True, slots=True)
class FollowsEvents:
    """Settings by which streams are followed."""

    required: bool
    stated: EventSources
    timeout_s: float

    def __call__(self, clusters: Mapping[str, Cluster], *, metrics: Metrics, clock: Clock) -> EventStreams:
        """Return the streams of these clusters' engines, to be entered."""
        from kvproxy.features.kv_events.streams import EventStreams

        return EventStreams(
            clusters=clusters,
            timeout_s=self.timeout_s,
            metrics=metrics,
            clock=clock,
            stated=self.stated,
            required=self.required,
        )

    def watch(self, sources: Sequence[KvEventSource], *, clock: Clock, wall_clock: Clock) -> WatchedStreams:
        """Return the streams of one engine, to be watched while prompts are sent."""
        from kvproxy.features.kv_events.trial import WatchedStreams

        return WatchedStreams(sources, clock=clock, wall_clock=wall_clock)


class KvEvents(Feature):
    """Follows what engines store and remove, by their KV events."""

    name = "kv_events"
    metric_group = "KvEventMetrics"

    def needs(self, settings: KvCacheSettings) -> CacheNeeds:
        """Facts, where every engine is expected to publish."""
        return CacheNeeds(facts=find_mode(settings) is True)

    def follow_reports(self, settings: KvCacheSettings) -> FollowsEvents | None:
        """None: events are followed of no engine."""
        mode = find_mode(settings)
        return FollowsEvents(mode is True, settings.kv_event_sources, settings.request_timeout) if mode else None

    def find_troubles(self, operated: AdminTarget) -> Iterable[Trouble]:
        """Return the engines whose streams miss something."""
        from kvproxy.features.kv_events.operated import find_troubles

        return find_troubles(operated)

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return one row."""
        return (describe_capability(config, operated),)

    def list_checks(self, deployment: Deployment, *, trial: bool) -> Iterator[Check]:
        """Yield whether each engine publishes, and whether its events arrive while a prompt is sent."""
        from kvproxy.features.kv_events.check import check_event_sources, check_kv_events

        for engine in deployment.engines:
            yield check_event_sources(engine)
            if trial:
                yield check_kv_events(engine)


def describe_capability(config: Config, operated: AdminTarget | None) -> Capability:
    """Return whether events are followed, and of how many engines, if the proxy runs."""
    from kvproxy.cluster.feature import list_policies
    from kvproxy.cluster.routing.registry import policy_types
    from kvproxy.operate.capabilities import NO_FILTER
    from kvproxy.operate.config.schema import find_kvcache_settings

    name = "KV events"
    gain = "`kv_events: auto` follows what engines really hold"
    kvcache = find_kvcache_settings(config)
    if kvcache is None:
        return Capability(name, OFF, NO_FILTER, gain)
    mode = find_mode(kvcache)
    if not mode:
        return Capability(name, OFF, "`kv_events: false`", gain)
    policies = [policy for cluster in config.clusters.values() for policy in list_policies(cluster)]
    if mode == AUTO and not any(policy_types()[policy].uses_overlap for policy in policies):
        return Capability(name, OFF, "auto: no policy weighs cached prefixes", gain)
    word = "auto" if mode == AUTO else "required"
    if operated is None:
        return Capability(name, ON, "auto: of engines that publish" if mode == AUTO else "required of every engine")
    from kvproxy.features.kv_events.operated import count_publishing

    publishing, endpoints = count_publishing(operated)
    return Capability(name, ON if publishing else OFF, f"{word}: {publishing} of {endpoints} endpoints publish", gain)


FEATURE = KvEvents()
