"""Features, as far as clusters meet them: sources of endpoints, observers of decisions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from kvproxy.base.installed import BaseFeature, installed

if TYPE_CHECKING:
    from kvproxy.base.metrics.groups import Metrics
    from kvproxy.base.types import Clock, Sleep
    from kvproxy.cluster.endpoint import Endpoint, EndpointObserver
    from kvproxy.cluster.pick import Pick
    from kvproxy.cluster.router_queue import RouterQueue
    from kvproxy.cluster.routing.admission import Admission
    from kvproxy.cluster.routing.load import Reservation
    from kvproxy.cluster.routing.policy import FactSource, OverlapFacts, Policy
    from kvproxy.cluster.routing.selector import Decision
    from kvproxy.cluster.routing.speeds import SpeedModel
    from kvproxy.cluster.settings import ClusterSettings, DiscoverySettings, EndpointSettings, PolicyName
    from kvproxy.cluster.sources.entries import Source


class ClusterTools(NamedTuple):
    """Surroundings of a cluster."""

    metrics: Metrics
    clock: Clock
    wall_clock: Clock
    rng: Random


class NumberedRequest(NamedTuple):
    """Facts about a request that may be sent with a number."""

    facts: OverlapFacts
    received_at: float
    level: int  # of its class, larger first
    own: int | None  # what a trusted client put into the member
    tenant: str


class RequestAddition(Protocol):
    """A number that engines of a cluster get in a member of the body. A client's own member is cut out, and an engine
    that refuses the member gets the request once more without."""

    #: Name of the member, name of the note on the outcome, and statuses of engines that refuse the member.
    member: str
    note: str
    refusals: frozenset[int]

    def choose_number(self, pick: Pick, asked: NumberedRequest) -> int | None:
        """Return the number; None: this request goes without."""
        ...

    def is_named(self, error: bytes) -> bool:
        """Return whether an engine's error may be about the member."""
        ...

    def record_refusal(self, endpoint: Endpoint) -> None:
        """Note that the engine took a request without the member that it had refused with the member."""
        ...


class ClusterObserver:
    """Observes one cluster as long as it lives; hooks that a class does not override are not called."""

    @property
    def addition(self) -> RequestAddition | None:
        """Return what requests are sent with, by endpoints and settings; read when these change."""
        return None

    @property
    def admission(self) -> Admission | None:
        """Return the rule by which requests wait for room in the engines' memory; read when the settings change."""
        return None

    def observe_endpoint(self, endpoint: Endpoint, config: EndpointSettings) -> EndpointObserver | None:
        """Return its observer of an endpoint, which is being made; None: it has none."""
        return None

    def placed(self, reservation: Reservation, speeds: SpeedModel, now: float) -> None:
        """React to a placed request in a cluster with learned speeds. Called in the turn of the decision: no wait."""


class ObservedCluster(Protocol):
    """A cluster, as features see it."""

    name: str
    settings: ClusterSettings
    queue: RouterQueue | None
    observers: Sequence[ClusterObserver]

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...
    @property
    def speeds(self) -> SpeedModel | None: ...


class SilentPolicy(Protocol):
    """Policy that takes part in every decision of a cluster without effect. It must not raise."""

    policy: Policy

    def decide(self, live: Decision[Endpoint], now: float) -> None:
        """Decide before the live decision takes effect."""
        ...

    def learn(self, teach: Callable[[Policy], None]) -> None:
        """Have the policy learn what `teach` passes on to it."""
        ...


#: The clusters there are, asked at each scrape: a reload may replace any.
ListClusters = Callable[[], Iterable[ObservedCluster]]


#: Starts engines, which discovery finds later. Raises ClientError or DiscoveryError.
WakeCall = Callable[[], Awaitable[None]]


class SourceTexts(NamedTuple):
    """Words about a source of facts, for people."""

    by: str  # of a prediction
    fix: str  # likely causes of wrong ones, and where to look


class ClusterFeature(BaseFeature):
    """Contributions of a feature to clusters."""

    #: Its lookups as sources of facts.
    fact_sources: ClassVar[Mapping[FactSource, SourceTexts]] = {}

    def list_sources(
        self, discovery: DiscoverySettings, *, clock: Clock, rng: Random, sleep: Sleep
    ) -> Sequence[Source]:
        """Return the sources of endpoints that these settings ask for."""
        return ()

    def find_silent_policy(self, settings: ClusterSettings) -> PolicyName | None:
        """Return the policy that it runs in a cluster with these settings without effect; None: it runs none."""
        return None

    def follow_decisions(self, name: PolicyName, policy: Policy, *, cluster: str, metrics: Metrics) -> SilentPolicy:
        """Return that policy as the cluster calls it."""
        raise NotImplementedError(self.name)

    def policy_types(self) -> Mapping[PolicyName, type[Policy]]:
        """Return its policies by name."""
        return {}

    def wakes_engines(self, settings: ClusterSettings) -> bool:
        """Return whether a request wakes engines that sleep in a cluster with these settings."""
        return False

    def make_wake_call(self, settings: ClusterSettings) -> WakeCall | None:
        """Return the call that starts engines of a cluster without endpoints; None: it has none."""
        return None

    def make_admission(self, settings: ClusterSettings) -> Admission | None:
        """Return its rule of admission for a cluster that is replayed; None: it has none."""
        return None

    def observe_cluster(self, cluster: ObservedCluster, tools: ClusterTools) -> ClusterObserver | None:
        """Its observer of this cluster, which is being made; None: it has none."""
        return None

    def show_clusters(self, metrics: Metrics, clusters: ListClusters, *, clock: Clock) -> None:
        """Bind its gauges, once for a process: they read the clusters there are at each scrape."""


def wakes_engines(settings: ClusterSettings) -> bool:
    """Return whether a cluster whose engines all sleep can serve nevertheless."""
    return any(feature.wakes_engines(settings) for feature in installed(ClusterFeature))


def list_wake_calls(settings: ClusterSettings) -> Sequence[WakeCall]:
    """Return the calls that start engines of a cluster."""
    made = (feature.make_wake_call(settings) for feature in installed(ClusterFeature))
    return [call for call in made if call is not None]


def list_policies(settings: ClusterSettings) -> Sequence[PolicyName]:
    """Return the policies that run in a cluster: its own, those without effect, and those that clients may ask for."""
    silent = (feature.find_silent_policy(settings) for feature in installed(ClusterFeature))
    return (settings.policy, *(name for name in silent if name is not None), *settings.client_policies)
