"""Settings of prefill apart from decode."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Duration, Model
from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.cluster.settings import ClusterSettings, EndpointRole
from kvproxy.operate.config.schema import Config


class Connector(StrEnum):
    """Ways by which KV goes from the engine that prefills to the one that decodes."""

    OFF = "off"
    NIXL = "nixl"
    SGLANG = "sglang"
    MOONCAKE = "mooncake"
    LMCACHE = "lmcache"
    SIDECAR = "sidecar"


class DisaggregationSettings(Model):
    """Prefill apart from decode. Endpoints with `role: prefill` or `both` prefill, those with `decode` or `both`
    answer."""

    connector: Connector = Connector.OFF
    """The engines' own: `nixl` (vLLM's NixlConnector), `sglang` (its bootstrap), `mooncake` (vLLM's MooncakeConnector),
    `lmcache` (a store that both sides read), `sidecar` (llm-d's routing sidecar beside the decoder); `off`: every
    request goes to one endpoint."""
    min_tokens: int = Field(default=256, ge=1)
    """A prompt with fewer tokens that its decoder lacks is computed there."""
    lease: Duration = Field(default=30.0, gt=0, le=3600)
    """Time for which an engine holds prefilled blocks for their decoder (`kv_lease_duration`)."""
    prefill_timeout: Duration = Field(default=60.0, gt=0, le=3600)
    """Longest prefill elsewhere; then another endpoint prefills, or the decoder itself."""
    decode_timeout: Duration = Field(default=60.0, gt=0, le=3600)
    """Longest wait for the first byte of the decoder after that."""
    bootstrap_port: int = Field(default=8998, ge=1, le=65535)
    """Port at which SGLang's and Mooncake's prefillers are met."""
    canary: Duration = Field(default=600.0, ge=0, le=86400)
    """Interval at which each pair of endpoints must give the same 16 tokens separated and alone; before its first
    success a pair is not used. 0: pairs are used unproven."""


class DisaggregationPlace(Model):
    """A cluster."""

    disaggregation: DisaggregationSettings = DisaggregationSettings()
    """Prefill apart from decode, where it is cheaper than both at one endpoint."""


def verify(config: Config) -> Iterator[Finding]:
    """Doubt roles without effect, and refuse separation that no endpoints carry."""
    for name, cluster in config.clusters.items():
        roles = {one.role for one in cluster.endpoints}
        where = ("clusters", name, "disaggregation")
        settings = part_of(cluster, DisaggregationPlace).disaggregation
        on = settings.connector is not Connector.OFF
        if not on and EndpointRole.PREFILL in roles:
            what = "is off, and endpoints with `role: prefill` take no requests without it"
            yield warning_at((*where, "connector"), what, "name the engines' connector")
        elif on and roles and not cluster.discovery.named and roles <= {EndpointRole.PREFILL}:
            yield error_at((*where, "connector"), "needs an endpoint that answers: all have `role: prefill`")
        if settings.connector is Connector.MOONCAKE and not settings.canary:
            yield error_at((*where, "canary"), "is needed by `mooncake`: it asks for the engines' ids as well")


SETTINGS = FeatureSettings(fields={ClusterSettings: (DisaggregationPlace,)}, verify=verify)
