"""Settings of engines that sleep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Model, Name, Secret
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.config.schema import Config


class WakeCallSettings(Model):
    """An HTTP call that starts engines."""

    url: str
    """Where, without a query."""
    method: Literal["POST", "PUT", "GET"] = "POST"
    """With an empty body."""
    headers: Mapping[Name, Secret] = {}
    """Header fields, such as `authorization: Bearer ${SCALER_TOKEN}`."""


class SleepPlace(Model):
    """A cluster."""

    wake_within: Duration = Field(default=0.0, le=3600)
    """A request for a model whose engines all sleep has one of them woken by vLLM's `/wake_up`, and is held for at most
    this long; 0: engines are woken by others."""
    wake_call: WakeCallSettings | None = None
    """Made for a request while discovery finds no endpoint, so that another program starts one; the request is held
    for at most `wake_within`."""
    sleep_after: Duration = Field(default=0.0, le=604_800)
    """Put engines to sleep by vLLM's `/sleep` that were idle for this long; 0: never. Needs `wake_within`."""


def verify(config: Config) -> Iterator[Finding]:
    """Refuse what could neither see that engines sleep nor wake them again."""
    kvcache = next((one.settings for one in config.filters if isinstance(one.settings, KvCacheSettings)), None)
    reads = kvcache is not None and kvcache.enabled and kvcache.engine_metrics_interval > 0
    for name, cluster in config.clusters.items():
        own = part_of(cluster, SleepPlace)
        where = ("clusters", name)
        if own.sleep_after and not own.wake_within:
            yield error_at((*where, "sleep_after"), "needs wake_within, or nothing would wake the engines again")
        if own.wake_call is not None and (fault := url_fault(own.wake_call.url)):
            yield error_at((*where, "wake_call", "url"), fault)
        for header, value in {} if own.wake_call is None else own.wake_call.headers.items():
            if not value.get_secret_value().isascii():
                yield error_at((*where, "wake_call", "headers", header), "has characters beyond ASCII")
        if not own.wake_within and _has_wake_calls(cluster):
            yield error_at((*where, "wake_within"), "needed for a call that starts engines: how long requests wait")
        if own.wake_within and not reads:
            why = "needs the kvcache filter with engine_metrics_interval above 0, which reads that engines sleep"
            yield error_at((*where, "wake_within"), why)


def _has_wake_calls(cluster: ClusterSettings) -> bool:
    if part_of(cluster, SleepPlace).wake_call is not None:
        return True
    if not cluster.discovery.named:
        return False
    from kvproxy.cluster.feature import list_wake_calls  # some sources of endpoints have one

    return bool(list_wake_calls(cluster))


SETTINGS = FeatureSettings(fields={ClusterSettings: (SleepPlace,)}, verify=verify)
