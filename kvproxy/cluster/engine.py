"""One engine at its address, with what its data-parallel ranks share: credential, health, breaker, which there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvproxy.cluster.adapters import Adapters
from kvproxy.cluster.health import Health
from kvproxy.cluster.ranks import Ranks
from kvproxy.config.cluster_schema import ClusterSettings, EndpointSettings
from kvproxy.resilience.breaker import Breaker
from kvproxy.types import Clock, EndpointId
from kvproxy.upstream.origin import Origin


class Engine:
    """A server as the cluster knows it. Its endpoints are its ranks, or it is the only one.

    `on_breaker_change` is called with it whenever what its breaker admits may have changed for another reason than
    time.
    """

    __slots__ = ("adapters", "authorization", "breaker", "health", "id", "members", "origin", "ranks")

    def __init__(
        self,
        config: EndpointSettings,
        settings: ClusterSettings,
        *,
        cluster: str,
        clock: Clock,
        on_breaker_change: Callable[[Engine], None],
        adapters: Adapters,
    ) -> None:
        self.id = EndpointId(config.id)
        self.origin = origin_of(config)
        self.health = Health(settings.health)
        name = f"{cluster}/{config.id}"
        self.breaker = Breaker(name, settings.breaker, clock=clock, on_change=partial(on_breaker_change, self))
        self.ranks = Ranks(config.data_parallel or settings.data_parallel)
        self.adapters = adapters
        self.members: tuple[EndpointId, ...] = ()  # its endpoints in the cluster
        self.configure(config, settings)

    def __repr__(self) -> str:
        return f"<Engine {self.id} {self.origin}>"

    def configure(self, config: EndpointSettings, settings: ClusterSettings) -> None:
        """Take over what may change while it runs."""
        self.health.settings = settings.health
        self.breaker.settings = settings.breaker
        self.ranks.configure(config.data_parallel or settings.data_parallel)
        key = config.api_key.get_secret_value() if config.api_key else ""
        self.authorization = f"Bearer {key}".encode() if key else None  # never in repr, status or logs

    def endpoint_id(self, rank: int | None) -> EndpointId:
        """What the endpoint of this rank is called; None: the engine as one."""
        return self.id if rank is None else EndpointId(f"{self.id}@{rank}")


def origin_of(config: EndpointSettings) -> Origin:
    """Where the engine listens; ValueError when its URL is none."""
    return Origin.parse(config.url, ca_file=config.ca_file, insecure=config.insecure, server_name=config.server_name)
