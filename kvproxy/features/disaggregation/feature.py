"""The feature, as the core meets it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
from pydantic import Field

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Duration, Model
from kvproxy.base.settings.paths import Finding, error_at, warning_at
from kvproxy.base.types import EndpointId
from kvproxy.cluster.settings import ClusterSettings, EndpointRole
from kvproxy.operate.feature import OFF, ON, Capability, Feature

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock
    from kvproxy.cluster.cluster import Cluster
    from kvproxy.cluster.endpoint import Endpoint
    from kvproxy.cluster.feature import ClusterObserver, ClusterTools, ListClusters, ObservedCluster
    from kvproxy.cluster.routing.selector import Decision
    from kvproxy.operate.admin.findings import Trouble
    from kvproxy.operate.companion import Companion, Siblings
    from kvproxy.operate.config.schema import Config
    from kvproxy.operate.doctor.deployment import ClusterFacts
    from kvproxy.operate.doctor.report import Check
    from kvproxy.operate.receipts.receipt import Receipt
    from kvproxy.operate.runtime.operated import AdminTarget
    from kvproxy.proxy.forward.engine_request import SplitsRequests


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


#: Its name.
NOTE = "disaggregation"

#: Its results: the decoder pulled the KV; it computed the prompt itself, since no prefill succeeded or its handle could
#: not be used, or since it refused the handle; it failed with the handle; it answered with an error that is not about
#: the handle.
PULLED = "pulled"
LOCAL = "local"
REFUSED = "refused"
FAILED = "failed"
ERROR = "error"


class Legs(msgspec.Struct, omit_defaults=True):
    """Legs of one request: the latest prefill, and what became of it."""

    prefill: EndpointId
    tokens: int  # of the prompt, that the decoder was to pull
    expected_s: float  # of the two legs, up to the first token
    local_s: float  # the same at the decoder alone
    result: str = ""
    prefill_s: float = 0.0
    prefills: int = 0  # that were tried


_RESULTS = {
    PULLED: "and its KV pulled from there",
    LOCAL: "in vain, so that the endpoint computed it itself",
    REFUSED: "but its KV was refused, so that the endpoint computed it itself",
    FAILED: "and the endpoint failed with it",
    ERROR: "and the endpoint answered with an error",
}


class Disaggregation(Feature):
    """Has prompts computed at one endpoint and answered at another, where that is cheaper."""

    name = "disaggregation"
    metric_group = "DisaggregationMetrics"
    settings = {ClusterSettings: (DisaggregationPlace,)}

    def verify(self, config: Config) -> Iterator[Finding]:
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

    def observe_cluster(self, cluster: ObservedCluster, tools: ClusterTools) -> ClusterObserver:
        """Return the pairs of a cluster, which the settings may use from any reload on."""
        from kvproxy.features.disaggregation.watch import Disaggregated

        return Disaggregated(cluster, tools)

    def show_clusters(self, metrics: Metrics, clusters: ListClusters, *, clock: Clock) -> None:
        """Bind the gauge of pairs."""
        from kvproxy.features.disaggregation.watch import show_pairs

        show_pairs(metrics, clusters)

    def split_requests(self, cluster: Cluster, settings: ClusterSettings) -> SplitsRequests | None:
        """None while it is off."""
        if part_of(settings, DisaggregationPlace).disaggregation.connector is Connector.OFF:
            return None
        from kvproxy.features.disaggregation.splitting import Splitter
        from kvproxy.features.disaggregation.watch import find_all

        return next((Splitter(cluster, state) for state in find_all([cluster])), None)

    def accompany(self, proxy: AdminTarget, config: Config, *, siblings: Siblings | None) -> Companion:
        """Return the sender of canaries."""
        from kvproxy.features.disaggregation.companion import CanaryService

        return CanaryService(clock=proxy.clock)

    def list_notes(self) -> Mapping[str, type[msgspec.Struct]]:
        """Return the legs of a request."""
        return {NOTE: Legs}

    def explain(self, receipt: Receipt) -> Iterator[str]:
        """Yield where the prompt was computed, and why there."""
        from kvproxy.operate.receipts.receipt import note_of

        if (legs := note_of(receipt, NOTE, Legs)) is not None:
            yield explain(legs)

    def describe_pick(self, decision: Decision[Endpoint], cluster: Cluster) -> Mapping[str, object]:
        """Return the endpoint that prefills, where one does."""
        from kvproxy.features.disaggregation.splitting import describe_prefill

        prefill = describe_prefill(decision, cluster)
        return {} if prefill is None else {"prefill": prefill}

    def find_troubles(self, operated: AdminTarget) -> Iterable[Trouble]:
        """Return the pairs that are out."""
        from kvproxy.features.disaggregation.findings import find_pairs_out

        return find_pairs_out(operated.clusters)

    def list_cluster_checks(self, cluster: ClusterFacts) -> Sequence[Check]:
        """Return the canary on each pair, or a look for the connector."""
        from kvproxy.features.disaggregation.check import check_connector, check_pairs

        settings = part_of(cluster.settings, DisaggregationPlace).disaggregation
        return ((check_connector if settings.connector is Connector.OFF else check_pairs)(cluster),)

    def list_capabilities(self, config: Config, operated: AdminTarget | None = None) -> Sequence[Capability]:
        """Return one row."""
        used = {
            part_of(one, DisaggregationPlace).disaggregation.connector.value for one in config.clusters.values()
        } - {Connector.OFF.value}
        if not used:
            return (Capability("prefill apart from decode", OFF, "`disaggregation.connector: off`, the default"),)
        return (Capability("prefill apart from decode", ON, f"`disaggregation.connector: {'/'.join(sorted(used))}`"),)


def explain(legs: Legs) -> str:
    """Return a sentence about the legs."""
    became = _RESULTS.get(legs.result, "when the client left")
    expected = f"; expected first token after {legs.expected_s:.3f} s, alone {legs.local_s:.3f} s"
    tried = f", the last of {legs.prefills} that were tried" if legs.prefills > 1 else ""
    return f"{legs.tokens} tokens of its prompt were computed at {legs.prefill}{tried}, {became}{expected}"


FEATURE = Disaggregation()
